"""A short `make chaos`: real engines and processes, faults under load, every byte checked.

Also case 40: ranks of both roles restart, at the same address or another, without any other restart; and some requests go
from decode to prefill.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.chaos import command
from harness.chaos.jobs import RankSettings
from harness.chaos.launcher import Launcher
from harness.chaos.load import Load
from harness.chaos.places import OTHER_USER, Hosts, Place, missing_for_places, missing_for_resets
from harness.chaos.processes import INSTANCES, NHD, Inbox, RankProcess
from harness.chaos.report import Healing, Report
from harness.chaos.rounds import KINDS
from harness.chaos.run import run, schedule
from tests.manager.test_peers import until

SILENCE_S, SHORT_SILENCE_S, LONGEST_S = 8.0, 4.0, 3.0
REQUESTS = 200
"""So many are started, however slow the machine is."""
needs_resets = pytest.mark.skipif(bool(missing_for_resets()), reason=f"needs {missing_for_resets()}")
needs_places = pytest.mark.skipif(bool(missing_for_places()), reason=f"needs {missing_for_places()}")


@pytest.fixture(autouse=True)
def _rank_logs_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.chaos
@pytest.mark.parametrize(("engine", "seed"), [("nixl", 2), ("mooncake", 12), ("cma", 12)])
def test_no_byte_is_wrong_while_ranks_are_killed_and_restarted(engine: str, seed: int) -> None:
    report = run(engine, seed=seed, rounds=2, requests=REQUESTS)
    killed = {(victim.partition("-")[0], victim.partition(", ")[2]) for victim in report.victims}
    assert {role for role, _ in killed} == {"prefill", "decode"}
    assert {how for _, how in killed} == {"same address", "other address"}
    assert report.successes > 20
    assert report.returns, "no request went from decode to prefill"
    assert report.good, str(report)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("engine", "kinds"),
    [
        ("nixl", ["stop", "compete", "give-up", "reset", "reset", "execute"]),
        ("mooncake", ["users", "compete", "reset", "reset", "execute", "alias", "disorder", "descriptors", "many-peers"]),
        ("nixl", ["reopen", "reopen"]),
        ("mooncake", ["reopen", "reopen"]),
        ("cma", ["reopen", "reopen", "disorder", "alias", "execute"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(dict.fromkeys(value)),
)
def test_nothing_is_wrong_or_left_over_after_other_faults(engine: str, kinds: list[str]) -> None:
    lacks_places, lacks_resets = missing_for_places(), missing_for_resets()
    kinds = [
        kind
        for kind in kinds
        if not ((KINDS[kind].needs_places and lacks_places) or (KINDS[kind].needs_resets and lacks_resets))
    ]
    requests = len(kinds) * REQUESTS // 2
    report = run(engine, seed=3, rounds=len(kinds), kinds=kinds, silence_s=SILENCE_S, longest_s=LONGEST_S, requests=requests)
    assert report.rounds_done == len(kinds)
    assert {name.partition(":")[0] for name in report.healing} >= set(kinds) - {"disorder"}
    assert report.successes > 10 * len(kinds)
    assert report.good, str(report)
    if "compete" in kinds:
        assert report.contests["right instance, ok"]
        assert any("is not served to" in reason for reason in report.refusals)
        assert any("this attempt is under way" in reason for reason in report.refusals)


@pytest.mark.chaos
@needs_places
@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_a_stopped_rank_that_hides_from_another_user_is_not_taken_for_ended(engine: str) -> None:
    """Its peer has given it up, and reuses rows as they are released."""
    kinds = ["hidepid-1", "hidepid-2"]
    report = run(engine, seed=3, rounds=2, kinds=kinds, silence_s=SHORT_SILENCE_S, requests=REQUESTS)
    assert report.healing.keys() >= {"hidepid-1: afterwards", "hidepid-2: afterwards"}
    assert report.successes > 20
    assert report.good, str(report)


@pytest.mark.chaos
@needs_places
@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_hosts_reconnect_after_their_link_was_cut(engine: str) -> None:
    """Some ranks write into rows of the other host themselves."""
    report = run(engine, seed=3, rounds=1, kinds=["cut"], hosts=2, silence_s=SHORT_SILENCE_S, longest_s=16.0)
    assert report.healing["cut"].times == 1
    assert report.good, str(report)


@pytest.mark.chaos
@needs_places
@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_no_row_is_held_after_a_rank_of_another_host_has_ended(engine: str) -> None:
    """No proof of its end can come, and none is needed: it may write into lent slots only."""
    kinds = ["kill", "give-up"]
    report = run(engine, seed=6, rounds=3, kinds=kinds, hosts=2, silence_s=SHORT_SILENCE_S, requests=REQUESTS)
    assert report.healing.keys() >= set(kinds)
    assert report.successes > 20
    assert not report.quarantined_rows
    assert report.good, str(report)


@pytest.mark.chaos
@needs_resets
@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_a_broken_connection_of_the_engine_is_made_anew(engine: str) -> None:
    """The control connection may well live: the end of the engine's shows when something is posted."""
    report = run(engine, seed=4, rounds=2, kinds=["reset-all"], hosts=2, silence_s=SILENCE_S)
    assert report.healing["reset: all: afterwards"].times == 2
    assert report.good, str(report)


