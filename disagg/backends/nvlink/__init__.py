"""The NVLink backend."""
