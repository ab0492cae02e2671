"""When bytes move: one protocol for every backend, without I/O and without a clock."""
