"""`python -m harness.rdma [--fetch] [--timeout S] [COMMAND ...]`: run a command in the guest, by default `tests/rdma`."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from harness.debian import FetchError
from harness.rdma.guest import OUT, PROJECT, GuestError, packages, run_in_guest

HANG_S = 900
TESTS = (
    f"{PROJECT}/.venv/bin/pytest",
    "-o",
    f"cache_dir={OUT}/pytest-rdma",
    "-o",
    f"faulthandler_timeout={HANG_S}",
    "--numprocesses",
    "2",
    "--dist",
    "loadgroup",
    "-m",
    "not nightly",
    "--durations=20",
    "tests/rdma",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.rdma", description=__doc__)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that the command may take in the guest")
    parser.add_argument(
        "--fetch", action="store_true", help="only fetch the guest's programs and kernel, and print their folder"
    )
    parser.add_argument("command", nargs="*", help="the command and its arguments; default: the tests of tests/rdma")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the guest first
    try:
        if options.fetch:
            sys.stdout.write(f"{packages()}\n")
            return 0
        environ = {"RDMA_GUEST": "1", "PYTEST_ADDOPTS": os.environ.get("PYTEST_ADDOPTS", "")}
        return run_in_guest(options.command or TESTS, timeout_s=options.timeout, environ=environ)
    except (FetchError, GuestError) as error:
        sys.stderr.write(f"rdma: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
