"""The programs `disagg` and `disagg-bench`."""
