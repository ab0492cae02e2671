"""The contract test class that every backend must pass."""