@pytest.mark.chaos
def test_wrong_bytes_are_found_without_fencing() -> None:
    assert run("nixl", seed=1, rounds=0, fencing=False, grace_s=0.0).wrong


# ------------------------------------------------------------------------------------------------- schedule and report


def test_a_schedule_has_each_kind_once_before_it_repeats_any() -> None:
    kinds = list(KINDS)
    found = schedule(kinds, 3 * len(kinds), seed=1)
    assert sorted(found[: len(kinds)]) == sorted(kinds)
    assert len(found) == 3 * len(kinds)
    assert found == schedule(kinds, 3 * len(kinds), seed=1) != schedule(kinds, 3 * len(kinds), seed=2)


def test_healing_times_are_ranked() -> None:
    assert Healing.of([3.0]) == Healing(1, 3.0, 3.0, 3.0, [3.0])
    hundred = [float(n) for n in range(1, 101)]
    assert Healing.of(hundred[::-1]) == Healing(100, 50.5, 95.0, 100.0, hundred)


@pytest.mark.parametrize("trouble", ["wrong", "stuck", "unhealed", "relapses", "dead_threads", "crashed"])
def test_a_report_with_a_finding_is_not_good(trouble: str) -> None:
    report = Report("nixl", "tcp", 1, 1, 1, "on", successes=1, healing={"kill": Healing.of([1.0])})
    assert report.good
    assert re.search(r"^kill +1 +1\.00 +1\.00 +1\.00$", str(report), re.MULTILINE)
    found: Report = dataclasses.replace(report, **cast(Any, {trouble: ["decode-0/0: something"]}))
    assert not found.good
    assert "decode-0/0: something" in str(found)


def test_rows_may_stay_quarantined_only_where_nothing_proves_an_end() -> None:
    report = Report("nixl", "rdma", 1, 1, 1, "on", may_quarantine=True, successes=1, quarantined=2, quarantined_rows=5)
    assert report.good
    assert "2 requests, 5 rows" in str(report)
    assert not dataclasses.replace(report, may_quarantine=False).good
    assert not dataclasses.replace(report, missing_rows=1).good


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kinds", "kill,trip"], "expected some of kill, .*, found trip"),
        (["--kinds", "cut", "--hosts", "1"], "none of cut runs on 1 hosts"),
        (["--kinds", "lose"], "lose: expected --transport rdma"),
        (["--kinds", "alias", "--hosts", "2"], "none of alias runs on 2 hosts"),
    ],
)
def test_kinds_that_cannot_run_are_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "missing_for_places", lambda: "")
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert re.search(expected, capsys.readouterr().err)


def test_without_root_the_kinds_that_need_it_are_skipped_or_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, list[str]]] = []

    def note(_engine: str, *, kinds: list[str], hosts: int, **_: object) -> Report:
        ran.append((hosts, kinds))
        return Report("nixl", "tcp", hosts, 1, 0, "on", successes=1)

    monkeypatch.setattr(command, "run", note)
    for name in ("missing_for_places", "missing_for_resets"):
        monkeypatch.setattr(command, name, lambda: "root, found user 1000")
    assert command.main(["--engine", "nixl"]) == 0
    over_tcp = [kind for kind in KINDS if not KINDS[kind].needs_link and not KINDS[kind].may_quarantine]
    assert ran == [(1, [kind for kind in over_tcp if not (KINDS[kind].needs_places or KINDS[kind].needs_resets)])]
    written = capsys.readouterr().err
    assert "skips cut, users, hidepid-1, hidepid-2: they need root, found user 1000" in written
    assert "skips reset: they need root, found user 1000" in written
    with pytest.raises(SystemExit):
        command.main(["--kinds", "cut"])
    assert "cut: expected root, found user 1000" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--kinds", "reset"])
    assert "reset: expected root, found user 1000" in capsys.readouterr().err
    for name in ("missing_for_places", "missing_for_resets"):
        monkeypatch.setattr(command, name, lambda: "")
    ran.clear()
    assert command.main(["--engine", "nixl"]) == 0
    assert ran == [(hosts, [kind for kind in over_tcp if hosts in KINDS[kind].hosts]) for hosts in (1, 2)]


# ------------------------------------------------------------------------------------------------------------ processes

