"""`disagg-bench`: cases over real ranks, verified and timed."""
