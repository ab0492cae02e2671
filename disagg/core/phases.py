"""Time spent in the phases of a transfer."""

from __future__ import annotations

import msgspec


class Phases(msgspec.Struct, kw_only=True):
    """Seconds spent binding rows, packing, posting, on the wire (from the first post to the end), and unpacking."""

    bind_s: float = 0.0
    pack_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0
    unpack_s: float = 0.0

    def add_phases(self, other: Phases) -> None:
        """Add the times of `other`."""
        self.bind_s += other.bind_s
        self.pack_s += other.pack_s
        self.post_s += other.post_s
        self.wire_s += other.wire_s
        self.unpack_s += other.unpack_s
