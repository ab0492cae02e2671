"""The commands `disagg` and `disagg-bench`."""
