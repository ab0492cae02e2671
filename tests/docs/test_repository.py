"""The workflows call make targets that exist, every file names the same version, and two builds do not share a folder."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

import disagg

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def called(workflow: Path) -> set[str]:
    """The make targets that a workflow runs."""
    found: set[str] = set()
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            for target in re.findall(r"^make (\S+|\$\{\{.*?\}\})", step.get("run", ""), re.MULTILINE):
                found |= set(matrix["target"]) if "matrix.target" in step["run"] else {target}
    return found


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    assert called(workflow)
    assert called(workflow) <= TARGETS


def test_workflows_call_every_target_of_continuous_integration() -> None:
    text = (ROOT / ".ci/run").read_text()
    lines = re.findall(r"^for target in (.*); do$|by_last_pass (.*)\)$", text, re.MULTILINE)
    ours = {word for line in lines for word in " ".join(line).split() if not word.startswith('"')}
    assert {"check", "test", "test-vllm-once", "test-cross"} <= ours
    assert ours <= set().union(*map(called, WORKFLOWS))


def test_one_version_is_named_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert version == disagg.__version__ == first[1]
    assert f"disagg:{version}" in (ROOT / "deploy/kubernetes.yaml").read_text()


def test_a_build_in_place_and_a_wheel_have_separate_folders() -> None:
    """`pip install .` may run beside `make demo`, which builds in place first."""
    file = ROOT / "pyproject.toml"
    assert SettingsReader.from_file(file, state="editable").settings.build_dir == "build/editable/{wheel_tag}"
    assert SettingsReader.from_file(file, state="wheel").settings.build_dir == "build/{wheel_tag}"
