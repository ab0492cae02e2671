"""Adapters to inference engines. Importing this package imports no engine."""
