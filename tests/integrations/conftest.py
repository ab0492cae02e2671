"""The tests of a server's connector run in that server's own environment: `make test-vllm`, `make test-cross`."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["vllm", "cross"]
