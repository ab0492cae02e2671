"""Inference servers that run on this library. Importing this package imports no server."""
