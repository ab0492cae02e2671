"""Fuzzes everything that reads a peer's bytes: decoders, the code that uses their results, and live ranks.

Inputs are damaged valid ones. Either their bytes are flipped, cut, repeated or spliced; or some of their values are replaced
by boundary values, other types or long ones. Each input is a function of the seed, its target and its number, so a failure
names one input. A target may refuse an input with the errors that its decoder documents. Everything else is a finding:
another error, or an input that takes longer than `SLOW_S`.

A live rank is a process of its own. It gets damaged messages, valid messages that are as costly as possible, and welcomes
with damaged endpoints of its engine. Its memory, its longest silence towards another peer and its crashes are counted, and
bounded::

    python -m harness.fuzz --inputs 1000000 --seed 1 --jobs 2
    python -m harness.fuzz --only table:8123 --seed 1
    python -m harness.fuzz --inputs 0 --port 0 --costly 0 --endpoints 5000 --crashes-in crashes
"""
