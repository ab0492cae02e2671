"""What tests see of a manager's runtime, and do in its control thread. Other tests need not know the runtime's parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from threading import Thread

from disagg import KVManager
from disagg.core import _native
from disagg.requests import Receiver, Sender


def depth(manager: KVManager, queue: str) -> int:
    """How many items wait in a queue, by its name in the metrics."""
    return manager._runtime.queue_depths()[queue]


def num_rejected_hellos(manager: KVManager) -> int:
    return manager._runtime.dispatch.num_rejected_hellos


def num_refused_messages(manager: KVManager) -> int:
    return manager._runtime.dispatch.num_refused_messages


def num_refused_frames(manager: KVManager) -> int:
    """Messages that the control channel has refused."""
    return manager._runtime.channel.refused


def num_losses(manager: KVManager) -> Mapping[str, int]:
    """How often a rank of each peer was lost."""
    return manager._runtime.connections.num_losses


def open_handles(manager: KVManager) -> list[Sender | Receiver]:
    return manager._runtime.requests.open_handles()


def in_control_thread(manager: KVManager, call: Callable[[float], None]) -> None:
    """Have the control thread call this with the time."""
    manager._runtime.command(call)


def skip_loans(manager: KVManager, count: int) -> None:
    """Have a rank number its next loan of a slot as if it had lent that many before."""
    lender = manager._runtime.sessions.lender
    in_control_thread(manager, lambda _: setattr(lender, "_numbers", itertools.count(next(lender._numbers) + count)))


def has_reports(manager: KVManager) -> bool:
    """Whether the worker has reports that the control thread has not taken yet."""
    return manager._runtime.worker.has_reports


def count_busy_polls(manager: KVManager) -> list[float]:
    """How long each busy poll of the control thread may take, from now on."""
    channel, seconds_of = manager._runtime.channel, list[float]()
    busy_poll = channel.busy_poll

    def counted(seconds: float, completions: list[_native.Completion]) -> bool:
        seconds_of.append(seconds)
        return busy_poll(seconds, completions)

    channel.busy_poll = counted  # type: ignore[method-assign]
    return seconds_of


def threads(manager: KVManager) -> list[Thread]:
    """Of control and of transfers."""
    return [manager._runtime.loop.thread, manager._runtime.worker.thread]
