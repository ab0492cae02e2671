"""Tests of the classes that import SGLang run in its environment only (`make test-sglang`). There it must not be missing."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("sglang") is None and os.environ.get("TEST_REQUIRE_SGLANG") != "1":
    collect_ignore = ["test_bootstrap.py", "test_plugin.py", "test_pools.py", "test_ranks.py", "test_servers.py"]
