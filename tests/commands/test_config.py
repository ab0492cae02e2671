"""Settings from keywords, files and the environment, and the errors for invalid ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg import ConfigError, KVManager, ModelId, Pages, Topology, new_request_id
from disagg.config import Config, read_keys
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.types import Limits
from disagg.runtime.keys import KeyPair
from disagg.settings import settings
from disagg.state import paged

FILE = """
name = "decode-0"
listen = "tcp://10.0.0.2:7001"
trusted_network = true
transport = "tcp"
devices = ["eth0", "eth1"]
pack_below = 4096
[peers]
prefill-0 = "tcp://10.0.0.1:7000"
[limits]
retry_s = 0.25
"""
ENVIRON = {
    "DISAGG_NAME": "decode-0",
    "DISAGG_LISTEN": "tcp://10.0.0.2:7001",
    "DISAGG_TRUSTED_NETWORK": "true",
    "DISAGG_TRANSPORT": "tcp",
    "DISAGG_DEVICES": "eth0, eth1",
    "DISAGG_PACK_BELOW": "4096",
    "DISAGG_PEERS": "prefill-0=tcp://10.0.0.1:7000",
    "DISAGG_LIMITS": "retry_s=0.25",
    "DISAGG_LEADER": "",  # empty: none
    "DISAGG_NVLINK_BLOCKS": "8",  # an engine's own
    "HOME": "/",
}
SAME = Config(
    name="decode-0",
    listen="tcp://10.0.0.2:7001",
    trusted_network=True,
    transport="tcp",
    devices=("eth0", "eth1"),
    pack_below=4096,
    peers={"prefill-0": "tcp://10.0.0.1:7000"},
    limits=Limits(retry_s=0.25),
)


def test_keywords_files_and_environment_are_equivalent(tmp_path: Path) -> None:
    (tmp_path / "rank.toml").write_text(FILE)
    assert Config.load(file=tmp_path / "rank.toml") == Config.load(environ=ENVIRON) == SAME


SERVICE = {
    "DISAGG_DECODE_SERVICE_HOST": "10.0.0.11",
    "DISAGG_DECODE_SERVICE_PORT": "5555",
    "DISAGG_DECODE_SERVICE_PORT_HTTP": "5555",
    "DISAGG_DECODE_PORT": "tcp://10.0.0.11:5555",
    "DISAGG_DECODE_PORT_5555_TCP": "tcp://10.0.0.11:5555",
    "DISAGG_DECODE_PORT_5555_TCP_PROTO": "tcp",
    "DISAGG_DECODE_PORT_5555_TCP_PORT": "5555",
    "DISAGG_DECODE_PORT_5555_TCP_ADDR": "10.0.0.11",
    "DISAGG_DECODE_PORT_53_UDP": "udp://[fd00::1]:53",
    "DISAGG_SERVICE_HOST": "10.0.0.11",  # of a Service `disagg`
    "DISAGG_PORT": "tcp://10.0.0.11:5555",
    "DISAGG_METRICS_PORT": "tcp://10.0.0.11:9090",  # of a Service `disagg-metrics`
}


def test_variables_of_a_kubernetes_service_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Config.load(environ={**ENVIRON, **SERVICE}) == SAME
    (record,) = caplog.records
    assert record.getMessage().endswith(": " + ", ".join(sorted(SERVICE)))
    caplog.clear()
    assert Config.load(environ={**ENVIRON, "DISAGG_METRICS_PORT": "9090"}).metrics_port == 9090
    assert not caplog.records


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("DISAGG_TRANSPROT", "did you mean 'transport'?"),
        ("DISAGG_METRIC_PORT", "did you mean 'metrics_port'"),
        ("DISAGG_DECODE_PORT", "found 'decode_port'"),
        ("DISAGG_PORT_X_TCP", "found 'port_x_tcp'"),
        ("DISAGG_SERVICE", "found 'service'"),
        ("DISAGG_COLOUR", "found 'colour' (environment variable DISAGG_COLOUR)"),
    ],
)
def test_other_unknown_variables_are_refused_with_similar_names(variable: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        Config.load(environ={**ENVIRON, **SERVICE, variable: "5555"})


def test_keywords_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "rank.toml").write_text(FILE)
    environ = {"DISAGG_PACK_BELOW": "1", "DISAGG_TRANSPORT": "shm"}
    found = Config.load(file=tmp_path / "rank.toml", environ=environ, pack_below=2)
    assert (found.pack_below, found.transport, found.name) == (2, "shm", "decode-0")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"file": 'transport = "pigeon"'}, ["'transport'", "one of auto, rdma, tcp, shm", "'pigeon'", "rank.toml"]),
        ({"file": 'pack_below = "4096"'}, ["'pack_below'", "expected int", "'4096'", "rank.toml"]),
        ({"file": "colour = 1"}, ["expected keys of name, listen", "'colour'", "rank.toml"]),
        ({"file": "limits = {retri_s = 1}"}, ["'limits'", "names of max_parked_reserves", "'retri_s'"]),
        ({"file": "limits = {retry_s = 0}"}, ["'limits'", "retry_s: expected more than 0"]),
        ({"file": "limits = 3"}, ["'limits'", "expected a table", "3", "rank.toml"]),
        ({"file": "name = "}, ["rank.toml"]),
        ({"file": 'devices = "eth0"'}, ["'devices'", "array", "'eth0'"]),
        ({"environ": {"DISAGG_INSECURE": "perhaps"}}, ["'insecure'", "true or false", "'perhaps'", "DISAGG_INSECURE"]),
        ({"environ": {"DISAGG_PACK_BELOW": "-1"}}, ["'pack_below'", "int >= 0", "'-1'"]),
        ({"environ": {"DISAGG_TRANSPROT": "tcp"}}, ["'transprot'", "DISAGG_TRANSPROT"]),
        ({"environ": {"DISAGG_PEERS": "a"}}, ["'peers'", "NAME=VALUE", "'a'"]),
        ({"environ": {"DISAGG_PEERS": "a=x,a=y"}}, ["'peers'", "each name once"]),
        ({"colour": 1}, ["'colour'", "(keyword)"]),
        ({"verify": "most"}, ["'verify'", "one of off, full", "'most'", "(keyword)"]),
        ({"peers": {"a": 1}}, ["'peers'", "str as every value"]),
        ({"peer_keys": {"b": "x"}}, ["'peer_keys'", "names of peers", "'b'"]),
        (
            {"peers": {"decode": "tcp://127.0.0.1:1"}, "peer_keys": {"decod": "x"}},
            ["'peer_keys'", "found 'decod'; did you mean 'decode'?"],
        ),
        ({"name": 7}, ["'name'", "expected str", "7"]),
    ],
)
def test_an_invalid_setting_is_named_with_its_place(tmp_path: Path, given: dict[str, Any], parts: list[str]) -> None:
    if "file" in given:
        (tmp_path / "rank.toml").write_text(given["file"])
        given = {**given, "file": tmp_path / "rank.toml"}
    named: Mapping[str, Any] = {} if "name" in given else {"name": "a"}
    with pytest.raises(ConfigError) as caught:
        Config.load(**named, **given)
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_setting_is_named_with_the_places_searched(tmp_path: Path) -> None:
    (tmp_path / "rank.toml").write_text("insecure = true")
    with pytest.raises(ConfigError, match=r"'name': expected str, found none: .*DISAGG_NAME, nor in .*rank.toml"):
        Config.load(file=tmp_path / "rank.toml")
    with pytest.raises(ConfigError, match="one of auto, rdma, tcp, shm"):
        Config(name="a", transport="pigeon")  # type: ignore[arg-type]


def test_every_setting_has_a_description() -> None:
    for setting in settings(Config):
        assert setting.description.endswith("."), setting.key
    assert [setting.key for setting in settings(Config) if setting.required] == ["name"]


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    pair = KeyPair.generate()
    path.write_text(f'public = "{pair.public}"\nsecret = "{pair.secret}"\n')
    assert read_keys(path) == pair
    assert pair.secret not in repr(Config(name="a", keys=str(path)))
    assert Config(name="a", keys=str(path)).manager_arguments()["keys"] == pair
    path.write_text('public = "p"\n')
    with pytest.raises(ConfigError, match="public and secret"):
        read_keys(path)


def test_a_manager_of_settings_moves_a_request() -> None:
    def pool() -> dict[int, tuple[Any, Any]]:
        return {0: (np.zeros((4, 2, 1, 8), np.float32), np.zeros((4, 2, 1, 8), np.float32))}

    def start(config: Config, tensors: dict[int, tuple[Any, Any]]) -> Any:
        component = paged.gqa(tensors, axes="page token kv_head dim", num_kv_heads=1, topology=Topology())
        return config.manager(topology=Topology(), components=[component], model=ModelId("m"))

    quick = ConnectionLimits(hello_retry_s=0.05)
    sent, received = pool(), pool()
    sent[0][0][:], sent[0][1][:] = 1, 2
    with start(Config(name="prefill", backend="local", connection_limits=quick), sent) as prefill:
        config = Config(name="decode", backend="local", connection_limits=quick, peers={"prefill": prefill.address})
        with start(config, received) as decode:
            prefill.add_peer("decode", address=decode.address)
            prefill.wait_ready("decode")
            decode.wait_ready("prefill")
            request_id = new_request_id()
            receiver = decode.receiver(request_id, peer="prefill", rows={"kv": Pages(np.array([3]))}, need={"kv": (0, 2)})
            sender = prefill.sender(request_id, peer="decode")
            sender.send({"kv": Pages(np.array([0]))}, tokens=(0, 2))
            sender.finish()
            assert receiver.wait(timeout_s=60).ok
    assert (received[0][0][3] == 1).all()
    assert (received[0][1][3] == 2).all()
    with pytest.raises(ConfigError, match="own name"):
        start(Config(name="decode", backend="local", peers={"decode": "tcp://127.0.0.1:1"}), pool())


def test_settings_cover_every_argument_of_the_manager() -> None:
    given = Config(name="a").manager_arguments().keys() | {"topology", "components", "model"}
    assert given == inspect.signature(KVManager).parameters.keys()


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / name))):
        Config.load(file=tmp_path / name)
