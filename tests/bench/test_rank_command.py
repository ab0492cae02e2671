"""`disagg prefill` and `disagg decode`, as an operator starts them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.bench.sides import Side
from disagg.cli.rank import configure, pairs, read_config, read_keys
from disagg.errors import ConfigError

COMMAND = [sys.executable, "-m", "disagg.cli"]


@contextlib.contextmanager
def rank(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A rank that is up."""
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def address(text: str) -> str:
    return text.partition("address=")[2].split()[0]


def test_two_ranks_find_each_other_and_end_cleanly(tmp_path: Path, mooncake: str, model: str) -> None:
    same = ("--model", model, "--backend", mooncake, "--pages", "8")
    with rank("decode", *same, "--side", "tp=1,page=8") as decode:
        where = address(line(decode))
        config = tmp_path / "prefill.toml"
        config.write_text(f'model = "{model}"\nbackend = "{mooncake}"\npages = 4\n[peers]\ndecode = "{where}"\n')
        with rank("prefill", "--config", str(config), "--pages", "8") as prefill:
            first = line(prefill)
            assert first.startswith("prefill rank 0 of 1: address=tcp://127.0.0.1:")
            again = ("--side", "tp=1,page=8", "--peer", f"prefill={address(first)}", "--name", "other")
            with rank("decode", *same, *again) as refused:  # prefill does not know it: it stays up, and is not ready
                assert line(refused).startswith("other rank 0 of 1: address=")
                refused.send_signal(signal.SIGTERM)
                assert refused.wait(20) == 0
            decode.send_signal(signal.SIGINT)
            assert decode.wait(20) == 0
            prefill.send_signal(signal.SIGTERM)
            assert prefill.wait(20) == 0


def test_readiness_is_said(mooncake: str, model: str) -> None:
    same = ("--model", model, "--backend", mooncake, "--pages", "8")
    with rank("decode", *same, "--listen", "tcp://127.0.0.1:0", "--until-stdin-ends") as probe:
        free = address(line(probe))
        probe.send_signal(signal.SIGTERM)
        probe.wait(20)
    with rank("prefill", *same, "--peer", f"decode={free}") as prefill:
        where = address(line(prefill))
        with rank("decode", *same, "--listen", free, "--peer", f"prefill={where}") as decode:
            assert address(line(decode)) == free
            assert line(decode) == "decode rank 0 of 1: peer prefill is ready\n"
            assert line(prefill) == "prefill rank 0 of 1: peer decode is ready\n"
            decode.send_signal(signal.SIGTERM)
            assert decode.wait(20) == 0
        assert line(prefill).startswith("prefill rank 0 of 1: peer decode is gone: ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--side", "tp=x"), "'tp=x'"),
        (("--rank", "3"), "0 to 0, found 3"),
        (("--side", "tp=2", "--rank", "1"), "leader"),
        (("--peer", "decode"), "NAME=VALUE"),
        (("--driver", "tcp://0.0.0.0:7100"), "--insecure"),
        (("--listen", "tcp://0.0.0.0:0"), "advertise"),
        (("--listen", "tcp://192.0.2.1:0"), "keys"),
        (("--backend", "no-such-engine"), "local, mooncake, nixl"),
        (("--transport", "pigeon"), "auto, rdma, tcp, shm"),
        (("--keys", "/nowhere.toml"), "/nowhere.toml"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
        (("--layers", "9"), "layers"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(arguments: tuple[str, ...], named: str) -> None:
    command = [*COMMAND, "prefill", "--model", "tiny", "--backend", "local", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode in (1, 2)
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("disagg prefill: ")
    assert named in sentence


def test_debug_shows_the_traceback() -> None:
    command = [*COMMAND, "decode", "--model", "nothing", "--debug"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "Traceback" in ended.stderr


def test_the_help_has_examples() -> None:
    for command in ("prefill", "decode"):
        ended = subprocess.run([*COMMAND, command, "--help"], capture_output=True, text=True, timeout=30, check=True)
        assert "disagg decode" in ended.stdout
        assert "[peers]" in ended.stdout


def test_a_config_file_has_the_options_names(tmp_path: Path) -> None:
    path = tmp_path / "rank.toml"
    path.write_text('model = "tiny"\npages = 3\ndevices = ["eth0"]\n[peers]\ndecode = "tcp://h:1"\n')
    known = ["model", "pages", "devices"]
    assert read_config(path, known) == {"model": "tiny", "pages": 3, "devices": ["eth0"], "peers": ["decode=tcp://h:1"]}
    for text, named in (("modell = 1", "'modell'"), ("model = ", str(path)), ("[model]\nx = 1", "'model'")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=named):
            read_config(path, known)


def test_names_and_values() -> None:
    assert pairs(["a=tcp://h:1", "b=x=y"], what="peer") == {"a": "tcp://h:1", "b": "x=y"}
    for wrong in (["a"], ["=x"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="each name once"):
            pairs(wrong, what="peer")


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'public = "{"p" * 40}"\nsecret = "{"s" * 40}"\n')
    found = read_keys(str(path))
    assert found is not None
    assert found.public == "p" * 40
    assert "sss" not in repr(found)
    path.write_text('public = "p"\n')
    with pytest.raises(ConfigError, match="public and secret"):
        read_keys(str(path))


def test_options_become_a_rank() -> None:
    given = {
        "name": None, "model": "tiny", "side": "tp=2", "rank": 1, "layers": 2, "pages": 9, "listen": "tcp://127.0.0.1:0",
        "advertise": None, "leader": "tcp://127.0.0.1:1", "peers": ("decode=tcp://127.0.0.1:2",), "peer_keys": (), "keys": None,
        "backend": "nixl", "transport": "tcp", "devices": ("eth0",), "require": None, "insecure": False,
        "trusted_network": False, "driver": None, "device": "cpu", "verify": "off",
    }  # fmt: skip
    found = configure("prefill", given)
    assert (found.name, found.side, found.rank, found.num_pages) == ("prefill", Side(tp=2), 1, 9)
    assert found.peers == {"decode": "tcp://127.0.0.1:2"}
    assert found.devices == ("eth0",)
