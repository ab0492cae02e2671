"""`disagg doctor` checks what a machine supports and what is wrong with it."""
