"""Events that callers pass in."""

from __future__ import annotations

from typing import Protocol


class ReadyEvent(Protocol):
    """What a caller gives to say when its kernels are done with memory; a torch or CUDA event is one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
