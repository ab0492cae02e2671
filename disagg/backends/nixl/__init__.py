"""The NIXL backend."""
