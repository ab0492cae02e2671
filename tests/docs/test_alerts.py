"""The alerts for Prometheus, by its own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from harness.debian import fetched

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs/alerts.yml"


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = fetched("prometheus", ("prometheus",)) / "root/usr/bin/promtool"
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_prometheus_accepts_the_alerts() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "change",
    [
        ("", ""),
        ("disagg_healthy == 0", "disagg_healthy == 2"),
        ("> 0.01", "> 0.2"),
        ('cause="verification"', 'cause="deadline"'),
        ("offset 1h", "offset 1m"),
        ("[1h]", "[1m]"),
        ("vllm:disagg_healthy == 0", "vllm:disagg_healthy == 2"),
        ("vllm:disagg_failed_loads_total", "vllm:disagg_loads_total"),
        ("vllm:request_success_total", "vllm:disagg_loads_total"),
        ("> 0.1\n", "> 0.05\n"),
        ("and sum by (instance) (vllm:disagg_healthy)", ""),
        ("vllm:disagg_failed_sends_total", "vllm:disagg_sends_total"),
    ],
)
def test_each_alert_fires_for_its_metrics_alone(tmp_path: Path, change: tuple[str, str]) -> None:
    rules = RULES.read_text()
    assert change[0] in rules
    (tmp_path / "alerts.yml").write_text(rules.replace(*change) if change[0] else rules)
    tests = shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    tested = promtool("test", "rules", str(tests))
    assert (tested.returncode == 0) == (not change[0]), tested.stdout + tested.stderr
