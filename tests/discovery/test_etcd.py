"""Announcements in a real etcd server."""

from __future__ import annotations

import base64
import json
import logging
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from disagg import Config, ConfigError, DiscoveryError, KVManager
from disagg.discovery import Announcement, Found, announced_at, peer_source
from harness.services import Etcd
from tests.discovery.test_follower import DEADLINE_S, until

Start = Callable[..., KVManager]


def call(etcd: Etcd, method: str, **fields: Any) -> Any:
    """A call of etcd's API that shares no code with the library."""
    request = urllib.request.Request(f"http://{etcd.address}/v3/{method}", data=json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def put(etcd: Etcd, key: str, value: bytes) -> None:
    call(etcd, "kv/put", key=base64.b64encode(key.encode()).decode(), value=base64.b64encode(value).decode())


def lease_of(etcd: Etcd, key: str) -> str | None:
    """The lease of an entry, or `None` if there is no such entry."""
    found = call(etcd, "kv/range", key=base64.b64encode(key.encode()).decode())
    return str(found["kvs"][0]["lease"]) if "kvs" in found else None


def announcement(etcd: Etcd, prefix: str, name: str, *, ttl_s: int = 10) -> Announcement:
    client, path = announced_at(f"etcd://{etcd.address}{prefix}")
    return Announcement(client, path, name=name, instance=Found("tcp://10.0.0.1:7100", "key"), ttl_s=ttl_s)


def test_an_announcement_lasts_as_long_as_its_context(etcd: Etcd) -> None:
    source = peer_source(f"etcd://{etcd.address}/short/decode")
    assert source.find() == {}
    with announcement(etcd, "/short/decode", "decode-0"), announcement(etcd, "/short/decode/", "decode-1"):
        until(lambda: len(source.find()) == 2)
        assert source.find()["decode-0"] == Found("tcp://10.0.0.1:7100", "key")
        assert peer_source(f"etcd://{etcd.address}/short/dec").find() == {}
        assert call(etcd, "lease/leases")["leases"]
    assert source.find() == {}


def test_an_announcement_whose_owner_dies_expires_and_a_lost_one_comes_back(etcd: Etcd) -> None:
    source = peer_source(f"etcd://{etcd.address}/dead")
    with announcement(etcd, "/dead", "decode-0", ttl_s=3) as living:
        until(lambda: bool(source.find()))
        first = lease_of(etcd, "/dead/decode-0")
        call(etcd, "lease/revoke", ID=first)  # which removes the entry
        until(lambda: lease_of(etcd, "/dead/decode-0") not in (first, None))
        assert source.find().keys() == {"decode-0"}
        living._stop.set()
        living._thread.join()
        assert source.find() == {}
    value = base64.b64encode(b'{"address": "tcp://10.0.0.1:7100"}').decode()
    for ttl_s in (600, 1):  # the second is of a process that is gone
        lease = call(etcd, "lease/grant", TTL=ttl_s)["ID"]
        call(etcd, "kv/put", key=base64.b64encode(b"/dead/decode-1").decode(), value=value, lease=lease)
        if ttl_s > 1:
            assert source.find() == {"decode-1": Found("tcp://10.0.0.1:7100")}
    until(lambda: source.find() == {})


def test_what_is_no_announcement_is_skipped_and_named(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    put(etcd, "/odd/good", b'{"address": "tcp://10.0.0.1:7100", "added_later": 1}')
    put(etcd, "/odd/empty", b"")
    put(etcd, "/odd/number", b'{"address": 7}')
    put(etcd, "/odd/text", b"\xff\xfe")
    with caplog.at_level(logging.WARNING):
        assert peer_source(f"etcd://{etcd.address}/odd").find() == {"good": Found("tcp://10.0.0.1:7100")}
    assert all(f"/odd/{name} in etcd" in caplog.text for name in ("empty", "number", "text"))


def test_the_next_endpoint_is_asked_and_all_are_named_if_none_answers(etcd: Etcd) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
        with announcement(etcd, "/two", "decode-0"):
            source = peer_source(f"etcd://{dead},{etcd.address}/two")
            until(lambda: bool(source.find()))
        with pytest.raises(DiscoveryError, match=f"kv/range failed at http://{dead}: .*refused"):
            peer_source(f"etcd://{dead}/two").find()


def test_a_restarted_server_gets_announcements_again(caplog: pytest.LogCaptureFixture) -> None:
    from harness.services import etcd_server

    with etcd_server() as etcd, caplog.at_level(logging.WARNING):
        source = peer_source(f"etcd://{etcd.address}/again")
        with announcement(etcd, "/again", "decode-0", ttl_s=3):
            until(lambda: bool(source.find()))
            etcd.stop()
            until(lambda: "cannot announce /again/decode-0" in caplog.text)
            with pytest.raises(DiscoveryError):
                source.find()
            etcd.start()
            time.sleep(3.5)  # longer than a lease
            until(lambda: bool(source.find()))


def test_two_instances_find_each_other_by_their_settings(etcd: Etcd, start: Start, tmp_path: Any) -> None:
    from disagg.commands.keygen import write_pair
    from disagg.config import read_keys
    from disagg.runtime.keys import KeyPair

    managers, contexts = {}, []
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        write_pair(KeyPair.generate(), tmp_path, name=role, force=False)
        config = Config(
            name=f"{role}-0",
            keys=str(tmp_path / f"{role}.toml"),
            announce=f"etcd://{etcd.address}/pair/{role}",
            discover=f"etcd://{etcd.address}/pair/{other}",
        )
        managers[role] = start(config.name, keys=read_keys(config.keys or ""))
        contexts.append(config.discovery(managers[role]))
    with contexts[0], contexts[1]:
        until(lambda: managers["prefill"].peer("decode-0").state == "ready")
        managers["decode"].wait_ready("prefill-0", timeout_s=DEADLINE_S)
    assert peer_source(f"etcd://{etcd.address}/pair").find() == {}


@pytest.mark.parametrize(
    "text",
    [
        "decode.default.svc", "etcd://127.0.0.1:2379", "etcd://127.0.0.1/a", "etcd://a:1,/x", "etcd://u:p@h:1/a", "etcd://h:1/a?b=1",
        "dns://decode", "dns://decode:7100/x", "dns://:7100", "srv://", "srv://a:53", "consul://a:1/b", "etcd://h:0/a", "",
        "etcd://[::1/x", "etcd://a:1/\ud800", "srv://\ud800", "dns://\ud800:1",
    ],
)  # fmt: skip
def test_a_source_of_another_form_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(name="a", discover=text)
    assert repr(text)[1:-1] in str(raised.value)
    with pytest.raises(ConfigError):
        Config(name="a", announce=text)


@pytest.mark.parametrize("text", ["dns://decode.ns:7100", "dns://[fd00::7]:7100", "srv://_a._tcp.b.c", "etcd://a:1,b:2/c/d"])
def test_sources_are_accepted(text: str) -> None:
    assert Config(name="a", discover=text).discover == text
