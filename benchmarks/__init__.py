"""Programs that measure the library and the engines under it. Run one with `python -m benchmarks.NAME`."""
