"""The example as a user starts it: real model code, one process per rank, real engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disagg.core.rows import Pages, Rows, Slot
from examples.transformers_pd import run, workers
from examples.transformers_pd.architectures import ARCHITECTURES, describe
from examples.transformers_pd.components import TOKENS, Block, ComponentSpec, TensorSpec
from examples.transformers_pd.content import CacheContent, Generation
from examples.transformers_pd.shards import Pool, Sharding, assemble, cut, stages
from tests.backends.conftest import require_engine
from tests.examples.conftest import ROOT

ENGINES = {"nixl": ("nixl", "nixl"), "mooncake": ("mooncake.engine", "mooncake-transfer-engine-non-cuda")}


# -- the whole of it ---------------------------------------------------------------------------------------------------


RECURRENT = [name for name in ARCHITECTURES if any(not component.paged for component in describe(name))]
ATTENTION = [name for name in ARCHITECTURES if name not in RECURRENT]
CHOSEN = {"some": [ATTENTION[0], RECURRENT[0]], "attention": ATTENTION[1:], "recurrent": RECURRENT[1:]}


@pytest.mark.parametrize(
    "chosen", ["some", *(pytest.param(name, marks=pytest.mark.nightly) for name in CHOSEN if name != "some")]
)
def test_divided_runs_equal_undivided_ones(chosen: str) -> None:
    """Architectures over both engines, in one run to start processes and models once."""
    for package in ENGINES.values():
        require_engine(*package)
    require_engine("transformers", "transformers")
    script, names = Path(run.__file__), CHOSEN[chosen]
    done = subprocess.run(
        [sys.executable, str(script), "--architectures", *names],
        capture_output=True, text=True, timeout=280, check=False, cwd=script.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    *lines, last = done.stdout.splitlines()
    assert last.startswith("all equal, ")
    expected = [(name, backend) for name in names for backend in ENGINES]
    assert len(lines) == len(expected)
    for (name, backend), line in zip(expected, lines, strict=True):
        components = ", ".join(component.name for component in describe(name))
        pattern = rf"{name} +{backend} .* -> .*: ([\d,]+) bytes, 24 tokens equal \(.*\), logits equal, "
        found = re.fullmatch(pattern + f"one flipped bit detected in {components}", line)
        assert found, line
        assert int(found[1].replace(",", "")) == delivered_nbytes(name)


def delivered_nbytes(name: str) -> int:
    """Bytes that all decode ranks need together, replicas included."""
    sharding = run.PAIRS[name].decode
    content = CacheContent.empty(name, len(run.PROMPT), run.DTYPE)
    shards = [cut(content, sharding.topology(rank)) for rank in range(sharding.num_ranks)]
    return sum(a.nbytes for shard in shards for layers in shard.values() for roles in layers.values() for a in roles.values())


def test_differences_are_printed_and_set_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Generation((1, 2, 3), np.zeros((2, 4), np.float32))
    corrupted = replace(expected, logits=expected.logits + 1)
    good = run.Outcome(10, expected, expected, {"kv": corrupted, "ssm": corrupted})
    assert good.ok
    assert str(good) == "10 bytes, 3 tokens equal (1 2 3 ...), logits equal, one flipped bit detected in kv, ssm"
    assert not replace(good, found=corrupted).ok
    assert "logits DIFFER" in str(replace(good, found=corrupted))
    assert "tokens DIFFER" in str(replace(good, found=replace(expected, tokens=(1, 2, 4))))
    assert not replace(good, found=replace(expected, tokens=(1, 2, 4))).ok
    assert not replace(good, corrupted={"kv": corrupted, "ssm": expected}).ok
    assert str(replace(good, corrupted={"kv": corrupted, "ssm": expected})).endswith("one flipped bit NOT DETECTED in ssm")

    monkeypatch.setattr(sys, "argv", ["run.py"])
    for ok, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(run, "run", lambda *_, ok=ok: ok)
        assert run.main() == status


# -- shards and pools --------------------------------------------------------------------------------------------------


def filled(name: str, num_tokens: int) -> CacheContent:
    content = CacheContent.empty(name, num_tokens, "bfloat16")
    rng = np.random.default_rng(1)
    for *_, array in content.walk():
        array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape)
    return content


def rows_of(component: ComponentSpec, num_tokens: int, page_size: int) -> Rows:
    start, stop = component.tokens(num_tokens)
    count = -(-stop // page_size) - start // page_size
    return Pages(np.arange(count, dtype=np.int32)[::-1] * 2, first_token=start) if component.paged else Slot(3)


@pytest.mark.parametrize(
    "sharding", [Sharding(tp=3), Sharding(tp=2, pp=3, order="hnd", page_size=4), Sharding(tp=8, page_size=5)], ids=str
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shards_written_to_pools_assemble_to_the_same_content(name: str, sharding: Sharding) -> None:
    """For every architecture."""
    content = filled(name, 37)
    shards = []
    for rank in range(sharding.num_ranks):
        topology = sharding.topology(rank)
        shard = cut(content, topology)
        read = {}
        for component in describe(name):
            pool = Pool.allocate(name, component, sharding=sharding, topology=topology, dtype="bfloat16")
            rows, held = rows_of(component, 37, pool.page_size), component.tokens(37)
            pool.write(rows, shard[component.name], held)
            read[component.name] = pool.read(rows, held)
            assert pool.is_blank() == (not pool.tensors)
            pool.wipe(rows, held)
            assert pool.is_blank()
        shards.append(read)
    assert assemble(name, 37, "bfloat16", sharding=sharding, shards=shards).identical(content)


def test_every_block_is_split_separately_and_replicas_are_right() -> None:
    blocks = (Block("x", 4, 2), Block("B", 1, 3))
    tensor = TensorSpec("conv", ("token", "channel"), (TOKENS, 11), "channel", blocks)
    component = ComponentSpec("kv", (0, 1, 2), (tensor,))
    pools = [
        Pool.allocate("llama", component, sharding=Sharding(), topology=Sharding(tp=2).topology(r), dtype="bfloat16")
        for r in (0, 1)
    ]
    assert [pool.tensors[0]["conv"].shape for pool in pools] == [(64, 16, 7)] * 2
    content = filled("llama", 5)
    heads = [cut(content, Sharding(tp=6).topology(rank))["kv"][0]["k"] for rank in range(6)]
    whole = content.arrays["kv"][0]["k"]
    for found, head in zip(heads, (0, 0, 1, 2, 2, 3), strict=True):
        np.testing.assert_array_equal(found, whole[:, head : head + 1])
    assert stages("qwen3", describe("qwen3")[0], 2) == ((0, 1), (2, 3, 4))


def test_replicas_that_disagree_are_refused() -> None:
    content, sharding = filled("llama", 5), Sharding(tp=6)
    shards = [cut(content, sharding.topology(rank)) for rank in range(sharding.num_ranks)]
    shards[0]["kv"][0]["k"][0] ^= 1
    with pytest.raises(ValueError, match="rank 0 does not hold the same bytes as its replica"):
        assemble("llama", 5, "bfloat16", sharding=sharding, shards=shards)


# -- processes ---------------------------------------------------------------------------------------------------------


class Child:
    """The object in the workers of these tests."""

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self) -> None:
        raise ArithmeticError("no sum")

    def die(self) -> None:
        os.write(2, b"last words\n")
        os.abort()

    def close(self) -> None:
        pass


def has_ended(pid: int, *, within_s: float) -> bool:
    """Whether another process's child ends in time; a zombie has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_failures_of_children_are_raised() -> None:
    with workers.start(["one", "two"]) as crew:
        one, two = crew.values()
        one.build(Child)
        two.build(Child)
        assert workers.gather([one, two]) == [None, None]
        one.call("fail")
        with pytest.raises(workers.WorkerFailed, match=r"one failed(.|\n)*ArithmeticError: no sum"):
            workers.gather([one])
        two.call("sleep", 3600)
        with pytest.raises(workers.WorkerFailed, match=r"no answer after 0\.1 s from two"):
            workers.gather([two], timeout_s=0.1)
        one.call("die")
        with pytest.raises(workers.WorkerFailed, match=r"one died with exit status -6\nlast words"):
            workers.gather([two, one])  # without waiting for the sleeping one
        crew["two"].process.kill()
    assert not any(worker.process.is_alive() for worker in crew.values())


def test_children_end_with_their_parent() -> None:
    program = """
import sys, time
from examples.transformers_pd import workers
from tests.examples.test_transformers_pd import Child
if __name__ == "__main__":
    with workers.start(["idle", "busy"]) as crew:
        for worker in crew.values():
            worker.build(Child)
            workers.gather([worker])
            worker.call("pid")
            print(*workers.gather([worker]), flush=True)
        crew["busy"].call("sleep", 60)
        print("ready", flush=True)
        time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": ROOT}
    ) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline().strip() for _ in range(3)]
        parent.send_signal(signal.SIGKILL)
    assert lines[2] == "ready", lines
    assert all(has_ended(int(pid), within_s=10) for pid in lines[:2])
