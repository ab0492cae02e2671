"""`python -m disagg.commands` is the command `disagg`."""

from __future__ import annotations

from disagg.commands.main import main

main()
