"""Cases of a benchmark: sides, workloads, contents, and what a rank is told about them."""
