"""`disagg prefill` and `disagg decode`, started as by an operator."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.commands.cases.sides import Side
from disagg.commands.rank.command import configure, prefill
from disagg.commands.rank.rank import RankConfig, ResidentRank
from disagg.commands.rank.serve import Stop, drain
from disagg.core.errors import LocalProtocolError
from disagg.manager import new_request_id
from disagg.settings import settings
from harness.ports import held_port

COMMAND = [sys.executable, "-X", "faulthandler", "-m", "disagg.commands"]


class Rank(subprocess.Popen[str]):
    """A rank as a process, which dumps its threads if it does not end."""

    def __init__(self, *arguments: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `kill`)
        super().__init__([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=self.log, text=True)

    def ended(self) -> int:
        """Its exit status."""
        try:
            return self.wait(60)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGABRT)
            self.wait(60)
            self.log.seek(0)
            pytest.fail(f"the rank did not end:\n{self.log.read()}")

    def kill(self) -> None:
        super().kill()
        self.log.close()


@contextlib.contextmanager
def rank(*arguments: str) -> Iterator[Rank]:
    """A running rank."""
    with Rank(*arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def address(text: str) -> str:
    return text.partition("address=")[2].split()[0]


def last_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read().splitlines()[-1]


@pytest.mark.parametrize("drain_s", [0.3, 60.0])
def test_a_rank_that_is_stopped_waits_for_its_requests(drain_s: float, model: str) -> None:
    config = RankConfig(role="decode", name="decode", model=model, side=Side(), backend="local", num_pages=4, drain_s=drain_s)
    lines, stop = list[str](), Stop()
    with ResidentRank(config) as resident:
        resident.manager.add_peer("prefill", address="tcp://127.0.0.1:9")
        component = next(iter(resident.pools.components)).name
        request = resident.manager.receiver(new_request_id(), peer="prefill", rows={component: [0]}, need={component: (0, 1)})
        stop.end("SIGTERM was received", drain=True)
        abort = threading.Timer(0.5 if drain_s > 1 else 60, request.abort, ("the client has left",))
        abort.start()

        def report(line: str) -> None:
            lines.append(line)
            raise BrokenPipeError  # nobody reads the output any more: it waits all the same

        drain(resident, stop, report)
        abort.cancel()
        assert lines[0] == f"decode rank 0 of 1: ends: SIGTERM was received; waits for 1 request, up to {drain_s:g} s"
        assert lines[1] == "decode rank 0 of 1: ends: " + ("all requests have ended" if drain_s > 1 else "1 request aborted")
        with pytest.raises(LocalProtocolError, match="draining"):
            resident.manager.sender(new_request_id())


def test_the_last_error_of_a_json_log_is_json(model: str) -> None:
    command = [*COMMAND, "decode", "--model", model, "--backend", "local", "--log-format", "json"]
    for wrong in (("--listen", "tcp://192.0.2.1:0", "--insecure"), ("--side", "tp=x")):
        ended = subprocess.run([*command, *wrong], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode in (1, 2)
        found = json.loads(ended.stderr.splitlines()[-1])
        assert found["level"] == "error"
        assert " decode: " in found["message"]


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
                assert refused.ended() == 0
            decode.send_signal(signal.SIGINT)
            assert decode.ended() == 0
            assert last_line(decode) == "decode rank 0 of 1: ends: SIGINT was received"
            prefill.send_signal(signal.SIGTERM)
            assert prefill.ended() == 0


def test_a_ready_and_a_lost_peer_are_printed(mooncake: str, model: str) -> None:
    same = ("--model", model, "--backend", mooncake, "--pages", "8")
    with held_port() as port, rank("prefill", *same, "--peer", f"decode=tcp://127.0.0.1:{port}") as prefill:
        free = f"tcp://127.0.0.1:{port}"
        where = address(line(prefill))
        with rank("decode", *same, "--listen", free, "--peer", f"prefill={where}") as decode:
            assert address(line(decode)) == free
            assert line(decode) == "decode rank 0 of 1: peer prefill is ready\n"
            assert line(prefill) == "prefill rank 0 of 1: peer decode is ready\n"
            decode.send_signal(signal.SIGTERM)
            assert decode.ended() == 0
        assert line(prefill).startswith("prefill rank 0 of 1: peer decode is gone: ")


def test_a_log_of_json_has_the_printed_lines_too(mooncake: str, model: str) -> None:
    same = ("--model", model, "--backend", mooncake, "--pages", "8", "--log-format", "json")
    with held_port() as port, rank("prefill", *same, "--peer", f"decode=tcp://127.0.0.1:{port}") as prefill:
        first = json.loads(line(prefill))
        assert first.pop("time").endswith("+00:00")
        where = address(first.pop("message"))
        assert first == {"level": "info", "logger": "disagg.commands.rank.serve"}
        listen = ("--listen", f"tcp://127.0.0.1:{port}", "--peer", f"prefill={where}")
        with rank("decode", *same, *listen) as decode:
            assert address(json.loads(line(decode))["message"]) == listen[1]
            assert json.loads(line(prefill))["message"] == "prefill rank 0 of 1: peer decode is ready"
            decode.send_signal(signal.SIGTERM)
            assert decode.ended() == 0
        assert json.loads(line(prefill))["message"].startswith("prefill rank 0 of 1: peer decode is gone: ")


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
def test_errors_are_one_sentence(arguments: tuple[str, ...], named: str) -> None:
    command = [*COMMAND, "prefill", "--model", "tiny", "--backend", "local", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode in (1, 2)
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("disagg prefill: ")
    assert named in sentence


def test_options_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank.toml"
    path.write_text(
        'model = "tiny"\nside = "tp=2"\nrank = 1\npages = 3\nslots = 4\nlayers = 2\nname = "p0"\n'
        'leader = "tcp://127.0.0.1:1"\ndevices = ["eth0"]\n[peers]\ndecode = "tcp://h:1"\n[rows]\nkv = 7\n'
    )
    given = {"pages": "9", "peers": ("decode=tcp://h:2",), "devices": (), "pack_below": None, "insecure": True}
    found = configure("prefill", given, file=path, environ={"DISAGG_PAGES": "5", "DISAGG_SLOTS": "6", "HOME": "/"})
    assert (found.num_pages, found.num_slots, found.num_layers, found.rows) == (9, 6, 2, {"kv": 7})
    assert (found.name, found.side, found.rank) == ("p0", Side(tp=2), 1)
    assert (found.peers, found.devices, found.insecure) == ({"decode": "tcp://h:2"}, ("eth0",), True)
    assert configure("prefill", {"model": "tiny"}, file=None, environ={}).name == "prefill"


def test_every_setting_is_an_option() -> None:
    flags = {flag for parameter in prefill.params for flag in parameter.opts}
    assert flags >= {setting.flag for setting in settings(RankConfig) if setting.key != "role"}
