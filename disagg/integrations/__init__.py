"""Inference servers that run on this library. Importing one of these packages imports the server."""
