"""Who owns a bootstrap room.

SGLang keeps a request's status in tables by room. Clients choose rooms, and all samples of a request (`n` above 1) get the
same one. So a room has one owner, a sender or a receiver, until SGLang clears it. Any other gets a key of its own, under
which it fails.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

NUM_ROOMS = 1 << 16


class Rooms:
    def __init__(self) -> None:
        self._owners: dict[int, Any] = {}
        self._attempts: OrderedDict[int, int] = OrderedDict()
        self._keys = itertools.count(-1, -1)

    def enter(self, room: int, owner: Any) -> int:
        """The key of `owner` in SGLang's tables: the room, or a negative number if it is taken."""
        key = room if room not in self._owners else next(self._keys)
        self._owners[key] = owner
        return key

    def is_taken(self, room: int) -> bool:
        return room in self._owners

    def owns(self, key: int, owner: Any) -> bool:
        return self._owners.get(key) is owner

    def leave(self, key: int, owner: Any) -> bool:
        """Returns whether `owner` was the owner."""
        if not self.owns(key, owner):
            return False
        del self._owners[key]
        return True

    def next_attempt(self, room: int) -> int:
        """How often this room was used before. All ranks of a group create its receivers in the same order."""
        attempt = self._attempts[room] = self._attempts.pop(room, -1) + 1
        if len(self._attempts) > NUM_ROOMS:
            self._attempts.popitem(last=False)
        return attempt

    def __len__(self) -> int:
        return len(self._owners)


def taken(room: int | None) -> str:
    return (
        f"bootstrap_room {room}: another request with this room is under way; give each request a room of its own, and ask for "
        "several answers to a prompt (n above 1) in separate requests"
    )
