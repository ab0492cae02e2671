"""What a machine can do and what is wrong with it, as findings: cause, consequence, and the command that fixes it."""
