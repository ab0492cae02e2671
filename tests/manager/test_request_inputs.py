"""Input of requests: wrong rows, arguments and calls are refused; NumPy integers are accepted."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import Any

import numpy as np
import pytest

from disagg import (
    ConfigError,
    KVManager,
    LayoutError,
    LocalProtocolError,
    ModelId,
    Pages,
    PeerUnreachable,
    RequestTimeout,
    Slot,
    Topology,
    new_request_id,
)
from disagg.testing.reference import PageList
from tests.manager.conftest import untouched
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, receive, send


@pytest.mark.parametrize(
    ("ids", "first_token", "message"),
    [
        ((0, 1, 16), 0, "token 16 lies in page 16, outside the pool of 16 pages"),
        ((0, 1), 0, "needed token 16 has no page; 2 pages of 8 tokens are listed, from token 0 on"),
        ((0, -1, 2), 0, "token 8 lies in page -1, outside the pool"),
        ((0, 3, 3), 0, "page 3 is listed twice for needed tokens"),
        ((1, 2), 8, "needed token 0 has no page"),
    ],
)
def test_rows_that_do_not_cover_the_need_are_refused_at_once(
    instances: Cluster, ids: tuple[int, ...], first_token: int, message: str
) -> None:
    """Case 32: nothing is reserved or written."""
    with pytest.raises(LayoutError, match=message):
        receive(instances.decode[0], new_request_id(), PageList(ids, first_token), need=(0, 20))
    assert untouched(instances)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0, 1, 2, 3, 32), "token 16 lies in page 32, outside the pool of 32 pages"),
        ((0, 1, 2, 3), "needed token 16 has no page"),
        ((0, 1, 2, 1, 4), "source: page 1 is listed twice for needed tokens"),
    ],
)
def test_source_rows_that_do_not_cover_the_sent_tokens_fail_the_request_on_both_sides(
    instances: Cluster, ids: tuple[int, ...], message: str
) -> None:
    """The first cause reaches the receiver; nothing was written."""
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    bad, good = (
        send(instances.prefill[0], request, PageList(ids), 20),
        send(instances.prefill[1], request, PageList((4, 5, 6, 7, 8)), 20),
    )
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert not event.ok
    assert message in str(event.error)
    assert message in str(bad.wait(timeout_s=DEADLINE_S).error)
    assert not good.wait(timeout_s=DEADLINE_S).ok
    until(lambda: event.lease.released)


def test_invalid_calls_are_refused_with_a_reason(instances: Cluster) -> None:
    manager, request = instances.decode[0].manager, new_request_id()
    rows = {"kv": Pages(np.arange(3))}
    with pytest.raises(LocalProtocolError, match="no component 'ssm' was declared; there are kv"):
        manager.receiver(request, peer="prefill-0", rows={"ssm": Slot(1)}, need={"kv": (0, 20)})
    with pytest.raises(LocalProtocolError, match="rows of 'kv': expected Pages, found Slot"):
        manager.receiver(request, peer="prefill-0", rows={"kv": Slot(1)}, need={"kv": (0, 20)})
    with pytest.raises(
        LocalProtocolError, match=r"need of 'kv': expected its tokens, need={'kv': \(start, stop\)}, found none"
    ):
        manager.receiver(request, peer="prefill-0", rows=rows)
    with pytest.raises(LocalProtocolError, match="need: no component 'window'"):
        manager.receiver(request, peer="prefill-0", rows=rows, need={"kv": (0, 20), "window": (0, 1)})
    with pytest.raises(LocalProtocolError, match="component 'kv' is needed, but no rows"):
        manager.receiver(request, peer="prefill-0", rows={}, need={"kv": (0, 20)})
    with pytest.raises(LocalProtocolError, match="group of peer 'prefill-0': expected 0 to 0, found 1"):
        manager.receiver(request, peer="prefill-0", rows=rows, need={"kv": (0, 20)}, group=1)
    with pytest.raises(LocalProtocolError, match="request id: expected 16 bytes"):
        manager.receiver(b"short", peer="prefill-0", rows=rows, need={"kv": (0, 20)})
    with pytest.raises(PeerUnreachable, match="peer 'prefill-1' is not ready: it is not configured"):
        manager.receiver(request, peer="prefill-1", rows=rows, need={"kv": (0, 20)})
    sender = instances.prefill[0].manager.sender(request, peer="decode-0")
    component: Any
    for component in ("ssm", ["kv"]):
        with pytest.raises(LocalProtocolError, match=r"needed: no component .* was declared; there are kv"):
            sender.needed(component)
    with pytest.raises(LocalProtocolError, match="payload: expected at most 65536 bytes, found 65537 bytes"):
        sender.finish(payload=bytes(65537))
    for tokens in ((4, 2), (-1, 2), (0, 2**41), (0, 1.5), (0, 1, 2), 7):
        with pytest.raises(LocalProtocolError, match="tokens: expected integers 0 <= start <= stop"):
            sender.send(rows, tokens=tokens)  # type: ignore[arg-type]
    for layers, found in (([-1], "0 to 2"), ([2**31], "0 to 2"), ([0.5], "layer ids"), (range(70000), "at most 16384")):
        with pytest.raises(LocalProtocolError, match=f"layers: expected (ids of )?{found}"):
            sender.send(rows, layers=layers)  # type: ignore[arg-type]
    sender._numbers = itertools.count(1 << 16)
    with pytest.raises(LocalProtocolError, match="expected at most 65536 chunks, found another one"):
        sender.send(rows, tokens=(0, 4))
    sender.finish()
    with pytest.raises(LocalProtocolError, match="nothing can be sent after finish"):
        sender.send(rows, tokens=(0, 4))
    with pytest.raises(LocalProtocolError, match=r"finish\(\) was already called"):
        sender.finish()
    sender.abort("the test is finished")


@pytest.mark.parametrize("attempt", [-1, 2**31, 1.0, "1", True])
def test_invalid_attempts_are_refused(instances: Cluster, attempt: Any) -> None:
    with pytest.raises(LocalProtocolError, match="attempt: expected 0 to 2147483647, found"):
        instances.prefill[0].manager.sender(new_request_id(), peer="decode-0", attempt=attempt)


@pytest.mark.parametrize("need", [(2**70, 2**70), (0, 2**41), (5, 4), (0.0, 4.0), (1, 2, 3), "ab", None])
def test_invalid_needs_are_refused(instances: Cluster, need: Any) -> None:
    rows = {"kv": Pages(np.arange(5))}
    with pytest.raises(LocalProtocolError, match="need of 'kv': expected integers 0 <= start <= stop <="):
        instances.decode[0].manager.receiver(new_request_id(), peer="prefill-0", rows=rows, need={"kv": need})
    far = {"kv": Pages(np.arange(1), 2**41)}
    with pytest.raises(LocalProtocolError, match="rows of 'kv': expected a first token of 0 to"):
        instances.decode[0].manager.receiver(new_request_id(), peer="prefill-0", rows=far, need={"kv": (5, 5)})


def test_numpy_integers_are_accepted(instances: Cluster) -> None:
    request, number = new_request_id(), np.int64
    sink: Any = instances.decode[0].manager
    rows: Any = {"kv": Pages(np.arange(5), number(0))}  # type: ignore[arg-type]
    receiver = sink.receiver(
        request, peer="prefill-0", rows=rows, need={"kv": (number(0), number(20))}, group=number(0), attempt=number(3)
    )
    senders: list[Any] = []
    for rank in instances.prefill:
        source: Any = rank.manager
        sender = source.sender(request, peer="decode-0", attempt=np.int32(3))
        sender.send(rows, tokens=(number(0), np.int32(8)), layers=np.arange(3))
        sender.send(rows, tokens=(number(8), np.int32(20)))
        sender.finish()
        senders.append(sender)
    assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, *senders))
    slot: Any = np.int32(3)
    assert (Slot(slot), type(Slot(slot).id)) == (Slot(3), int)


def test_a_message_that_cannot_be_encoded_fails_only_its_request(instances: Cluster) -> None:
    """The test invalidates the rows after the checks of `receiver`."""
    rows, request = {"kv": Pages(np.arange(5))}, new_request_id()
    object.__setattr__(rows["kv"], "first_token", 2**80)
    receiver = instances.decode[0].manager._runtime.sessions.receives
    opened = receiver.open

    def open_invalid(*args: Any, **kwargs: Any) -> Any:
        receiver.open = opened  # type: ignore[method-assign]
        return opened(*args, **{**kwargs, "rows": rows})

    receiver.open = open_invalid  # type: ignore[method-assign]
    handle = instances.decode[0].manager.receiver(
        request, peer="prefill-0", rows={"kv": Pages(np.arange(5))}, need={"kv": (0, 20)}, deadline_s=0.3
    )
    assert isinstance(handle.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
    until(lambda: handle.lease.released)
    assert instances.decode[0].manager.health().ok
    assert all(event.ok for event in instances.transfer(20))


def test_the_callers_arrays_do_not_change(instances: Cluster) -> None:
    """Case 20: the same array of ids serves every peer."""
    request, ids = new_request_id(), np.arange(12, dtype=np.int32)
    before = ids.copy()
    rows = Pages(ids)
    receiver = instances.decode[0].manager.receiver(request, peer="prefill-0", rows={"kv": rows}, need={"kv": (0, 20)})
    for rank in instances.prefill:
        sender = rank.manager.sender(request, peer="decode-0")
        sender.send({"kv": rows}, tokens=(0, 20))
        sender.finish()
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    assert (ids == before).all()
    assert (rows.ids == before).all()
    with pytest.raises(ValueError, match="read-only"):
        rows.ids[0] = 3


class Event:
    """An event without `query`, or with one that is no method."""

    query = True


SECONDS = [
    None,
    "5",
    dt.timedelta(seconds=5),
    float("nan"),
    float("inf"),
    True,
    -1,
    -0.5,
    pytest.param(10**400, id="10**400"),
    5j,
]


@pytest.mark.parametrize("deadline_s", [*(seconds for seconds in SECONDS if seconds is not None), 0, 0.0])
def test_deadlines_that_are_no_finite_number_above_0_are_refused(instances: Cluster, deadline_s: Any) -> None:
    expected = "deadline_s: expected a finite number of seconds above 0, found"
    with pytest.raises(LocalProtocolError, match=expected):
        receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20), deadline_s=deadline_s)
    with pytest.raises(LocalProtocolError, match=expected):
        instances.prefill[0].manager.sender(new_request_id(), peer="decode-0", deadline_s=deadline_s)


@pytest.mark.parametrize("timeout_s", SECONDS)
def test_timeouts_that_are_no_finite_number_are_refused(instances: Cluster, timeout_s: Any) -> None:
    manager, expected = instances.decode[0].manager, "timeout_s: expected a finite number of seconds of at least 0, found"
    receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20))
    with pytest.raises(LocalProtocolError, match=expected):
        manager.wait_ready("prefill-0", timeout_s=timeout_s)
    with pytest.raises(LocalProtocolError, match=expected):
        manager.drain(timeout_s=timeout_s)
    receiver.abort("the test is finished")
    assert not receiver.wait(timeout_s=np.float32(DEADLINE_S)).ok  # type: ignore[arg-type]
    if timeout_s is not None:
        with pytest.raises(LocalProtocolError, match=expected):
            receiver.wait(timeout_s=timeout_s)
    assert receiver.wait(timeout_s=1e300) is receiver.wait() is receiver.wait(timeout_s=0)
    until(lambda: receiver.wait().lease.released)
    manager.wait_ready("prefill-0", timeout_s=1e300)
    assert all(event.ok for event in instances.transfer(20)), "it is not draining"


@pytest.mark.parametrize("request_id", ["x" * 16, tuple(range(16)), bytearray(16), memoryview(bytes(16)), [0] * 16, None, 16])
def test_request_ids_that_are_not_16_bytes_are_refused(instances: Cluster, request_id: Any) -> None:
    with pytest.raises(LocalProtocolError, match="request id: expected 16 bytes"):
        receive(instances.decode[0], request_id, PageList((0, 1, 2)), need=(0, 20))
    with pytest.raises(LocalProtocolError, match="request id: expected 16 bytes"):
        instances.prefill[0].manager.sender(request_id, peer="decode-0")
    assert all(event.ok for event in instances.transfer(20))


def test_arguments_of_a_wrong_kind_are_refused_in_the_callers_thread(instances: Cluster) -> None:
    decode: Any = instances.decode[0].manager
    rows, need, request = {"kv": Pages(np.arange(3))}, {"kv": (0, 20)}, new_request_id()
    sender: Any = instances.prefill[0].manager.sender(request, peer="decode-0")
    for ready in (True, object(), Event(), lambda: True):
        expected = r"ready: expected None or an event with query\(\), found"
        with pytest.raises(LocalProtocolError, match=expected):
            decode.receiver(request, peer="prefill-0", rows=rows, need=need, ready=ready)
        with pytest.raises(LocalProtocolError, match=expected):
            sender.send(rows, tokens=(0, 4), ready=ready)
        with pytest.raises(LocalProtocolError, match=expected):
            sender.finish(rows, ready=ready)
    for reason in (None, 5, b"gone", RuntimeError("gone")):
        with pytest.raises(LocalProtocolError, match="reason: expected a str, found"):
            sender.abort(reason)
    for peer in (None, 5, ["prefill-0"], b"prefill-0"):
        with pytest.raises(LocalProtocolError, match="peer: expected a str, found"):
            decode.receiver(request, peer=peer, rows=rows, need=need)
    wrong: Any
    for wrong in (0, "", np.arange(3), []):
        with pytest.raises(LocalProtocolError, match="rows: expected a mapping"):
            sender.finish(wrong)
    for wrong in (None, [("kv", rows["kv"])], "kv"):
        with pytest.raises(LocalProtocolError, match="rows: expected a mapping"):
            decode.receiver(request, peer="prefill-0", rows=wrong, need=need)
        with pytest.raises(LocalProtocolError, match="rows: expected a mapping"):
            sender.send(wrong)
    for wrong in ([("kv", (0, 20))], "kv", 0):
        with pytest.raises(LocalProtocolError, match="need: expected a mapping"):
            decode.receiver(request, peer="prefill-0", rows=rows, need=wrong)
    for group in (True, None, "0", 0.0):
        with pytest.raises(LocalProtocolError, match="group of peer 'prefill-0': expected 0 to 0"):
            decode.receiver(request, peer="prefill-0", rows=rows, need=need, group=group)
    for payload in ("text", None, bytearray(4), np.bytes_(b"token")):
        with pytest.raises(LocalProtocolError, match="payload: expected at most 65536 bytes, found"):
            sender.finish(payload=payload)
    receiver: Any = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    with pytest.raises(LocalProtocolError, match="reason: expected a str, found None"):
        receiver.abort(None)
    receiver.abort("the test is finished")
    sender.abort("the test is finished")
    assert not receiver.wait(timeout_s=DEADLINE_S).ok
    until(lambda: receiver.wait().lease.released)
    assert all(event.ok for event in instances.transfer(20))


def test_arguments_that_are_not_looked_up_are_refused(instances: Cluster) -> None:
    manager: Any = instances.decode[0].manager
    with pytest.raises(LocalProtocolError, match="need: no component 'a' was declared"):
        manager.receiver(new_request_id(), peer="prefill-0", rows={"kv": [0]}, need={1: (0, 1), "a": (0, 1)})
    for call in (manager.peer, lambda peer: manager.engine(peer, 0)):
        with pytest.raises(LocalProtocolError, match=r"peer: expected a str, found \['prefill-0'\]"):
            call(["prefill-0"])
    with pytest.raises(LocalProtocolError, match="rank: expected 0 to 2147483647, found"):
        manager.engine("prefill-0", [1])
    with pytest.raises(PeerUnreachable, match="'prefill-0', rank 5: this rank does not connect to it"):
        manager.engine("prefill-0", 5)
    with pytest.raises(LocalProtocolError, match="peer: expected a name, or None for any, found ''"):
        instances.prefill[0].manager.sender(new_request_id(), peer="")
    with pytest.raises(LocalProtocolError, match="on_end: expected a function, found None"):
        instances.prefill[0].manager.sender(new_request_id(), peer="decode-0").on_end(None)  # type: ignore[arg-type]
    for key, found in ((5, "int"), ("\ud800" * 40, "40 other characters"), (b"x" * 40, "bytes")):
        with pytest.raises(ConfigError, match=f"'prefill-1', public key: expected a key .* found {found}"):
            manager.add_peer("prefill-1", address="tcp://127.0.0.1:9", public_key=key)


@pytest.mark.parametrize(
    ("setting", "given", "expected"),
    [
        ("limits", 5, "Limits"),
        ("connection_limits", 5, "ConnectionLimits"),
        ("keys", "x", "KeyPair"),
        ("topology", 5, "Topology"),
        ("insecure", "no", "bool"),
        ("trusted_network", object(), "bool"),
        ("tracing", "x", "bool"),
        ("components", None, "a sequence of Component"),
        ("components", [1], "a sequence of Component"),
        ("devices", 5, "a sequence of names"),
        ("devices", "mlx5_0", "a sequence of names"),
        ("devices", [5], "a sequence of names"),
        ("peer_keys", {"a": 5}, "a key of 40 Z85 characters"),
        ("advertise", "tcp://*:0", r"an address that peers can reach, found 'tcp://\*:0'"),
        ("metrics_port", 70000, "a port up to 65535"),
        ("metrics_host", None, "a str"),
    ],
)
def test_settings_of_a_wrong_kind_are_refused(setting: str, given: Any, expected: str) -> None:
    settings = {
        "name": "x",
        "model": ModelId("m"),
        "components": [],
        "topology": Topology(),
        "backend": "local",
        setting: given,
    }
    with pytest.raises(ConfigError, match=f"{setting}.*: expected {expected}"):
        KVManager(**settings)


@pytest.mark.parametrize("name", [None, 5, "", "x" * 257, ["decode-1"], "\ud800"])
def test_peers_with_impossible_names_are_refused(instances: Cluster, name: Any) -> None:
    manager = instances.decode[0].manager
    with pytest.raises(ConfigError, match="peer: expected a str of 1 to 256 characters, found"):
        manager.add_peer(name, address="tcp://127.0.0.1:5555")
    with pytest.raises(ConfigError, match="name: expected a str of 1 to 256 characters, found"):
        KVManager(name=name, topology=Topology(), components=[], model=ModelId("toy"), backend="local")
    assert all(event.ok for event in instances.transfer(20))


@pytest.mark.parametrize(
    "address", [f"tcp://{host}:5555" for host in ("a b", "*", "%", "bücher.example", "0.0.0.0", "a_b,c", "[fe80::1%ö]")]
)
def test_peers_at_impossible_hosts_are_refused(instances: Cluster, address: str) -> None:
    with pytest.raises(ConfigError, match="peer 'prefill-1': expected"):
        instances.decode[0].manager.add_peer("prefill-1", address=address)
    assert all(event.ok for event in instances.transfer(20))


def test_plain_sequences_of_ids_are_pages(instances: Cluster) -> None:
    prefill, decode, given = instances.prefill, instances.decode[0].manager, {"kv": (0, 12)}
    ids: Any
    for ids in ([1, 0], (1, 0), range(2), np.array([1, 0])):
        request = new_request_id()
        receiver = decode.receiver(request, peer="prefill-0", rows={"kv": ids}, need=given)
        for rank in prefill:
            rank.manager.sender(request).finish({"kv": [3, 4, 5]})
        assert receiver.wait(timeout_s=DEADLINE_S).ok
    wrong: Any
    for wrong in ("01", 3, {0, 1}, None):
        with pytest.raises(LocalProtocolError, match="rows of 'kv': expected Pages, found"):
            decode.receiver(new_request_id(), peer="prefill-0", rows={"kv": wrong}, need=given)
    for ids in ([0.5], [[1]], ["a"], [[1, 2], [3]]):
        with pytest.raises(LayoutError, match="pages: expected one list of integer ids"):
            decode.receiver(new_request_id(), peer="prefill-0", rows={"kv": ids}, need=given)
