"""Whole cases over backend `local`: every rank in a thread of this process, with the same code as in real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from disagg.commands.bench import command
from disagg.commands.bench.driver import run
from disagg.commands.bench.fleet import RankFailed, Ranks, Remote
from disagg.commands.bench.processes import RankDied, RankThread
from disagg.commands.bench.report import COLUMNS, Row
from disagg.commands.bench.results import Files, results_to
from disagg.commands.cases.instructions import (
    AnyReply,
    Clear,
    Collect,
    Command,
    Describe,
    Description,
    Done,
    Failed,
    Fault,
    Peer,
)
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, items_of, rows_needed
from disagg.commands.keygen import write_pair
from disagg.commands.rank.rank import RankConfig, ResidentRank
from disagg.commands.rank.serve import Commands, Stop, serve
from disagg.core.errors import ConfigError, DisaggError
from disagg.models import PRESETS, load_model
from disagg.runtime.keys import KeyPair
from harness.ports import held_port
from tests.commands.conftest import BYTES_PER_TOKEN, NUM_LAYERS, Bench
from tests.commands.test_compare import ROW
from tests.support.grid import LOCAL_PRESETS, LOCAL_SIDES

TOKENS = 75


def ignore(_: str) -> None:
    """Ignore progress."""


def case(model: str, prefill: str, decode: str, **settings: object) -> Case:
    given = {"tokens": TOKENS, "repeat": 1, "ceiling": False, "warm_up": 0, "timeout_s": 30.0, **settings}
    return Case(backend="local", model=model, prefill=Side.parse(prefill), decode=Side.parse(decode), **given)  # type: ignore[arg-type]


def moved(model: str, prefill: str, decode: str, **settings: object) -> Row:
    return run(case(model, prefill, decode, **settings), ignore)


@pytest.mark.parametrize(("prefill", "decode"), LOCAL_SIDES)
def test_every_byte_arrives(model: str, prefill: str, decode: str) -> None:
    row = moved(model, prefill, decode, requests=4, concurrency=2)
    assert row.verified, row.problem
    assert row.bytes == 4 * TOKENS * BYTES_PER_TOKEN
    assert 0 < row.latency_ms["p50"] <= row.latency_ms["p99"]


def test_replicas_are_delivered_each() -> None:
    row = moved("tiny", "tp=2", "tp=8", num_layers=1)  # four KV heads: eight ranks hold each twice
    assert row.verified, row.problem
    assert row.bytes == 2 * TOKENS * 4 * 2 * 64 * 2


@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 1000])
def test_chunks_and_prefix_hits(model: str, chunk_tokens: int) -> None:
    row = moved(model, "tp=2,page=16", "tp=3,page=8", chunk_tokens=chunk_tokens, prefix_hit=37, requests=2)
    assert row.verified, row.problem
    assert row.bytes == 2 * (TOKENS - 37) * BYTES_PER_TOKEN


def test_the_ceiling_moves_the_same_bytes(model: str) -> None:
    row = moved(model, "tp=2", "tp=3,page=8", ceiling=True, repeat=2, warm_up=1)
    assert row.verified, row.problem
    assert (row.repeat, row.warm_up) == (2, 1)
    assert row.memcpy_gbps is not None
    assert row.memcpy_gbps > 0
    assert row.raw is None
    assert row.ceiling_gbps is not None
    assert row.ratio == row.gbps / row.ceiling_gbps


@pytest.mark.parametrize("page", [1, 16])
def test_the_ceiling_of_memory_with_gaps(page: int) -> None:
    """Index keys leave a gap behind each layer if pages are short."""
    row = moved("deepseek-v3.2", f"tp=2,page={page}", f"page={page}", num_layers=2, ceiling=True)
    assert row.verified, row.problem
    assert row.ceiling_gbps is not None


def test_short_convolutions_are_moved(tmp_path: Path) -> None:
    config = {"model_type": "lfm2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "conv_L_cache": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": ["conv", "full_attention", "conv"]}))
    row = moved(str(tmp_path), "tp=2", "tp=1,page=8")
    assert row.verified, row.problem


@pytest.mark.parametrize("fault", [Fault.BYTE, Fault.PAGES])
def test_an_injected_fault_is_detected(model: str, fault: Fault) -> None:
    row = moved(model, "tp=2", "tp=1,page=64", fault=fault)
    assert not row.verified
    assert "expected 0x" in row.problem


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("tp=2,kv=bfloat16", "page=64,kv=float8_e4m3fn"),
        ("kv=float32", "tp=2,layout=hnd,kv=float8_e5m2"),
        ("tp=2,kv=float8_e4m3fn", "kv=float16"),
        ("kv=bfloat16", "page=64,kv=bfloat16"),
    ],
)
@pytest.mark.parametrize("fault", [None, Fault.BYTE])
def test_kv_in_another_dtype_is_compared_with_what_it_is_converted_to(prefill: str, decode: str, fault: Fault | None) -> None:
    row = moved("tiny", prefill, decode, pack_below=4096, fault=fault)
    assert row.verified is (fault is None), row.problem


def test_a_rank_that_does_not_end_costs_no_results(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(rank: RankThread, *, until: float) -> None:
        del until
        raise RankDied(f"rank {rank.name} was killed")

    monkeypatch.setattr(RankThread, "end", end)
    sides = ("--prefill", "tp=2", "--decode", "tp=1")
    file = tmp_path / "rows.json"
    ended = CliRunner().invoke(
        command.bench, ["--backend", "local", "--model", model, "--tokens", "75", *sides, "--json", str(file)]
    )
    assert ended.exit_code == 3
    header, line, legend, *_ = ended.stdout.splitlines()
    assert line.split()[-2:] == ["yes", "BADLY"]
    assert {"of", "way", "ceiling", "ratio", "CPU %", "ended"} <= {each for each in COLUMNS if f"{each}: " in legend}
    assert all(each in header for each in COLUMNS)
    assert ended.stderr.endswith(", tokens 75: tp=2,page=16 -> tp=1,page=16: ended badly: rank prefill/0 was killed\n")
    (row,) = json.loads(file.read_text())
    assert (row["verified"], row["problem"], row["ending"]) == (True, "", "rank prefill/0 was killed")
    assert row["bytes"] == TOKENS * BYTES_PER_TOKEN


def test_a_log_gets_one_line_for_each_case_and_more_only_of_a_long_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = command.PlainProgress()
    for text in (
        "case 1 of 2, cma: a -> b: starting",
        "case 1 of 2, cma: a -> b: run 1 of 2",
        "case 2 of 2, cma: b -> a: starting",
    ):
        progress.show(text)
    now += command.QUIET_S
    for text in ("case 2 of 2, cma: b -> a: run 1 of 2", "case 2 of 2, cma: b -> a: run 2 of 2"):
        progress.show(text)
    assert [line.rpartition(": ")[::2] for line in capsys.readouterr().err.splitlines()] == [
        ("case 1 of 2, cma: a -> b", "starting"),
        ("case 2 of 2, cma: b -> a", "starting"),
        ("case 2 of 2, cma: b -> a", "run 1 of 2"),
    ]


@pytest.mark.parametrize(("error", "status"), [(ConfigError("no such model"), 2), (KeyboardInterrupt(), 130)])
def test_a_case_that_fails_costs_no_results_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    def second_fails(wanted: Case, *given: Any, **named: Any) -> Row:
        if wanted.tokens == 40:
            raise error
        return run(wanted, *given, **named)

    monkeypatch.setattr(command, "run", second_fails)
    json_file, html, plot, timeline = (tmp_path / f"rows.{end}" for end in ("json", "html", "svg", "timeline"))
    files = ("--json", json_file, "--html", html, "--plot", plot, "--timeline", timeline)
    case = (
        "--backend",
        "local",
        "--model",
        "tiny",
        "--tokens",
        "20,40",
        "--repeat",
        "1",
        "--prefill",
        "tp=1",
        "--decode",
        "tp=1",
    )
    ended = CliRunner().invoke(command.bench, [*case, "--no-ceiling", *map(str, files)])
    assert ended.exit_code == status, ended.output
    assert [(row["tokens"], row["verified"]) for row in json.loads(json_file.read_text())] == [(20, True)]
    first, _, _ = ended.stdout.partition("\n\n")
    assert [line.split()[4] for line in first.splitlines() if line.startswith("local")] == ["20"]
    assert "1 case, 1 verified" in html.read_text()
    assert "<svg" in plot.read_text()
    assert json.loads(timeline.read_text())["traceEvents"]


def test_a_file_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    rows, timeline = tmp_path / "rows.json", tmp_path / "timeline.json"
    files = Files(json=rows, plot=None, html=tmp_path, timeline=timeline)
    with pytest.raises(IsADirectoryError), results_to(files) as results:
        results.rows.append(ROW)
    assert json.loads(rows.read_text())[0]["model"] == "tiny"
    assert timeline.exists()


def test_a_folder_that_is_missing_is_named_before_ranks_start(bench: Bench, tmp_path: Path) -> None:
    case = ("--backend", "local", "--model", "tiny", "--tokens", "20", "--prefill", "tp=1", "--decode", "tp=1")
    ended = bench(*case, "--timeline", str(tmp_path / "absent" / "timeline.json"))
    assert ended.status == 2
    assert ended.err == f"disagg-bench: {tmp_path}/absent/timeline.json: there is no folder {tmp_path}/absent\n"


def test_waiting_for_a_running_rank_ends_with_the_time_limit(bench: Bench) -> None:
    with socket.socket() as listening:  # accepts connections, and never answers
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        ended = bench("--backend", "local", "--model", "tiny", "--tokens", "20", "--timeout", "1", *("--prefill", "tp=1"),
                      *("--decode", "tp=1", "--connect", address))  # fmt: skip
    assert ended.status == 1
    assert f"no reply from {address} within 1 s" in ended.err


def test_every_kind_of_preset_is_there() -> None:
    kinds = {name: frozenset((s.name, *(role.name for role in s.roles)) for s in spec.states) for name, spec in PRESETS.items()}
    assert {kinds[name] for name, *_ in LOCAL_PRESETS} == set(kinds.values())
    for name, layers, *_ in LOCAL_PRESETS:
        assert [s.name for s in load_model(name, num_layers=layers).states] == [s.name for s in PRESETS[name].states]


@pytest.mark.parametrize(("preset", "layers", "prefill", "decode"), LOCAL_PRESETS)
def test_every_kind_of_state_of_every_preset(preset: str, layers: int, prefill: str, decode: str) -> None:
    row = moved(preset, prefill, decode, num_layers=layers, tokens=150, requests=2, concurrency=2)
    assert row.verified, row.problem
    model = load_model(preset, num_layers=layers)
    assert row.components == tuple(sorted(state.name for state in model.states))
    assert row.bytes >= 2 * model.nbytes(150)  # more where ranks hold replicas
    assert row.piece_bytes_mean == row.bytes / row.pieces


@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", "tp=1,page=256"), ("pp=2,page=128", "tp=2,page=8")])
@pytest.mark.parametrize(("tokens", "chunk_tokens", "prefix_hit"), [(5, 0, 0), (300, 0, 0), (300, 77, 0), (300, 64, 290)])
def test_windows_groups_and_rings(
    grouped: str, prefill: str, decode: str, tokens: int, chunk_tokens: int, prefix_hit: int
) -> None:
    row = moved(grouped, prefill, decode, tokens=tokens, chunk_tokens=chunk_tokens, prefix_hit=prefix_hit, requests=2)
    assert row.verified, row.problem
    kinds = {"window", "c4", "c4_open", "index", "index_open", "c128", "c128_open"}
    assert set(row.components) == kinds


def test_only_windows_and_slots_move_after_a_long_prefix_hit() -> None:
    whole, hit = (moved("gpt-oss-120b", "tp=2", "tp=1", num_layers=2, tokens=400, prefix_hit=n) for n in (0, 399))
    assert whole.verified, whole.problem
    assert hit.verified, hit.problem
    assert whole.bytes == (400 + 127) * 2 * 8 * 64 * 2  # two layers: all tokens of one, the window of the other
    assert hit.bytes == 2 * 2 * 8 * 64 * 2


def test_small_pieces_are_packed_only_below_the_threshold(model: str) -> None:
    packed, direct = (moved(model, "tp=2", "tp=1", pack_below=below) for below in (1 << 20, 0))
    assert packed.verified, packed.problem
    assert direct.verified, direct.problem
    assert (packed.way, packed.ways) == ("packed", {"packed": packed.bytes})
    assert (direct.way, direct.ways) == ("direct", {"direct": direct.bytes})
    assert packed.pieces == direct.pieces == direct.posts == TOKENS * NUM_LAYERS * 2 * 2  # a run per token, tensor, writer
    assert packed.posts < direct.posts
    assert packed.seconds["pack"] > 0 < packed.seconds["unpack"]


@pytest.mark.parametrize(("preset", "layers"), [(name, layers) for name, layers, *_ in LOCAL_PRESETS] + [("grouped", 4)])
def test_any_wrong_byte_of_any_tensor_is_detected(preset: str, layers: int, grouped: str) -> None:
    model, side = grouped if preset == "grouped" else preset, Side(tp=2)
    wanted = case(model, "tp=2", "tp=1", num_layers=layers, tokens=40)
    spec = load_model(model, num_layers=layers)
    rows = {state.name: rows_needed(state, side, wanted, prefix=0) for state in spec.states}
    config = RankConfig(role="prefill", name="prefill", model=model, num_layers=layers, side=side, backend="local", rows=rows)
    (item,) = items_of(spec, side, Side(), wanted, name="prefill", pools=rows, prefix=0)[0]
    rng = np.random.default_rng(7)
    with ResidentRank(config) as resident:
        arena, content = resident.pools.arena, resident.content
        content.fill([item])
        assert content.difference([item]) is None
        assert content.difference([]) is not None
        for state in spec.states:
            for tensor in resident.pools.tensors[state.name][state.layers[-1]].values():
                at = tuple(int(rng.integers(size)) for size in tensor.shape)
                tensor[at] ^= 1
                found = content.difference([item])
                assert found is not None
                assert f"component {state.name!r}: layer {state.layers[-1]}" in found
                assert ("request 0" in found) == (at[0] in item.rows[state.name])
                assert ("belongs to no request" in found) == (at[0] not in item.rows[state.name])
                tensor[at] ^= 1
        assert content.difference([item]) is None
        content.clear()
        assert content.difference([]) is None
        assert (arena == 0xA5).all()


def test_an_impossible_case_is_refused_before_ranks_start(model: str) -> None:
    for settings, named in (
        ({"tokens": 0}, "tokens"),
        ({"prefix_hit": TOKENS}, "prefix-hit"),
        ({"chunk_tokens": -1}, "chunk-tokens"),
        ({"pack_below": -1}, "pack-below"),
        ({"fault": Fault.KILL}, "no separate process"),
        ({"device": "tpu"}, "device"),
        ({"num_layers": 99}, "layers"),
    ):
        with pytest.raises(ConfigError, match=named):
            moved(model, "tp=1", "tp=1", **settings)


def test_a_rank_that_cannot_start_is_reported(model: str) -> None:
    with pytest.raises(DisaggError, match="layer counts"):
        moved(model, "tp=1", "pp=2,layers=1+1")


# -- a rank alone ------------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(model: str) -> Iterator[Commands]:
    config = RankConfig(role="decode", name="decode", model=model, side=Side(), backend="local", num_pages=4)
    with ResidentRank(config) as resident:
        yield Commands(resident)


def ask(commands: Commands, data: bytes) -> AnyReply:
    reply: AnyReply = msgspec.msgpack.decode(commands.answer(data), type=AnyReply)
    return reply


def test_invalid_commands_get_an_error_reply(commands: Commands) -> None:
    for data in (b"", b"\xc1", b"rubbish", msgspec.msgpack.encode({"type": "Nothing"}), msgspec.msgpack.encode([1])):
        assert isinstance(ask(commands, data), Failed)
    assert isinstance(ask(commands, msgspec.msgpack.encode(Describe())), Description)


def test_a_failed_command_leaves_the_rank_unchanged(commands: Commands) -> None:
    assert isinstance(ask(commands, msgspec.msgpack.encode(Collect())), Failed)
    reply = ask(commands, msgspec.msgpack.encode(Peer("decode", "tcp://127.0.0.1:1")))
    assert isinstance(reply, Failed)
    assert "own name" in reply.error
    assert ask(commands, msgspec.msgpack.encode(Clear())) == Done()


def test_a_rank_ends_on_request(model: str) -> None:
    config = RankConfig(role="decode", name="decode", model=model, side=Side(), backend="local", num_pages=4)
    stop, lines = Stop(), list[str]()
    stop.end("this test says so", drain=True)
    serve(config, stop=stop, report=lines.append)
    assert "address=tcp://127.0.0.1:" in lines[0]
    assert lines[1:] == ["decode rank 0 of 1: ends: this test says so"]


def test_a_driver_uses_running_ranks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = case(model, "tp=2", "tp=1,page=8")
    ranks: list[RankThread] = []
    addresses = []
    try:
        for role, side in (("prefill", wanted.prefill), ("decode", wanted.decode)):
            leader = None
            for number in range(side.num_ranks):
                config = RankConfig(
                    role=role,
                    name=role,
                    model=model,
                    side=side,
                    rank=number,
                    leader=leader,
                    backend="local",
                    rows={state.name: rows_needed(state, side, wanted, prefix=0) for state in load_model(model).states},
                    driver="tcp://127.0.0.1:0",
                )
                ranks.append(RankThread(config, timeout_s=30.0))
                control, driver = ranks[-1].addresses()
                leader = leader or control
                addresses.append(driver)
        for turn in range(2):  # the ranks stay up
            assert run(wanted, ignore, connect=addresses[::-1]).verified, turn
        ask = Ranks.ask

        def leave(ranks: Ranks, commands: Mapping[Remote, Command], expected: type[Any]) -> Any:
            """The driver is stopped while ranks move requests, which nobody collects."""
            if any(isinstance(each, Collect) for each in commands.values()):
                raise InterruptedError
            return ask(ranks, commands, expected)

        def after_that_run() -> Row | None:
            with suppress(RankFailed):
                return run(wanted, ignore, connect=addresses)
            return None

        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "ask", leave)
            with pytest.raises(InterruptedError):
                run(wanted, ignore, connect=addresses)
        while (row := after_that_run()) is None:
            time.sleep(0.01)
        assert row.verified
        with pytest.raises(ConfigError, match="expected 0 to 1 of 'prefill'"):
            run(wanted, ignore, connect=addresses[1:])
        with pytest.raises(ConfigError, match="pools of"):
            run(case(model, "tp=2", "tp=1,page=8", requests=9), ignore, connect=addresses)
        with pytest.raises(ConfigError, match="side: expected"):
            run(case(model, "tp=2", "tp=1,page=16"), ignore, connect=addresses)
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("moved_away", [False, True], ids=["at its configured address", "at another address"])
def test_a_driver_uses_running_ranks_that_have_keys(model: str, tmp_path: Path, moved_away: bool) -> None:
    wanted = case(model, "tp=1", "tp=1,page=8")
    rows = {state.name: 64 for state in load_model(model).states}
    sides, others = {"prefill": wanted.prefill, "decode": wanted.decode}, {"prefill": "decode", "decode": "prefill"}
    with ExitStack() as opened:
        addresses = {role: f"tcp://127.0.0.1:{opened.enter_context(held_port())}" for role in sides}
        for role in sides:
            write_pair(KeyPair.generate(), tmp_path, name=role, force=False)
        drivers = []
        for role, side in sides.items():
            peer = others[role]
            rank = RankThread(
                RankConfig(
                    role=role,
                    model=model,
                    side=side,
                    backend="local",
                    rows=rows,
                    listen=addresses[role],
                    keys=str(tmp_path / f"{role}.toml"),
                    peers={peer: "tcp://127.0.0.1:9" if moved_away else addresses[peer]},
                    peer_keys={peer: f"file:{tmp_path / peer}.pub"},
                    driver="tcp://127.0.0.1:0",
                ),
                timeout_s=30.0,
            )
            opened.callback(rank.kill)
            drivers.append(rank.addresses()[1])
        assert run(wanted, ignore, connect=drivers).verified


def test_time_of_a_process_is_counted_once() -> None:
    """All ranks here are threads of one process. It has no more cores than the machine."""
    row = run(case("tiny", "tp=4", "tp=4", tokens=2048, num_layers=2), ignore)
    assert row.verified
    assert row.cpu_percent is not None
    assert 0 < row.cpu_percent <= 100 * (os.cpu_count() or 1) * 1.2


def test_a_report_is_utf_8_in_any_locale(tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    file = tmp_path / "report.html"
    sides = ("--model", "tiny", "--tokens", "64,128", "--prefill", "tp=1", "--decode", "tp=1", "--no-ceiling")
    assert bench("--backend", "local", *sides, "--html", str(file)).status == 0
    assert "\u2192" in file.read_text(encoding="utf-8")


def test_a_command_that_is_stopped_writes_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = (
        "--model",
        "tiny",
        "--tokens",
        "64,128",
        "--prefill",
        "tp=1",
        "--decode",
        "tp=1",
        "--no-ceiling",
        "--duration",
        "2",
    )
    line = [sys.executable, "-m", "disagg.commands.bench", "--backend", "local", *options, "--json", str(file)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        while "case 2 of 2" not in running.stderr.readline():
            pass
        running.terminate()
        running.stderr.read()
    assert running.returncode == 128 + signal.SIGTERM
    (row,) = json.loads(file.read_text())
    assert (row["tokens"], row["verified"]) == (64, True)
