"""Closes a manager: once, from any thread, at the latest with the interpreter, and only in the process that built it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Container

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 30.0
"""How long the interpreter's end waits for all open managers."""
_open: set[Lifetime] = set()


class Lifetime:
    """`threads` are the manager's own, in which callbacks of the server run. `inherited` says why a forked child cannot use
    the manager; it is empty elsewhere. `close` runs in a thread of its own, so that an interrupted caller leaves nothing
    half closed, and callbacks of the server then run in that one.
    """

    def __init__(self, close: Callable[[], None], *, threads: Callable[[], Container[threading.Thread]]) -> None:
        self._close = close
        self._threads = threads
        self._lock = threading.Lock()
        self._closer: threading.Thread | None = None
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None
        """The one that closes, unless it is the caller's."""
        self._pid = os.getpid()
        self.inherited = ""
        _watch_process()
        _open.add(self)

    @property
    def problem(self) -> str:
        if self.inherited or self._over.is_set():
            return self.inherited or "the manager was closed"
        return "the manager is closing" if self._closer is not None else ""

    def end(self, *, timeout_s: float | None = None) -> None:
        """Close, or wait for the thread that does; the first call raises what closing raises. One of the manager's threads
        cannot wait: then this returns at once.
        """
        if self.inherited:
            return
        current = threading.current_thread()
        with self._lock:
            is_first = self._closer is None
            if self._closer is None:
                self._closer = self.thread = threading.Thread(target=self._run, name="disagg-close", daemon=True)
                try:
                    self.thread.start()
                except RuntimeError:  # no thread is left, or the interpreter ends
                    self._closer, self.thread = current, None
            closer = self._closer
        if closer is current:
            if is_first:  # else a callback in the thread that closes
                self._run()
        elif current in self._threads():
            return
        else:
            self._over.wait(timeout_s)
        if is_first and self._error is not None:
            raise self._error

    def forget(self) -> None:
        """The engine is closed: a child that is forked from now on has nothing to leave alone."""
        _open.discard(self)

    def inherit(self) -> None:
        """In a forked child locks may be held for ever, and a finalizer would tell peers or devices that the parent's
        engine has ended. So the manager is never freed.
        """
        self.inherited = f"process {self._pid} has built this manager; a forked child cannot use it, and builds its own"
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _run(self) -> None:
        try:
            self._close()
        except BaseException as error:  # also if no caller is left to raise it
            logger.exception("a manager could not be closed")
            self._error = error
        finally:
            self._over.set()


@functools.cache
def _watch_process() -> None:
    os.register_at_fork(after_in_child=_inherit_all)
    atexit.register(_end_all)


def _inherit_all() -> None:
    while _open:
        _open.pop().inherit()


def _end_all() -> None:
    """At exit, since later the threads would run into an interpreter that is being torn down."""
    if not _open:
        return
    thread = threading.Thread(target=_end_each, name="disagg-exit", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts no thread any more at this point
        _end_each(timeout_s=EXIT_TIMEOUT_S)
        return
    thread.join(EXIT_TIMEOUT_S)
    if thread.is_alive():
        logger.error("the managers could not be closed within %s s of the interpreter's end", EXIT_TIMEOUT_S)


def _end_each(*, timeout_s: float | None = None) -> None:
    for lifetime in tuple(_open):
        try:
            lifetime.end(timeout_s=timeout_s)
        except Exception:
            logger.exception("a manager could not be closed at the interpreter's end")
