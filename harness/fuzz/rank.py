"""The rank that is attacked: a process of its own, so that its end, its memory and its silence are seen from outside.

Its two peers are `peer`, which the test impersonates, and `watcher`, which only says hello. It reads one JSON message per line
from standard input and ends with it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from disagg.core.errors import DisaggError
from disagg.core.rows import Pages
from disagg.layout.agreement import ModelId
from disagg.manager import KVManager, new_request_id
from disagg.protocol.peer_effects import ConnectionLimits
from harness.fuzz.samples import MODEL, VICTIM_SIDE, components

NUM_PAGES = 256
NEED = (0, 4 * NUM_PAGES)
DEADLINE_S = 60.0
NOWHERE = "tcp://127.0.0.1:9"
"""The address of `watcher`, where nobody listens."""


def main() -> None:
    """Run with the engine's name and the address of `peer` as arguments."""
    logging.basicConfig(level=logging.ERROR)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines write to standard output
    engine, address = sys.argv[1:]
    local, own = components(MODEL, VICTIM_SIDE, 0, num_pages=NUM_PAGES)
    limits = ConnectionLimits(hello_retry_s=0.005, max_hello_retry_s=0.02, heartbeat_s=0.02, heartbeat_timeout_s=600.0)
    manager = KVManager(
        name="me",
        topology=local.topology,
        components=own,
        model=ModelId("m", "r"),
        backend=engine,
        transport="auto" if engine == "local" else "tcp",
        connection_limits=limits,
    )
    _shorten_warm_up()
    with manager:
        manager.add_peer("peer", address=address)
        manager.add_peer("watcher", address=NOWHERE)
        _write(answers, {"address": manager.address})
        for line in sys.stdin:
            match json.loads(line):
                case {"op": "state"}:
                    _write(answers, _state(manager))
                case {"op": "receive"}:
                    _write(answers, {"opened": _receive(manager)})


def _shorten_warm_up() -> None:
    """Let engines wait only briefly for the first byte of a peer: most damaged endpoints lead nowhere."""
    for name, limit in (("nixl", "WARM_UP_S"), ("mooncake", "_WARM_S")):
        module = sys.modules.get(f"disagg.backends.{name}.backend")
        if module is not None:
            vars(module)[limit] = 0.2


def _state(manager: KVManager) -> dict[str, Any]:
    health = manager.health()
    return {
        "ok": health.ok,
        "problem": health.problem,
        "ready": health.peers["peer"].ready,
        "peer_problem": health.peers["peer"].problem,
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "connecting": any(thread.name.startswith("disagg-connect-") for thread in threading.enumerate()),
    }


def _receive(manager: KVManager) -> bool:
    """Open a receive from `peer`. Returns whether that was possible."""
    with suppress(DisaggError):
        manager.receiver(
            new_request_id(),
            peer="peer",
            rows={"kv": Pages(np.arange(NUM_PAGES, dtype=np.int32))},
            need={"kv": NEED},
            deadline_s=DEADLINE_S,
        )
        return True
    return False


def _write(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
