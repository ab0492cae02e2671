"""What `cibuildwheel` would build for a release."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness import aarch64
from harness.pythons import installed
from harness.wheels import VERSIONS, outcome, wheel_for

pytestmark = pytest.mark.release

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


def test_an_index_can_show_what_the_package_is(tmp_path: Path) -> None:
    build = "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as build; build(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=120, check=True)
    (written,) = tmp_path.glob("*.dist-info/METADATA")
    found = email.message_from_string(written.read_text())
    assert found["Description-Content-Type"] == "text/markdown"
    description = found.get_payload()
    assert isinstance(description, str)
    assert description.strip().startswith("# disagg")
    assert re.findall(r"\]\((?!https://)", description) == [], "an index has no files that a relative link could name"
    prefix = "Programming Language :: Python :: 3."
    versions = [each.removeprefix(prefix) for each in found.get_all("Classifier", []) if each.startswith(prefix)]
    assert [f"3.{version}" for version in versions] == list(VERSIONS)


def test_every_later_python_uses_the_wheel_of_the_stable_abi(tmp_path: Path) -> None:
    tags = ("cp311-cp311-manylinux_2_24_aarch64", "cp312-abi3-manylinux_2_24_aarch64", "cp312-abi3-manylinux_2_17_x86_64")
    for tag in tags:
        (tmp_path / f"disagg-0.1.0-{tag}.whl").touch()

    def used(version: str, architecture: str) -> str:
        wheel = wheel_for(version, architecture, tmp_path)
        return "" if wheel is None else wheel.name

    assert [used(version, "aarch64") for version in VERSIONS] == [
        f"disagg-0.1.0-{tag}.whl" for tag in (tags[0], *[tags[1]] * 3)
    ]
    assert [used(version, "x86_64") for version in VERSIONS] == ["", *[f"disagg-0.1.0-{tags[2]}.whl"] * 3]


def test_the_wheel_of_the_stable_abi_runs_the_tests_once_under_emulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def use(wheel: Path, version: str, *, tests: bool = False) -> str:
        used.append((wheel.name.split("-")[3], version, tests))
        return ""

    monkeypatch.setattr(aarch64, "use", use)
    for tag in ("cp311-cp311", "cp312-abi3"):
        (tmp_path / f"disagg-0.1.0-{tag}-manylinux_2_24_aarch64.whl").touch()
    passed = [version for version in VERSIONS if outcome(version, "aarch64", tmp_path)[1] == "passed"]
    assert passed == ["3.11", "3.13", "3.14"]
    assert used == [("cp311", "3.11", False), ("abi3", "3.13", True), ("abi3", "3.14", False)]


def test_an_installed_python_has_the_version_that_was_asked_for() -> None:
    for version in VERSIONS:
        if (python := installed(version)) is not None:
            found = subprocess.run([python, "-V"], capture_output=True, text=True, timeout=60, check=True).stdout
            assert found.startswith(f"Python {version}.")
    assert installed("3.1") is None
