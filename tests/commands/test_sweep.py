"""Cases from lists of values, page ids in runs, and transfers by the system alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import click
import numpy as np
import pytest

from disagg.commands.bench.command import Several, cases_of
from disagg.commands.cases.instructions import Block
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, items_of
from disagg.commands.rank.raw import Sink, memcpy_gbps, pour, write_into
from disagg.core.errors import ConfigError, TransferFailed
from disagg.models import load_model

ONE = {"backend": ("local",), "model": ("tiny",), "tokens": (64,), "requests": (1,), "concurrency": (1,), "run_pages": (1,)}


def test_every_combination_is_a_case() -> None:
    sides = [(Side(tp=2), Side()), (Side(), Side(tp=2, page=64))]
    swept = {**ONE, "tokens": (64, 128), "run_pages": (1, 4), "repeat": 3}
    cases = cases_of(sides, (8, 32), swept, num_layers=2)
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2
    assert {(c.tokens, c.run_pages) for c in cases} == {(64, 1), (64, 4), (128, 1), (128, 4)}
    assert {(c.prefill.page, c.decode.page, c.repeat, c.num_layers) for c in cases} == {(8, 8, 3, 2), (32, 32, 3, 2)}
    own = cases_of(sides, (), {**ONE, "repeat": 1})
    assert [c.decode.page for c in own] == [16, 64]


def test_values_are_separated_by_commas() -> None:
    numbers = Several(click.IntRange(1))
    assert numbers.convert("1,16", None, None) == (1, 16)
    assert numbers.convert((4,), None, None) == (4,)
    for wrong in ("", "1,", "0", "2,x"):
        with pytest.raises(click.BadParameter):
            numbers.convert(wrong, None, None)
    assert Several(click.STRING).convert(__file__, None, None) == (__file__,)


def test_pages_stay_together_in_runs() -> None:
    spec, side = load_model("tiny", num_layers=1), Side(page=4)
    for run in (1, 4):
        case = Case(backend="local", model="tiny", tokens=256, prefill=side, decode=side, run_pages=run)
        (item,), *_ = items_of(spec, side, side, case, name="prefill", pools={"kv": 70}, prefix=0)
        ids = item.rows["kv"]
        assert len(set(ids)) == len(ids) == 64
        assert max(ids) < 70
        follow = sum(b == a + 1 for a, b in itertools.pairwise(ids))
        assert follow < 10 if run == 1 else follow >= 64 - 64 // 4 - 2
    with pytest.raises(ConfigError, match="warm-up"):
        Case(backend="local", model="tiny", tokens=1, prefill=side, decode=side, warm_up=-1)


def test_blocks_cross_plain_sockets_to_the_place_of_their_number() -> None:
    arena, source = np.zeros(3_000_000, np.uint8), np.random.default_rng(0).integers(0, 256, 2_500_000, dtype=np.uint8)
    base = arena.ctypes.data
    sink = Sink("127.0.0.1", ((base + 10, 7), (base + 100, 2_500_000)), base=base, arena=arena, timeout_s=60)
    pour(("127.0.0.1", sink.port), 1, source.data, 60)
    pour(("127.0.0.1", sink.port), 0, source[:7].data, 60)
    assert (arena[100:2_500_100] == source).all()
    assert (arena[10:17] == source[:7]).all()
    assert not arena[:10].any()
    assert not arena[17:100].any()
    with pytest.raises(ConfigError, match="outside the arena"):
        Sink("127.0.0.1", ((base - 1, 7),), base=base, arena=arena, timeout_s=1)
    assert memcpy_gbps(source, 10**9) > 0


def test_a_block_is_written_into_another_process() -> None:
    code = "import numpy, sys; a = numpy.zeros(99, 'u1'); print(a.ctypes.data, flush=True); input(); print(a.tobytes().hex())"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        there = int(process.stdout.readline())
        source = np.arange(64, dtype=np.uint8)
        try:
            write_into(process.pid, source.ctypes.data, Block(0, 4, there + 1, 50))
        finally:
            process.stdin.write("\n")
            process.stdin.flush()
        assert bytes.fromhex(process.stdout.readline()) == bytes(1) + source[4:54].tobytes() + bytes(48)
    with pytest.raises(TransferFailed, match="process_vm_writev"):
        write_into(os.getpid(), source.ctypes.data, Block(0, 0, 8, 50))
