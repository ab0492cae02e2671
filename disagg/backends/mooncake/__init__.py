"""The Mooncake backend."""
