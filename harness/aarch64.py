"""`python -m harness.aarch64 dist/disagg-...-aarch64.whl`: use a wheel for aarch64 under emulation.

Debian's Python and the wheel's dependencies run under QEMU's user-mode emulation, all unpacked into folders of their own.
Runs the smallest example, `disagg explain`, a benchmark over `local`, which compares every byte, and with `--tests` the tests
of the engine `local` and of the C++ core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.debian import Foreign, fetched
from harness.pythons import RELEASES

ROOT = Path(__file__).parents[1]
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
TEST_PACKAGES = ("pytest", "hypothesis", "msgpack")
TESTS = (
    "tests/backends/test_local.py",
    *(f"tests/native/test_{name}.py" for name in ("bind", "digest", "pack", "regions", "waiting", "work_list")),
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-o", "faulthandler_timeout=900", *TESTS)
LIMIT_S = 1200


def use(wheel: Path, version: str, *, tests: bool = False) -> str:
    """Use a wheel with a version of Python in `RELEASES`, and return what failed: nothing if all went well.

    Raises `FetchError` where QEMU or that Python cannot be fetched.
    """
    emulator = fetched("qemu-user", ("qemu-user-static",)) / "root/usr/bin/qemu-aarch64-static"
    foreign = Foreign(RELEASES[version], "arm64")
    system = fetched(f"python{version}-arm64", (f"python{version}", "libstdc++6"), foreign=foreign) / "root"
    with tempfile.TemporaryDirectory(prefix="disagg-aarch64-") as name:
        folder = Path(name)
        _install(wheel, version, folder / "packages", more=TEST_PACKAGES if tests else ())
        program = [str(emulator), "-L", str(system), str(system / f"usr/bin/python{version}")]
        environ = {
            **os.environ,
            "PYTHONPATH": str(folder / "packages"),
            "PYTHONHOME": str(system / "usr"),
            "PYTHONPYCACHEPREFIX": str(folder / "compiled"),  # compiling is slow under emulation: each check would do it again
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        if tests:  # copies, so that `disagg` is the wheel's
            for part in ("tests", "harness"):
                shutil.copytree(ROOT / part, folder / part)
            shutil.copy(ROOT / "pyproject.toml", folder)
        for check in (*CHECKS, *((PYTEST,) if tests else ())):
            ended = subprocess.run([*program, *check], cwd=folder, env=environ, timeout=LIMIT_S, check=False)
            if ended.returncode != 0:
                return f"status {ended.returncode}: {' '.join(check)}"
    return ""


def _install(wheel: Path, version: str, folder: Path, *, more: tuple[str, ...]) -> None:
    """Install a wheel and its dependencies for aarch64 into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    for minor in range(28, 16, -1):
        command += ["--platform", f"manylinux_2_{minor}_aarch64"]
    command += ["--platform", "manylinux2014_aarch64", "--only-binary", ":all:", "--python-version", version]
    command += ["--constraint", str(ROOT / "constraints-dev.txt"), str(wheel), *more]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.aarch64", description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", choices=RELEASES, help="default: 3.11 for its own wheel, otherwise 3.13")
    parser.add_argument("--tests", action="store_true", help="run the tests of the engine `local` and of the C++ core, too")
    given = parser.parse_args()
    wheel: Path = given.wheel.resolve()
    version = given.python or ("3.11" if "-cp311-cp311-" in wheel.name else "3.13")
    if failure := use(wheel, version, tests=given.tests):
        sys.stderr.write(f"failed with {failure}\n")
    return bool(failure)


if __name__ == "__main__":
    sys.exit(main())
