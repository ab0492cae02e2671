"""`python -m harness.wheels`: use the wheels in dist/ with every supported Python, and print a table.

On x86-64 `scripts/wheel_test.sh` installs the wheel into a new environment and uses it there: import, `disagg-bench`, the
smallest example, `disagg explain` and `disagg doctor`. Interpreters that are not installed come from Debian's packages, where
a release has them. On aarch64 `harness.aarch64` uses the wheel under emulation, with one Python running tests, too. Fails if a
wheel does. Each Python that cannot be had is named.

With `--installed` only the interpreters of this machine use wheels for it, and a wheel that is missing is built.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from harness import aarch64
from harness.debian import FetchError
from harness.pythons import RELEASES, from_debian, installed

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
ARCHITECTURES = ("x86_64", "aarch64")
TESTED = "3.13"
"""The Python that also runs tests under emulation, with the wheel of the stable ABI: they take eleven minutes."""


def wheel_for(version: str, architecture: str, folder: Path) -> Path | None:
    """The wheel in `folder` for a version of Python: 3.11 has its own, all later ones share that of the stable ABI."""
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    found = sorted(folder.glob(f"disagg-*-{tag}-*_{architecture}.whl"), key=lambda wheel: wheel.stat().st_mtime)
    return found[-1] if found else None


def outcome(version: str, architecture: str, folder: Path) -> tuple[str, str]:
    """The interpreter that used the wheel, and what came of it: `"passed"`, `"not run: ..."` or `"failed: ..."`."""
    wheel = wheel_for(version, architecture, folder)
    if wheel is None:
        return "", "not run: no wheel"
    try:
        if architecture == "aarch64":
            if version not in RELEASES:
                return "", "not run: in no release of Debian"
            failure = aarch64.use(wheel, version, tests=version == TESTED)
            return f"Debian {RELEASES[version]}, emulated", f"failed: {failure}" if failure else "passed"
        if (python := installed(version)) is not None:
            return str(python), _use(wheel, python)
        if version not in RELEASES:
            return "", "not run: not installed, and in no release of Debian"
        with tempfile.TemporaryDirectory(prefix="disagg-python-") as temporary:
            return f"Debian {RELEASES[version]}", _use(wheel, from_debian(version, Path(temporary) / "python"))
    except FetchError as error:
        return "", f"not run: {str(error).splitlines()[0]}"


def of_this_machine(version: str, folder: Path) -> tuple[str, str]:
    """Like `outcome`, with an interpreter that is installed here and, if no wheel in `folder` is for it, one that it builds."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = Path(sys.executable) if version == own else installed(version)
    if python is None:
        return "", "not run: not installed"
    wheel = wheel_for(version, platform.machine(), folder)
    if wheel is None:
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        command = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
        environ = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints-dev.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        if status := subprocess.run(command, env=environ, timeout=900, check=False).returncode:
            return str(python), f"failed: no wheel could be built, status {status}"
        wheel = wheel_for(version, platform.machine(), folder)
        assert wheel is not None, "a wheel of another name was built"
    return str(python), _use(wheel, python)


def _use(wheel: Path, python: Path) -> str:
    """Run `scripts/wheel_test.sh`."""
    environ = {**os.environ, "PYTHON": str(python)}
    status = subprocess.run(["scripts/wheel_test.sh", wheel], cwd=ROOT, env=environ, timeout=900, check=False).returncode
    return f"failed: status {status}" if status else "passed"


def outcomes(folder: Path, *, only_installed: bool) -> Iterator[tuple[str, str, str, str]]:
    """Version, architecture, interpreter and result of each pair, as it is run."""
    if only_installed:
        for version in VERSIONS:
            yield (version, platform.machine(), *of_this_machine(version, folder))
        return
    for architecture in ARCHITECTURES:
        for version in VERSIONS:
            yield (version, architecture, *outcome(version, architecture, folder))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist")
    parser.add_argument("--installed", action="store_true", help="only interpreters of this machine; builds missing wheels")
    options = parser.parse_args()
    table = Table("Python", "architecture", Column("interpreter", overflow="fold"), "result")
    results = []
    for row in outcomes(options.folder, only_installed=options.installed):
        table.add_row(*row)
        results.append(row[-1])
    Console().print(table)
    return int("passed" not in results or any(result.startswith("failed") for result in results))


if __name__ == "__main__":
    sys.exit(main())
