"""Agreements with peers, computed outside the control thread, since electing writers may take a second. Until then hellos
are answered with `busy`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from disagg.core.errors import LayoutError
from disagg.layout.agreement import Agreement, LocalRank
from disagg.protocol.peer_effects import Undecided

MAX_TABLE_NBYTES = 4 << 20
"""One rank takes about 600 bytes for each component."""
MAX_RANKS = 4096
"""Each costs a connection and some memory."""
MAX_AGREEMENTS, MAX_KEPT_NBYTES = 256, 16 << 20
"""The most agreements, and bytes of their tables, that are kept. Instances with equal layouts share an agreement, which takes
up to 25 times the bytes of its table.
"""
MAX_COMPARING = 4
"""Each in a thread, and of another instance; other tables wait for the next hello."""


class Agreements:
    """By the peer's encoded table. Used by one thread."""

    def __init__(self, local: LocalRank) -> None:
        self._local = local
        self._found: OrderedDict[bytes, Future[Agreement | str | None]] = OrderedDict()
        self._comparing: dict[str, Future[Agreement | str | None]] = {}

    def get(self, table: bytes, instance: str) -> Agreement:
        """Raises `Undecided` while it is being computed, `LayoutError` if the layouts do not match."""
        if len(table) > MAX_TABLE_NBYTES:
            raise LayoutError(f"layout table: expected at most {MAX_TABLE_NBYTES} bytes, found {len(table)}")
        known = self._found.get(table)
        done = [each for each, result in self._found.items() if result.done()]
        self._comparing = {name: each for name, each in self._comparing.items() if not each.done()}
        if known is None and instance not in self._comparing and len(self._comparing) < MAX_COMPARING:
            known = Future()
            try:
                threading.Thread(target=self._compare, args=(table, known), name="disagg-compare", daemon=True).start()
            except RuntimeError as error:
                raise Undecided(f"no thread to compare layouts with: {error}", retry_s=0.5) from error
            self._found[table] = self._comparing[instance] = known
            while done and (len(done) >= MAX_AGREEMENTS or sum(map(len, self._found)) > MAX_KEPT_NBYTES):
                del self._found[done.pop(0)]
        if known is None or not known.done():
            raise Undecided("the layouts of both sides are being compared")
        self._found.move_to_end(table)
        agreement = known.result()
        if agreement is None:
            del self._found[table]
            raise Undecided("there was no memory to compare the layouts of both sides", retry_s=0.5)
        if isinstance(agreement, str):
            raise LayoutError(agreement)
        if agreement.num_ranks > MAX_RANKS:
            raise LayoutError(f"layout table: expected at most {MAX_RANKS} ranks, found {agreement.num_ranks}")
        return agreement

    def _compare(self, table: bytes, result: Future[Agreement | str | None]) -> None:
        """In a thread of its own. Of an error only the text is kept: its frames hold the table. `None`: try again."""
        try:
            result.set_result(Agreement.between(self._local, table))
        except LayoutError as error:
            result.set_result(str(error))
        except MemoryError:
            result.set_result(None)
        except Exception as error:  # noqa: BLE001 (raised again by `get`)
            result.set_result(f"layout table: {type(error).__name__}: {error}")
