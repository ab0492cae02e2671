"""`python -m disagg.commands.bench` runs `disagg-bench`."""

from __future__ import annotations

from disagg.commands.bench.main import main

main()
