"""`python -m disagg.cli` is the command `disagg`."""

from __future__ import annotations

from disagg.cli import main

main()
