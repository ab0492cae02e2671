"""The values that all other packages share: memory, rows, copies, leases, errors. Imports no other package of `disagg`."""

import importlib
from pathlib import Path

try:
    importlib.import_module("disagg.core._native")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"disagg was imported from {Path(__file__).parents[2]}, which has no compiled module. If that is a source tree, "
        "start Python in another folder, or use the interpreter that `make setup` has prepared there"
    ) from error
