"""Fuzzes everything that reads a peer's bytes: decoders, the code that uses their results, and a live control port.

Inputs are damaged valid ones. Either their bytes are flipped, cut, repeated or spliced; or some of their values are replaced
by boundary values, other types or long ones. Each input is a function of the seed, its target and its number, so a failure
names one input. A target may refuse an input with the errors that its decoder documents. Everything else is a finding:
another error, an input that takes longer than `SLOW_S`, or memory that grows::

    python -m harness.fuzz --inputs 1000000 --seed 1 --jobs 2
    python -m harness.fuzz --only table:8123 --seed 1
"""
