"""`disagg doctor` checks a machine: what it supports, and what is wrong with it."""
