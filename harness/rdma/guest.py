"""Boots the guest and runs a script in it."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.debian import fetched
from harness.rdma.initrd import build_initrd
from harness.rdma.tsc import tsc_khz

PROGRAMS = ("qemu-system-x86", "busybox-static", "iproute2", "ibverbs-providers")
PROJECT = Path(__file__).parents[2]
SOURCES = ("benchmarks", "disagg", "examples", "harness", "tests")
"""Folders of the project of which the guest sees a copy, so that they may be edited while it runs."""
OUT = PROJECT / "out"
"""The one folder of the project in which the guest leaves files for the host."""
BOOT_S = 120.0
"""Some boots hang while the kernel starts its second CPU; others take 7 to 40 s."""
BOOTS = 5
QUICK = "mitigations=off nosmap nosmep no5lvl clocksource=tsc tsc=reliable transparent_hugepage=always nowatchdog"
"""Options of the kernel that leave out what is slow to emulate: about a sixth less CPU time for the same work."""


def packages() -> Path:
    """The folder of the guest's programs and kernel, fetched if they are not there yet. Raises `FetchError`."""
    return fetched("rdma", PROGRAMS, image_of="linux-image-amd64")


class GuestError(Exception):
    """The guest did not boot, or did not end in time."""


def run_in_guest(command: Sequence[str], *, timeout_s: float, environ: Mapping[str, str]) -> int:
    """The exit status of `command`, run in the project's folder in the guest, with RDMA devices `rxe0` and `rxe1`.

    Its output goes to standard output. Files that it writes to `OUT` are the host's, too. Raises `GuestError`, and `FetchError`
    where the guest's programs are missing.
    """
    root = packages() / "root"
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="disagg-rdma-", dir=root.parent) as scratch:
        shared, tree = Path(scratch, "shared"), Path(scratch, "tree")
        shared.mkdir()
        for name in SOURCES:
            shutil.copytree(PROJECT / name, tree / name)
        build_initrd(root, shared / "initrd.gz")
        (shared / "run.sh").write_text(_script(command, environ, tree))
        for attempt in range(1, BOOTS + 1):
            began, guest = time.monotonic(), _start(root, shared)
            try:
                if _has_booted(guest, shared):
                    return _status(guest, shared, timeout_s=timeout_s)
            finally:
                guest.kill()
                guest.wait()
                _report_cost(began)
            sys.stderr.write(f"rdma: boot {attempt} of {BOOTS} hangs\n")
    raise GuestError(f"the guest did not boot in {BOOTS} attempts of {BOOT_S:g} s")


def _script(command: Sequence[str], environ: Mapping[str, str], tree: Path) -> str:
    """What the guest runs."""
    lines = [
        "set -euo pipefail",
        f"export PATH={shlex.quote(os.environ['PATH'])} HOME=/root",
        *(f"mount --bind {shlex.quote(str(tree / name))} {shlex.quote(str(PROJECT / name))}" for name in SOURCES),
        f"mount -t 9p -o trans=virtio,version=9p2000.L out {shlex.quote(str(OUT))}",
        *(f"export {name}={shlex.quote(value)}" for name, value in environ.items()),
        f"cd {shlex.quote(str(PROJECT))}",
        "source harness/rdma/devices.sh",
        shlex.join(command),
    ]
    return "\n".join(lines) + "\n"


def _report_cost(began: float) -> None:
    """Print how long the guest has run, and the CPU time of all guests so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stderr.write(
        f"rdma: the guest ran for {time.monotonic() - began:.0f} s; {used.ru_utime + used.ru_stime:.0f} s of CPU time\n"
    )


def _start(root: Path, shared: Path) -> subprocess.Popen[bytes]:
    (shared / "booted").unlink(missing_ok=True)
    kernel = next((root / "boot").glob("vmlinuz-*"))
    options = f"console=ttyS0 quiet panic=-1 {QUICK} tsc_early_khz={tsc_khz()} shared={shared}"
    files = "security_model=none,multidevs=remap"
    command = [
        "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "6G",
        "-L", str(root / "usr/share/qemu"), "-L", str(root / "usr/share/seabios"),
        "-kernel", str(kernel), "-initrd", str(shared / "initrd.gz"), "-append", options,
        "-virtfs", f"local,path=/,mount_tag=host,readonly=on,{files}",
        "-virtfs", f"local,path={root},mount_tag=packages,readonly=on,{files}",
        "-virtfs", f"local,path={shared},mount_tag=shared,{files}",
        "-virtfs", f"local,path={OUT},mount_tag=out,{files}",
        "-nographic", "-nodefaults", "-serial", "stdio", "-no-reboot",
    ]  # fmt: skip
    environ = {
        **os.environ,
        "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{root}/usr/lib/{os.uname().machine}-linux-gnu",
    }
    return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=sys.stdout)


def _has_booted(guest: subprocess.Popen[bytes], shared: Path) -> bool:
    """Whether the guest runs its script within `BOOT_S`. Raises `GuestError` if QEMU ends before."""
    deadline = time.monotonic() + BOOT_S
    while time.monotonic() < deadline:
        if (shared / "booted").exists():
            return True
        if guest.poll() is not None:
            raise GuestError(f"QEMU ended with status {guest.returncode} before the guest had booted")
        time.sleep(0.2)
    return False


def _status(guest: subprocess.Popen[bytes], shared: Path, *, timeout_s: float) -> int:
    """The exit status of the script, once the guest is off."""
    with suppress(subprocess.TimeoutExpired):
        guest.wait(timeout_s)
    try:
        return int((shared / "status").read_text())
    except FileNotFoundError:
        raise GuestError(f"the guest ended without a status, or took longer than {timeout_s:g} s") from None
