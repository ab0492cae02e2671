"""`python -m disagg.commands` runs `disagg`."""

from __future__ import annotations

from disagg.commands.main import main

main()
