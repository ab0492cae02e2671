"""Chromium without a window, from Debian's packages, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.debian import fetched

PATIENCE_S = 60.0


class BrowserError(Exception):
    """The browser has ended, does not answer, or refused a command."""


class Page:
    """One page of a browser. Widths and heights are in CSS pixels."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._session = b"", 0, ""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def command(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the protocol. Raises `BrowserError`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._to, data) :]
        until = time.monotonic() + PATIENCE_S
        while True:
            answer = self._read(until, method)
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self, until: float, method: str) -> dict[str, Any]:
        """The next message of the browser."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise BrowserError(f"{method}: no answer within {PATIENCE_S:g} s")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise BrowserError(f"{method}: the browser has ended")
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def resize(self, width: int, height: int = 1000) -> None:
        """Set the size of the viewport."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Load a page, and wait until it is complete. Raises `BrowserError` if it cannot be loaded."""
        if error := self.command("Page.navigate", url=url).get("errorText"):
            raise BrowserError(f"{url}: {error}")
        self.wait("document.readyState === 'complete'")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Raises `BrowserError` if it does not become true."""
        until = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            if time.monotonic() > until:
                raise BrowserError(f"not true within {PATIENCE_S:g} s: {condition}")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises `BrowserError` if it throws."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def document(self) -> dict[str, Any]:
        """The tree of nodes, closed shadow roots included."""
        found: dict[str, Any] = self.command("DOM.getDocument", depth=-1, pierce=True)["root"]
        return found

    def screenshot(self, *, full: bool = False) -> bytes:
        """A PNG image of the viewport, or of the `full` height of the page."""
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        return base64.b64decode(answer["data"])


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a new browser. Raises `FetchError` where its package cannot be had."""
    root = fetched("chromium", ("chromium-headless-shell", "fonts-dejavu-core")) / "root"
    libraries = ":".join(str(path) for pattern in ("*-linux-gnu", "*-linux-gnu/*") for path in (root / "usr/lib").glob(pattern))
    environ = {**os.environ, "LD_LIBRARY_PATH": libraries}
    if (root / "etc/fonts").exists():  # otherwise this machine's
        environ["FONTCONFIG_SYSROOT"] = str(root)
    theirs_in, to_browser = os.pipe()
    from_browser, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="disagg-browser-", ignore_cleanup_errors=True) as profile:
        command = [
            str(root / "usr/lib/chromium/chromium-headless-shell"),
            *("--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--user-data-dir={profile}",
        ]
        # The protocol's pipes are descriptors 3 and 4, which may be in use here.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "browser", *command]
        process = subprocess.Popen(
            shell, env=environ, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.kill()
            process.wait()
            os.close(to_browser)
            os.close(from_browser)
