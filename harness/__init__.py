"""Test programs and reference implementations that are not shipped."""
