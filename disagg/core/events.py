"""Events that callers pass in."""

from __future__ import annotations

from typing import Protocol


class ReadyEvent(Protocol):
    """Passes when the caller's kernels are done with memory, such as a torch or CUDA event."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
