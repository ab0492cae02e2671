"""Cases of a benchmark: sides, workloads, contents, and the commands that a rank receives about them."""
