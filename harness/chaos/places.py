"""Where ranks run: in which network namespace, as which user, and with how much of `/proc` in sight.

Two hosts are two network namespaces, joined by a bridge in a third. Both see the same processes and have the same boot id, as
two containers of one machine may. All of this takes root, and the commands `ip`, `unshare`, `setpriv` and `mount`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OTHER_USER = 65534
_COMMANDS = ("ip", "ss", "nsenter", "unshare", "setpriv", "mount", "sh")
RESET = ("ss", "--kill", "--tcp", "--numeric", "--no-header", "state", "established")
"""The command that resets the TCP connections to which the rest of its arguments apply."""
_CLONE_NEWNET = 0x40000000
_CAPABILITIES = "-all,+dac_read_search"
"""The other user reads every file, because the interpreter may lie in a directory of root's. It may not trace processes."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs. `user` is the number of another user. With `hidepid` 1 that user sees no details in `/proc` of the
    processes of others, with 2 not even that they exist.
    """

    namespace: str | None = None
    user: int | None = None
    hidepid: int = 0

    def command(self, arguments: list[str]) -> list[str]:
        """`arguments` as a command that runs there, in the process that is started."""
        if self.user is not None:
            capabilities = (f"--inh-caps={_CAPABILITIES}", f"--ambient-caps={_CAPABILITIES}")
            user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", *capabilities]
            arguments = [*user, *arguments]
        if self.hidepid:
            script = f'mount -t proc -o hidepid={self.hidepid} proc /proc && exec "$@"'
            arguments = ["unshare", "--mount", "sh", "-c", script, "sh", *arguments]
        if self.namespace is not None:
            arguments = ["ip", "netns", "exec", self.namespace, *arguments]
        return arguments


def missing_for_places() -> str:
    """What this process lacks to start ranks in other places; empty if nothing."""
    if os.geteuid() != 0:
        return f"root, found user {os.geteuid()}"
    if missing := [name for name in _COMMANDS if shutil.which(name) is None]:
        return f"the commands {', '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"the right to create namespaces: {done.stderr.strip()}"


def missing_for_resets() -> str:
    """What this process lacks to reset TCP connections; empty if nothing. Tries it with one of its own."""
    if missing := missing_for_places():
        return missing
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as opened:
        ports = f"( sport = :{opened.getsockname()[1]} and dport = :{listener.getsockname()[1]} )"  # another may share one
        done = subprocess.run([*RESET, ports], capture_output=True, text=True, check=False)
        is_reset = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
    return "" if is_reset else f"a kernel with CONFIG_INET_DIAG_DESTROY: {done.stderr.strip() or 'nothing was reset'}"


class Hosts:
    """Two hosts and the link between them. `close` removes them, after their processes have ended."""

    def __init__(self) -> None:
        prefix = f"chaos{os.getpid()}"
        self._bridge = f"{prefix}-bridge"
        self.namespaces = (f"{prefix}-a", f"{prefix}-b")
        self.addresses = ("10.231.0.1", "10.231.0.2")
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        for namespace in (self._bridge, *self.namespaces):
            _ip("netns", "add", namespace)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")
        for port, (namespace, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            ends = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", self._bridge, "link", "add", f"port{port}", *ends)
            _ip("-n", self._bridge, "link", "set", f"port{port}", "master", "br0", "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", namespace, "link", "set", device, "up")

    def cut(self, *, silently: bool) -> None:
        """Cut the link: its far end goes down, or packets vanish `silently` on the way."""
        _ip("-n", self._bridge, "link", "set", "port1", *(("nomaster",) if silently else ("down",)))

    def mend(self) -> None:
        """Repair the link."""
        _ip("-n", self._bridge, "link", "set", "port1", "master", "br0", "up")

    def close(self) -> None:
        for namespace in (*self.namespaces, self._bridge):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _enter(namespace: Path) -> None:
    with namespace.open() as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread is on that host in the block, and what it starts."""
    with Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open() as before:
        _enter(Path("/var/run/netns", namespace))
        try:
            yield
        finally:
            _enter(Path(f"/proc/self/fd/{before.fileno()}"))


def slow_down(rate: str) -> None:
    """Let this host send no faster."""
    shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
    subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", *shape], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
