"""Tests of the classes that import SGLang run in its environment only (`make test-sglang`). There it must not be missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

WITHOUT_SGLANG = ("test_layout.py", "test_payload.py")

if importlib.util.find_spec("sglang") is None and os.environ.get("TEST_REQUIRE_SGLANG") != "1":
    collect_ignore = [each.name for each in Path(__file__).parent.glob("test_*.py") if each.name not in WITHOUT_SGLANG]
