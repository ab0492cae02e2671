"""Simulates the protocol in memory and in virtual time, with faults, and checks it against a model of the truth.

`World` keeps time and the ranks' sessions; `Servers`, `Network`, `Engine` and `Losses` act on it; `Simulation` joins
them. A simulation raises `Violation` as soon as one of these does not hold:

* no row is released while a transfer may still read or write it, and no byte lands in rows of another request;
* a receive succeeds only with every needed cell from every elected writer, and with the payload; a send succeeds only
  where all its destinations did;
* no request is received by two instances or twice, and the rows of one that is kept stay until someone takes it or it ends;
* a session moves only to states that its table leads to, in one step or several, and reports its end to its server once,
  by its deadline;
* at the end nothing is left: no session, timer, reserve or lease. The exception is rows that were never proved
  quiet: these are quarantined.

`python -m harness.simulator --schedules 10000 --seed 1` runs random schedules. A failure names the seed of its
schedule; `--only` repeats it.
"""