NOISE = """
import sys
print("[nixl] a line of an engine")
print(5)
print('{"op": "first"}')
print("x" * 1_000_000)
print('{"op": "second"}', flush=True)
sys.stdin.read()
"""


class Noisy:
    """Starts a program that writes lines which are no messages, more than a pipe holds."""

    place = Place()

    def start(self, _: RankSettings, *, streams: tuple[int, int, int]) -> int:
        stdin, stdout, stderr = streams
        self.process = subprocess.Popen([sys.executable, "-c", NOISE], stdin=stdin, stdout=stdout, stderr=stderr)
        return self.process.pid

    def wait(self, _: int) -> int:
        return self.process.wait()


def test_lines_of_engines_are_skipped(tmp_path: Path) -> None:
    inbox: Inbox = queue.SimpleQueue()
    settings = RankSettings(
        name="decode-0",
        tp=1,
        tp_rank=0,
        page=4,
        num_pages=1,
        axes=NHD,
        backend="",
        transport="",
        devices=(),
        listen="",
        leader=None,
        pack_below=None,
        verify="off",
        faults={},
        silence_s=1.0,
        off_loopback=False,
        slow=1.0,
    )
    rank = RankProcess(INSTANCES[2], settings, tmp_path / "rank.log", cast(Launcher, Noisy()), inbox)
    assert [inbox.get(timeout=30)[1] for _ in range(2)] == [{"op": "first"}, {"op": "second"}]
    rank.kill()
    rank.kill()
    rank.send({"op": "ask"})
    assert inbox.get(timeout=30) == (rank, {"op": "gone"})
    assert inbox.empty()
    assert rank.wait() == -signal.SIGKILL


# ----------------------------------------------------------------------------------------------------------------- load


class Recording:
    """Stands in for a `RankProcess`, and keeps the messages that it is sent."""

    def __init__(self, name: str) -> None:
        self.name, self.address, self.stopped = name, "tcp://127.0.0.1:1", False
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def test_a_request_is_late_only_while_its_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("harness.chaos.load.time.monotonic", lambda: clock.now)
    ranks = {(i.name, rank): Recording(f"{i.name}/{rank}") for i in INSTANCES for rank in range(i.tp)}
    report = Report("nixl", "tcp", 1, 1, 1, "on")
    load = Load(random.Random(1), report, cast("dict[tuple[str, int], RankProcess]", ranks))
    load.running = True
    load.step()
    load.running = False
    asked = [rank for rank in ranks.values() if rank.sent]
    asked[0].stopped = True
    for clock.now in (20.0, 40.0, 60.0):  # longer than any deadline and grace
        load.step()
    asked[0].stopped = False
    clock.now += load.grace_s - 1
    load.step()
    assert report.requests == 1
    assert not report.stuck
    clock.now += load.deadline_s + 2
    load.step()
    assert len(report.stuck) == 1
    assert asked[0].name in report.stuck[0]


# --------------------------------------------------------------------------------------------------------------- places


@needs_places
@pytest.mark.parametrize(("hidepid", "found"), [(0, "readable"), (1, "PermissionError"), (2, "FileNotFoundError")])
def test_another_user_sees_as_much_of_proc_as_it_should(hidepid: int, found: str) -> None:
    script = f"""
import os, pathlib
try:
    pathlib.Path("/proc/{os.getpid()}/stat").read_text()
    found = "readable"
except OSError as error:
    found = type(error).__name__
print(os.getuid(), os.getpid(), found)
"""
    command_line = Place(user=OTHER_USER, hidepid=hidepid).command([sys.executable, "-c", script])
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0].split() == [str(OTHER_USER), str(process.pid), found]


CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=0.5)
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("cut off")
"""


@needs_places
def test_a_link_is_cut_and_mended_in_both_ways() -> None:
    hosts = Hosts()

    def outcome() -> str:
        place = Place(hosts.namespaces[0])
        command = place.command([sys.executable, "-c", CONNECT, hosts.addresses[1]])
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        until(lambda: outcome() == "reached")
        for silently in (False, True):
            hosts.cut(silently=silently)
            until(lambda: outcome() == "cut off")
            hosts.mend()
            until(lambda: outcome() == "reached")
    finally:
        hosts.close()
    left = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert not any(name in left for name in hosts.namespaces)


def test_the_report_is_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its counters, which `dataclasses.asdict` turns into something that JSON has no keys for."""
    report = Report("nixl", "tcp", 1, 2, 3, "on", successes=1)
    report.faults["stop"] += 2
    report.contests["failed"] += 1
    monkeypatch.setattr(command, "run", lambda *_, **__: report)
    path = tmp_path / "chaos.json"
    assert command.main(["--engine", "nixl", "--kinds", "stop", "--hosts", "1", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())
    assert (found["faults"], found["contests"]) == ({"stop": 2}, {"failed": 1})
