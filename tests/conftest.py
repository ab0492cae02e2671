"""Profiles of the property tests: `dev` on a person's machine, `ci` where everything is tried for longer."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=120, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("TEST_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))
