"""Prefill in one process, decode in another, on real model code: small local configs, seeded weights, no download."""
