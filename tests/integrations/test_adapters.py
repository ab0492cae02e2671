"""Digests of LoRA adapters: of their files, whatever they are called."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.integrations import adapters
from disagg.integrations.adapters import Adapters

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an adapter to a folder of its own, and returns its path."""
    numbers = itertools.count()

    def one(config: str = "{}", weights: bytes = b"weights", name: str = "adapter_model.safetensors") -> str:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
        (folder / name).write_bytes(weights)
        return str(folder)

    return one


def digest(path: str) -> str:
    return Adapters().digest(path, loaded=1).result(10)


def test_only_equal_files_have_equal_digests(write: Write) -> None:
    same = write()
    assert digest(same) == digest(write())
    others = [write(config="{ }"), write(weights=b"weightz"), write(name="adapter_model.bin")]
    assert len({digest(path) for path in (same, *others)}) == 4


@pytest.mark.parametrize("config", ['{"use_rslora": true}', '{"use_rslora": false, "alpha_pattern": {"q_proj": 8}}'])
def test_an_adapter_has_another_digest_where_the_server_ignores_a_part_of_its_configuration(write: Write, config: str) -> None:
    path, plain = write(config=config), write(config='{"use_rslora": false, "alpha_pattern": {}}')
    ignores = Adapters(("use_rslora", "alpha_pattern"))
    assert ignores.digest(path, loaded=1).result(10) != digest(path)
    assert ignores.digest(plain, loaded=2).result(10) == digest(plain)


@pytest.mark.parametrize("config", ["{", "[1]"])
def test_an_adapter_whose_configuration_cannot_be_read_has_a_digest_of_its_own(write: Write, config: str) -> None:
    path = write(config=config)
    assert Adapters(("use_rslora",)).digest(path, loaded=1).result(10) != Adapters(("use_rslora",)).digest(
        path, loaded=1
    ).result(10)


def test_large_adapters_are_read_by_a_thread(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(weights=b"w" * 5_000_000)
    expected = digest(path)
    monkeypatch.setattr(adapters, "SMALL_NBYTES", 100)
    assert digest(path) == expected


def test_a_large_adapter_is_read_at_once_where_no_thread_can_start(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path, known = write(), Adapters()
    expected = digest(path)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(adapters, "SMALL_NBYTES", 0)
    monkeypatch.setattr(threading.Thread, "start", fails)
    assert known.digest(path, loaded=1).result(0) == expected


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_cannot_be_read_equals_no_other(write: Write, missing: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write()
    Path(path, missing).unlink()
    known = Adapters()
    found = known.digest(path, loaded=1).result(0)
    assert known.digest(path, loaded=1).result(0) == found
    assert found not in (digest(path), known.digest(path, loaded=2).result(0))
    assert "are not handed over, since it cannot be read" in caplog.text


@pytest.mark.parametrize("small", [0, 1 << 20], ids=["by a thread", "at once"])
def test_an_error_that_passes_does_not_last(write: Write, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system was away, or no descriptor was left."""
    monkeypatch.setattr(adapters, "SMALL_NBYTES", small)
    path, known = write(), Adapters()
    expected = digest(path)
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "READ_AGAIN_S", 60.0)

        def fails(_: Path) -> bytes:
            raise OSError(24, "Too many open files")

        patch.setattr(adapters, "_content", fails)
        lasting = known.digest(path, loaded=1).result(10)
        assert lasting == known.digest(path, loaded=1).result(10) != expected, "not at each request"
        patch.setattr(adapters, "READ_AGAIN_S", 0.0)
        assert known.digest(path, loaded=2).result(10) != expected
    assert known.digest(path, loaded=2).result(10) == expected
    assert known.digest(path, loaded=1).result(10) == lasting


def test_an_adapter_is_read_when_it_is_loaded(write: Write) -> None:
    """What changes on the disk afterwards is not in the server's memory, unless it reads the adapter again in place."""
    path, known = write(), Adapters()
    before = [known.digest(path, loaded=1, may_change=each).result(0) for each in (False, True)]
    Path(path, "adapter_model.safetensors").write_bytes(b"of the next step")
    assert known.digest(path, loaded=1).result(0) == before[0] == before[1]
    after = known.digest(path, loaded=2).result(0)
    assert after == known.digest(path, loaded=1, may_change=True).result(0) != before[0]


def test_only_the_last_adapters_are_kept(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "NUM_ADAPTERS", 2)
    known, path = Adapters(), write()
    for number in range(5):
        known.digest(path, loaded=number)
    assert len(known._found) == 2
