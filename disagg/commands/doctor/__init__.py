"""`disagg doctor`: what a machine can do and what is wrong with it."""
