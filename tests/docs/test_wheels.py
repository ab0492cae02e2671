"""What `cibuildwheel` would build for a release."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_each_architecture_gets_a_wheel_for_3_11_and_one_of_the_stable_abi(arch: str) -> None:
    command = [
        str(Path(sys.executable).with_name("cibuildwheel")),
        "--platform",
        "linux",
        "--archs",
        arch,
        "--print-build-identifiers",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CIBW_")}
    ended = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, env=environ, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [f"cp311-manylinux_{arch}", f"cp312-manylinux_{arch}"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
