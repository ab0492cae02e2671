"""`python -m disagg.commands.bench` is the command `disagg-bench`."""

from __future__ import annotations

from disagg.commands.bench.main import main

main()
