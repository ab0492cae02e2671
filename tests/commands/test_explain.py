"""`disagg explain`: its figures against plans bound on real memory and against the reports of real runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.backends.base import BackendOptions, Transport
from disagg.backends.registry import load
from disagg.commands.bench.command import run_cases
from disagg.commands.cases.places import rows_of
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.explain import counting
from disagg.commands.explain.counting import FIRST_ADDRESS, CopyCounter
from disagg.commands.explain.engine import engine_of
from disagg.commands.explain.explanation import ExplainRequest, explain_request
from disagg.commands.explain.instance import Instance
from disagg.commands.explain.plot import page_of
from disagg.commands.explain.summary import Summary, parse_link
from disagg.commands.main import main
from disagg.core.errors import ConfigError
from disagg.layout.binding import bind, bind_rows
from disagg.layout.election import elect
from disagg.layout.placement import Placement
from disagg.layout.plan import make_plan
from disagg.layout.tables import layout_table
from disagg.models import load_model
from disagg.models.pools import PoolShape, allocate, lay_out
from tests.backends.conftest import require_engine
from tests.commands.conftest import said

SIDES = (
    "tp=1", "tp=4", "tp=2,page=64", "tp=2,page=64,layout=hnd", "tp=3,page=4", "tp=1,pp=3", "tp=2,pp=2", "cp=2,page=8",
    "cp=3,page=8,context=pages", "cp=2,page=4,context=blocks", "tp=8,layout=hnd", "tp=1,page=128",
)  # fmt: skip
MODELS = ("llama-3-8b", "gpt-oss-120b", "deepseek-v3.2", "qwen3-next-80b", "kimi-linear-48b", "falcon-h1-7b")
COMMAND = [sys.executable, "-m", "disagg.commands", "explain"]
DOCUMENTS = [Path(__file__).parents[2] / "docs" / name for name in ("explain.md", "concepts.md")]


def case(prefill: str, decode: str, **settings: object) -> Case:
    given = {"backend": "local", "model": "tiny", "tokens": 75, **settings}
    return Case(prefill=Side.parse(prefill), decode=Side.parse(decode), **given)  # type: ignore[arg-type]


def summary(asked: Case) -> Summary:
    return explain_request(ExplainRequest(case=asked)).summary


def on_real_memory(half: Instance) -> tuple[list[dict[str, Placement]], object]:
    """The same pools, really allocated."""
    rows = {component.component: component.num_rows for p in half.placements for component in p.values()}
    shape = half.side.pool_shape(256, rows=rows)
    group = [allocate(half.spec, rank, shape).components for rank in half.side.topology().group()]
    table = layout_table(half.side.topology(), [component.layouts for component in group[0]])
    return [{c.name: c.placement for c in components if c.placement} for components in group], table


@pytest.mark.parametrize("model", MODELS)
def test_bytes_and_runs_match_plans_bound_on_real_memory(model: str) -> None:
    for number, (prefill, decode) in enumerate(itertools.product(SIDES, SIDES)):
        if number % 3:
            continue
        asked = case(
            prefill, decode, model=model, tokens=(75, 128, 200)[number % 9 // 3], num_layers=4 + number % 5, seed=number,
            prefix_hit=(0, 33, 0, 64)[number % 4],
        )  # fmt: skip
        found = explain_request(ExplainRequest(case=asked))
        (ours, source), (theirs, destination) = (on_real_memory(half) for half in (found.source, found.destination))
        election = elect(source, destination)  # type: ignore[arg-type]
        bound: dict[tuple[int, int, str], tuple[int, int]] = {}
        for pair in election.by_pair:
            plan = make_plan(
                election,
                source=(pair[0], source, ours[pair[0]]),  # type: ignore[arg-type]
                destination=(pair[1], destination, theirs[pair[1]]),  # type: ignore[arg-type]
            )
            for name, component in plan.components.items():
                state, item = found.source.spec.state(name), found.destination.items[pair[1]]
                need = item.needs[name]
                rows = rows_of(state, found.source.items[pair[0]]), rows_of(state, item)
                copies = bind(component, source=rows[0], destination=rows[1], tokens=need, num_tokens=need[1])
                if len(copies):
                    bound[(*pair, name)] = copies.total_nbytes, len(copies)
        explained = {
            (pair.source, pair.destination, part.name): (part.bytes, part.runs)
            for pair in found.summary.pairs
            for part in pair.components
        }
        assert explained == bound, (prefill, decode, asked)
        assert found.summary.covered
        assert found.summary.total_bytes == sum(nbytes for nbytes, _ in bound.values())


@pytest.mark.parametrize(
    ("backend", "model", "prefill", "decode", "settings"),
    [
        ("local", "tiny", "tp=4", "tp=2", {}),
        ("local", "tiny", "tp=2,page=64", "tp=4,page=4,layout=hnd", {"prefix_hit": 40}),
        ("local", "qwen3-next-80b", "tp=2", "tp=1,page=64", {"num_layers": 8, "tokens": 300}),
        ("local", "llama-3-8b", "tp=1", "tp=2", {"num_layers": 2, "pack_below": 10000, "prefix_hit": 40}),
        ("local", "qwen3-next-80b", "tp=2", "tp=4,page=64", {"num_layers": 4, "tokens": 300, "pack_below": 20000}),
        ("cma", "llama-3-8b", "tp=1", "tp=2", {"num_layers": 2, "tokens": 300, "pack_below": 8192}),
        ("cma", "llama-3-8b", "tp=4", "tp=8,page=32", {"num_layers": 2, "tokens": 600}),
        ("local", "tiny", "tp=4", "tp=2", {"pack_below": 65536}),
        ("local", "llama-3-8b", "tp=1", "tp=2", {"num_layers": 2, "tokens": 300, "pack_below": 8192}),
        ("local", "tiny", "tp=1,page=64", "tp=2,page=4,layout=hnd", {"prefix_hit": 40, "pack_below": 65536}),
        ("nixl", "qwen3-next-80b", "tp=2", "tp=1,page=64", {"num_layers": 4, "tokens": 300, "pack_below": 65536}),
        ("mooncake", "tiny", "tp=1", "tp=2", {"pack_below": 0}),
        ("local", "tiny", "tp=2,kv=bfloat16", "page=64,kv=float8_e4m3fn", {"pack_below": 4096}),
        ("local", "deepseek-v3.2", "kv=float8_e5m2", "tp=2,page=64,kv=float16", {"num_layers": 2, "pack_below": 4096}),
    ],
)
def test_bytes_runs_and_descriptors_match_a_run(
    backend: str, model: str, prefill: str, decode: str, settings: dict[str, object]
) -> None:
    if backend in ("nixl", "mooncake"):
        require_engine({"nixl": "nixl._bindings", "mooncake": "mooncake.engine"}[backend], backend)
    asked = case(prefill, decode, model=model, **{"tokens": 700, "repeat": 1, "ceiling": False, **settings})
    asked = Case(**{**{f: getattr(asked, f) for f in asked.__dataclass_fields__}, "backend": backend})
    (row,) = run_cases([asked])
    found = explain_request(ExplainRequest(case=asked)).summary
    assert row.verified, row.problem
    assert (found.total_bytes, found.runs, found.descriptors) == (row.bytes, row.pieces, row.posts)
    by_way: dict[str, int] = {}
    for part in (part for pair in found.pairs for part in pair.components):
        for way, share in part.ways.items():
            by_way[way] = by_way.get(way, 0) + share.bytes
    assert by_way == row.ways


@pytest.mark.parametrize("model", [("--model", "tiny"), ("--layers", "4", "--kv-heads", "4", "--head-dim", "64")])
def test_the_json_of_both_commands_agrees(tmp_path: Path, model: tuple[str, ...]) -> None:
    same = [*model, "--tokens", "100", "--prefill", "tp=4", "--decode", "tp=2,page=64", "--backend", "local"]
    rows, explained = tmp_path / "rows.json", tmp_path / "explained.json"
    bench = [sys.executable, "-m", "disagg.commands.bench", *same, "--repeat", "1", "--no-ceiling", "--json", str(rows)]
    subprocess.run(bench, check=True, capture_output=True, timeout=60)
    subprocess.run([*COMMAND, *same, "--json", str(explained)], check=True, capture_output=True, timeout=60)
    (row,), found = json.loads(rows.read_text()), json.loads(explained.read_text())
    parts = [part for pair in found["pairs"] for part in pair["components"]]
    assert found["covered"] is True
    assert found["total_bytes"] == row["bytes"] == sum(part["bytes"] for part in parts)
    assert sum(part["descriptors"] for part in parts) == row["posts"]
    assert {"name", "bytes", "runs", "descriptors", "way", "reason"} <= parts[0].keys()
    assert {pair["source"] for pair in found["pairs"]} == {0, 1, 2, 3}


@pytest.mark.parametrize("engine", ["cma", "nixl", "mooncake"])
@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
def test_thresholds_are_those_the_engine_declares(engine: str, transport: str) -> None:
    if (engine, transport) == ("mooncake", "shm"):
        pytest.skip("mooncake has no shared memory")
    if (engine, transport) == ("cma", "tcp"):
        pytest.skip("cma has shared memory only")
    if engine != "cma":
        require_engine({"nixl": "nixl._bindings", "mooncake": "mooncake.engine"}[engine], engine)
    backend = load(engine, BackendOptions(transport=Transport(transport)))
    try:
        declared, found = engine_of(engine, transport).staging, backend.staging
        assert dataclasses.replace(declared, address_space=found.address_space) == found
    finally:
        backend.close()


def test_auto_is_cma_on_one_host_and_a_network_engine_otherwise() -> None:
    assert [engine_of("auto", transport).name for transport in ("auto", "shm", "tcp", "rdma")] == ["cma", "cma", "nixl", "nixl"]


def test_an_engine_with_a_fixed_transport_ignores_the_requested_one() -> None:
    engine = engine_of("nvlink", "auto")
    assert (engine.transport, engine.staging.pack_below) == ("peer memory", 0)


def test_numbers_are_converted_in_a_direct_copy_where_the_engine_computes_addresses() -> None:
    converted = "kv=bfloat16", "kv=float8_e4m3fn"
    (pair,) = summary(case(*converted, backend="nvlink")).pairs
    assert [part.way for part in pair.components] == ["direct"]
    with pytest.raises(ConfigError, match="component 'kv': cma converts numbers only while they are packed"):
        summary(case(*converted, backend="cma", pack_below=0))
    with pytest.raises(ConfigError, match="kv: expected it of both sides or of none, found tp=1,page=16,kv=float16 and tp=1"):
        case("kv=float16", "tp=1")


def test_unallocated_pools_have_the_layout_of_allocated_ones() -> None:
    spec, side = load_model("qwen3-next-80b", num_layers=8), Side.parse("tp=2,layout=hnd")
    shape = PoolShape(num_pages=5, order="hnd")
    real = allocate(spec, side.topology(1), shape)
    base = real.arena.__array_interface__["data"][0]
    for ours, theirs in zip(lay_out(spec, side.topology(1), shape).components(FIRST_ADDRESS), real.components, strict=True):
        assert ours.layouts == theirs.layouts
        assert ours.placement is not None
        assert theirs.placement is not None
        for tensor, other in zip(ours.placement.tensors, theirs.placement.tensors, strict=True):
            assert (tensor.strides, tensor.row_stride) == (other.strides, other.row_stride)
            assert [b - FIRST_ADDRESS for b in tensor.bases] == [b - base for b in other.bases]


def test_counts_are_the_same_whether_copies_are_bound_at_once_or_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explain_request(
        ExplainRequest(case=case("tp=2", "tp=1,page=64", model="qwen3-next-80b", num_layers=8), consecutive=True)
    )
    for pair, plan in found.plans.items():
        for name, component in plan.components.items():
            need = found.destination.items[pair[1]].needs[name]
            bound = bind_rows(
                component,
                source=found.source.rows(pair[0], name),
                destination=found.destination.rows(pair[1], name),
                tokens=need,
                num_tokens=need[1],
            )
            expected = bound.copies()
            for max_copies in (1, 3, 1 << 22):
                monkeypatch.setattr(counting, "MAX_COPIES", max_copies)
                assert CopyCounter().count(bound) == (expected.total_nbytes, len(expected))


@pytest.mark.parametrize(("page", "way"), [(16, "direct"), (8, "packed")])
def test_the_engine_gathers_pieces_if_half_the_threshold_is_contiguous_at_the_destination(page: int, way: str) -> None:
    """Heads of 256 bytes, one per decode rank: 4 KiB or 2 KiB are contiguous in its pages, and the threshold is 8 KiB."""
    spread = case(f"tp=4,page={page}", f"tp=8,page={page}", model="llama-3-8b", backend="cma", tokens=256)
    parts = [pair.components[0] for pair in explain_request(ExplainRequest(case=spread)).summary.pairs]
    assert {part.way for part in parts} == {way}
    assert all(("gathers them" in part.reason) is (way == "direct") for part in parts)


@pytest.mark.parametrize(
    ("tokens", "said"), [(16, "page; not below 8 KiB,"), (5, "page; those of full pages are not below 8 KiB,")]
)
def test_the_decision_is_by_full_pages(tokens: int, said: str) -> None:
    (pair,) = summary(case("tp=1", "tp=1", num_layers=1, tokens=tokens, backend="cma")).pairs
    (part,) = pair.components
    assert (part.way, part.run_bytes_mean) == ("direct", 512 * tokens)
    assert said in part.reason
    assert ("full pages" in part.reason) is (part.run_bytes_mean < 8192)


def test_consecutive_pages_are_longer_runs() -> None:
    same = case("tp=1", "tp=1", tokens=256)
    one_page, whole = (explain_request(ExplainRequest(case=same, consecutive=flag)).summary for flag in (False, True))
    assert one_page.total_bytes == whole.total_bytes
    assert whole.runs == 2 * 4  # K and V of every layer
    assert one_page.runs > whole.runs


def test_replicas_write_and_hot_spots_are_named() -> None:
    found = summary(case("tp=8", "tp=2", model="deepseek-v3.2", num_layers=4, tokens=64))
    assert sorted(found.fan_out) == list(range(8))  # every replica takes its part
    idle = summary(case("tp=8", "tp=1", model="deepseek-v3.2", num_layers=1, tokens=64))
    assert any("write nothing" in line for line in idle.hot_spots)
    assert any("times the mean" in line for line in idle.hot_spots)


def test_the_bytes_of_the_busiest_rank_at_the_rate_of_the_link() -> None:
    """Four prefill ranks write to one decode rank, whose two NICs of 200 Gbit/s are 5e10 bytes per second."""
    asked = case("tp=4", "tp=1", tokens=160)
    found = explain_request(ExplainRequest(case=asked, link=parse_link("2x200gbit"))).summary
    assert found.link_seconds == pytest.approx(found.total_bytes / 5e10)
    spread = explain_request(ExplainRequest(case=case("tp=1", "tp=4", tokens=160), link=parse_link("400gbit"))).summary
    assert spread.link_seconds == pytest.approx(spread.total_bytes / 5e10)
    assert summary(asked).link_seconds is None


@pytest.mark.parametrize("link", ["400", "gbit", "0gbit", "x400gbit", "0x400gbit", "400gbit ", "-1gbit"])
def test_an_invalid_link_is_named(link: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a rate such as 400gbit or 8x400gbit, found '"):
        parse_link(link)


def explained(*arguments: str) -> subprocess.CompletedProcess[str]:
    return said(main, "explain", *arguments)


TINY = ("--model", "tiny", "--tokens", "64", "--prefill", "tp=4", "--decode", "tp=2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((*TINY[:4], "--prefill", "tp=x", *TINY[6:]), ("'tp=x'",)),
        ((*TINY[:4], "--prefill", "pp=3,layers=1+1+1", *TINY[6:]), ("add up to 4", "[1, 1, 1]")),
        ((*TINY, "--prefill", "tp=2"), ("--prefill", "expected one side, found tp=4 and tp=2")),
        ((*TINY, "--tokens", "16777217"), ("tokens: expected at most 16777216, found 16777217",)),
        ((*TINY, "--decode-model", "llama-3-8b"), ("'kv'", "'dim'", "64", "128")),
        ((*TINY, "--decode-model", "deepseek-v3.2"), ("required", "does not have it")),
        ((*TINY, "--backend", "pigeon"), ("'pigeon'", "nixl")),
        ((*TINY, "--model", "lama-3-8b"), ("'lama-3-8b'", "similar names: llama-3-8b")),
        ((*TINY, "--kv-heads", "4"), ("--model, or --layers, --kv-heads and --head-dim",)),
        ((*TINY[2:], "--layers", "4", "--kv-heads", "4"), ("--layers, --kv-heads and --head-dim together",)),
        (TINY[2:], ("--model", "--head-dim")),
        ((*TINY, "--backend", "mooncake", "--transport", "shm"), ("'shm'", "tcp, rdma")),
        ((*TINY, "--prefix-hit", "64"), ("0 to 63", "64")),
        ((*TINY, "--plot", "/tmp/x.gif"), ("pdf, png, svg", "x.gif")),
        ((*TINY, "--json", "/absent/x"), ("/absent/x: there is no folder /absent",)),
        ((*TINY, "--plot", "/absent/x.svg"), ("/absent/x.svg: there is no folder /absent",)),
    ],
)
def test_errors_are_one_sentence(arguments: tuple[str, ...], named: tuple[str, ...]) -> None:
    ended = explained(*arguments)
    assert ended.returncode == 2
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("disagg explain: ")
    assert all(part in sentence for part in named), sentence


def test_layouts_that_do_not_match_name_the_field_and_both_values(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 64, "torch_dtype": "float16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = explained(*TINY, "--decode-model", str(tmp_path / "config.json"))
    assert ended.returncode == 2
    assert "tensor 'k': dtype: bfloat16 here, float16 at the peer" in ended.stderr
    assert "Traceback" in explained(*TINY, "--decode-model", str(tmp_path / "config.json"), "--debug").stderr


def test_the_table_shows_ranks_amounts_and_reasons() -> None:
    ended = explained(*TINY, "--link", "2x400gbit")
    assert ended.returncode == 0, ended.stderr
    for part in (
        "prefill tp=4,page=16 -> decode tp=2,page=16",
        "each token is a run (strides: 128 B at the source, 256 B at the destination)",
        "prefill ranks 0-3 write to 1 decode rank each",
        "decode ranks 0-1 are written by 2 prefill ranks each",
        "every needed byte is written exactly once",
        "link: ",
        "ms for the bytes alone of the busiest rank, at 2x400gbit",
    ):
        assert part in ended.stdout
    assert "disagg explain --model llama-3-70b" in explained("--help").stdout


def test_of_many_pairs_those_with_the_same_figures_share_a_line(tmp_path: Path) -> None:
    sides = ("--prefill", "tp=8,pp=8", "--decode", "tp=64")
    file = tmp_path / "pairs.json"
    model = ("--layers", "16", "--kv-heads", "64", "--head-dim", "64", "--tokens", "100", "--backend", "local")
    ended = explained(*model, *sides, "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout
    pairs = json.loads(file.read_text())["pairs"]
    assert len(pairs) == 8 * 64, "each decode rank is written by one rank of each stage"
    figures = {json.dumps(pair["components"]) for pair in pairs}
    assert f"{len(pairs) - len(figures)} more pairs of ranks have the figures of one of these" in shown
    assert len(re.findall(r"^ \d+ +\d+ +kv ", shown, re.MULTILINE)) == len(figures) < len(pairs)


def test_what_each_nic_carries_is_shown_and_in_the_json(tmp_path: Path) -> None:
    """A token has 512 bytes in each of 8 tensors: 128 of them on each of 4 prefill ranks, in a piece of their own."""
    same = (*TINY, "--backend", "mooncake", "--transport", "rdma", "--pack-below", "0")
    ended = explained(*same, "--link", "3x400gbit", "--json", str(tmp_path / "found.json"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())["nics"]
    each = {"prefill": (4, 64 * 8 * 128, 64 * 8), "decode": (2, 64 * 8 * 256, 64 * 16)}
    assert found == [
        {"role": role, "rank": rank, "nic": nic, "bytes": -(-nbytes // 3), "work_requests": -(-pieces // 3)}
        for role, (num_ranks, nbytes, pieces) in each.items()
        for rank in range(num_ranks)
        for nic in range(3)
    ]
    ended = explained(*same, "--link", "2x400gbit")
    assert "NICs 0-1 of prefill ranks 0-3: 32 KiB sent by each, 256 work requests\n" in ended.stdout
    assert "NICs 0-1 of decode ranks 0-1: 64 KiB received by each, 512 work requests\n" in ended.stdout
    assert "NIC 0" not in explained(*TINY, "--link", "400gbit").stdout


def test_nixl_cuts_long_pieces_and_sends_short_ones_by_the_first_nic() -> None:
    """As was counted on soft devices. Packed, 64 KiB are one piece."""
    ended = explained(*TINY, "--backend", "nixl", "--transport", "rdma", "--link", "2x400gbit", "--pack-below", "0")
    assert "NIC 0 of prefill ranks 0-3: 64 KiB sent by each, 512 work requests\n" in ended.stdout
    assert "NIC 1 of prefill ranks 0-3: 0 B sent by each, 0 work requests\n" in ended.stdout
    ended = explained(*TINY, "--backend", "nixl", "--transport", "rdma", "--link", "2x400gbit")
    assert "NICs 0-1 of prefill ranks 0-3: 32 KiB sent by each, 1 work requests\n" in ended.stdout


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([*COMMAND, *TINY], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_plot_is_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    file = tmp_path / f"plot.{suffix}"
    ended = explained("--model", "qwen3-next-80b", "--layers", "4", *TINY[2:], "--plot", str(file))
    assert ended.returncode == 0, ended.stderr
    assert file.stat().st_size > 1000


def test_the_documented_page_has_pieces_of_512_bytes() -> None:
    for layout, expected in (("nhd", 512), ("hnd", 8192)):
        sides = [f"tp={tp},layout={layout}" for tp in (4, 2)]
        found = explain_request(ExplainRequest(case=case(*sides, model="llama-3-70b", num_layers=1, tokens=64)))
        page = page_of(found, "kv", "k", 0, side=1)
        assert page is not None
        assert {piece.nbytes for piece in page.pieces} == {expected}
        assert sum(piece.nbytes for piece in page.pieces) == 16 * 4 * 128 * 2
        assert {piece.other for piece in page.pieces} == {0, 1}


EXAMPLES = [
    example
    for page in DOCUMENTS
    for example in re.findall(r"```console\n\$ disagg (explain .*?)\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_the_documented_output_matches_the_command(command: str, shown: str) -> None:
    ended = explained(*command.split()[1:])
    printed = [line.rstrip() for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    expected = shown.splitlines()
    at = 0
    for number, part in enumerate(" \n".join(expected).split("...")):
        lines = [line.rstrip() for line in part.splitlines() if line.strip()]
        found = [i for i in range(at, len(printed) - len(lines) + 1) if printed[i : i + len(lines)] == lines]
        assert found, "\n".join(printed)
        assert number or found[0] == 0, "the first lines are missing and not replaced by dots"
        at = found[0] + len(lines)
    assert expected[-1] == "..." or at == len(printed), "the last lines are missing and not replaced by dots"
