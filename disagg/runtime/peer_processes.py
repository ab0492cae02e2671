"""The processes of peers on this host, as the kernel attests them. The name of a manager's identity socket
(`disagg.machine.processes`) follows from its instance, rank and epoch. A peer has proved these on its control channel, so
it cannot pass off another process as its own.
"""

from __future__ import annotations

import hashlib
import select
import threading
import weakref

from disagg.core.thread_log import ThreadLog
from disagg.machine.processes import IdentitySocket, ProcessWatch

logger = ThreadLog(__name__)


def socket_name(instance: str, rank: int, epoch: int) -> str:
    digest = hashlib.blake2b(f"{instance}\0{rank}\0{epoch}".encode(), digest_size=16)
    return f"disagg-process-{digest.hexdigest()}"


class PeerProcesses:
    """Thread-safe. A process is watched as long as somebody holds its watch: a peer may name one epoch after the other."""

    def __init__(self, instance: str, rank: int, epoch: int) -> None:
        self._lock = threading.Lock()
        self._watches = weakref.WeakValueDictionary[str, ProcessWatch]()
        self._epoll = select.epoll()
        self._has_news = False
        self._may_be_gone = False
        self._socket: IdentitySocket | None = None
        try:
            self._socket = IdentitySocket(socket_name(instance, rank, epoch))
        except OSError as error:
            logger.warning("%s/%d: peers of this host cannot attest this process: %s", instance, rank, error)

    def attest(self, instance: str, rank: int, epoch: int) -> ProcessWatch | None:
        """`None` unless the rank is on this host and the kernel attests its process."""
        name = socket_name(instance, rank, epoch)
        with self._lock:
            self._sweep()
            known = self._watches.get(name)
            found = known if known is not None and not known.has_ended() else ProcessWatch.attest(name)
            if found is not None and found is not known:
                self._watches[name] = found
                self._epoll.register(found.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
            return found

    def have_ended(self) -> bool:
        """Whether an attested process has ended since the last call. Costs the same for any number of them."""
        with self._lock:
            self._look()
            found, self._has_news = self._has_news, False
            return found

    def _look(self) -> None:
        if not self._epoll.closed and self._epoll.poll(0):
            self._has_news = self._may_be_gone = True

    def _sweep(self) -> None:
        """Forget processes that are gone. If none has ended, the cost does not depend on their number."""
        self._look()
        if not self._may_be_gone:
            return
        for each, watch in list(self._watches.items()):
            if watch.is_gone():
                watch.close()
                del self._watches[each]
        self._may_be_gone = any(watch.has_ended() for watch in list(self._watches.values()))

    def prune(self) -> None:
        """Keeps room for peers that attest this process."""
        with self._lock:
            if self._socket is not None:
                self._socket.prune()

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            for watch in list(self._watches.values()):
                watch.close()
            self._watches.clear()
            self._epoll.close()
