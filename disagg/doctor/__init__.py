"""What a machine can do and what is wrong with it, as findings: cause, consequence, and the command that fixes it.

Nothing is imported here: backends take their words from `disagg.doctor.machine` when they refuse to start.
"""
