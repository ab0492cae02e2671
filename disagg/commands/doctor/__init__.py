"""`disagg doctor`: what a machine supports, and what is wrong with it."""
