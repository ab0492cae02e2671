"""`python -m disagg.bench` is the command `disagg-bench`."""

from __future__ import annotations

from disagg.bench import main

main()
