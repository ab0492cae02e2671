"""`python -m harness.aarch64 dist/disagg-...-cp312-abi3-...aarch64.whl`: use a wheel for aarch64 under emulation.

Python 3.13 of Debian and the wheel's dependencies run under QEMU's user-mode emulation, all unpacked into folders of their own.
Runs the smallest example, `disagg explain`, and a benchmark over `local`, which compares every byte.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.debian import Foreign, fetched

ROOT = Path(__file__).parents[1]
PYTHON = "3.13"
IMPORT = "import platform; from disagg.core import _native; print(platform.machine(), platform.python_version(), _native)"
CHECKS = (
    ("-c", IMPORT),
    (str(ROOT / "examples/smallest_embed.py"),),
    *(
        ("-m", "disagg.commands", *arguments.split())
        for arguments in ("--version", "explain --model llama-3-8b --tokens 256 --prefill tp=2 --decode tp=1")
    ),
    (
        *("-m", "disagg.commands.bench", "--backend", "local", "--model", "tiny", "--tokens", "128"),
        *("--prefill", "tp=2", "--decode", "tp=1,page=32", "--repeat", "1", "--no-ceiling"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.aarch64", description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel: Path = parser.parse_args().wheel.resolve()
    emulator = fetched("qemu-user", ("qemu-user-static",)) / "root/usr/bin/qemu-aarch64-static"
    system = fetched("python-arm64", (f"python{PYTHON}", "libstdc++6"), foreign=Foreign("trixie", "arm64")) / "root"
    with tempfile.TemporaryDirectory(prefix="disagg-aarch64-") as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
        tags = [word for tag in ("2_28", "2_17") for word in ("--platform", f"manylinux_{tag}_aarch64")]
        tags += ["--platform", "manylinux2014_aarch64"]
        subprocess.run([*install, *tags, "--only-binary", ":all:", "--python-version", PYTHON, str(wheel)], check=True)
        program = [str(emulator), "-L", str(system), str(system / f"usr/bin/python{PYTHON}")]
        environ = {**os.environ, "PYTHONPATH": folder, "PYTHONHOME": str(system / "usr")}
        for check in CHECKS:
            ended = subprocess.run([*program, *check], cwd=folder, env=environ, timeout=900, check=False)
            if ended.returncode != 0:
                sys.stderr.write(f"failed with status {ended.returncode}: {' '.join(check)}\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
