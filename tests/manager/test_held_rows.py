"""A row belongs to one receive at a time, and a token is sent once."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

from disagg import LocalProtocolError, Pages, new_request_id
from disagg.core.leases import quarantine
from disagg.ending import Ending
from disagg.layout.placement import Placement
from disagg.protocol.types import RequestKey
from disagg.requests import Receiver, Sender
from disagg.runtime.held_rows import HeldRows
from disagg.testing.reference import PageList
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster, receive, send

PAGES_OF_SENDER = PageList((0, 1, 2, 3, 4))


def held(instances: Cluster, pages: tuple[int, ...], **more: Any) -> Receiver:
    return receive(instances.decode[0], new_request_id(), PageList(pages), need=(0, 8 * len(pages)), **more)


def test_rows_of_a_receive_are_refused_to_another_until_its_lease_is_released() -> None:
    with cluster(Side(), Side(page=8)) as instances:
        first = held(instances, (3, 4, 5))
        expected = (
            f"rows of 'kv': expected rows that no other receive needs, found row 5, which request {first.key} from 'prefill-0'"
        )
        for pages in ((5,), (9, 5, 8), (5, 9)):
            with pytest.raises(LocalProtocolError, match=re.escape(expected)):
                held(instances, pages)
        held(instances, (6, 7)).abort("the test is finished")
        until(lambda: first.session is not None)
        lease = first.session.lease  # type: ignore[union-attr]
        quarantine(lease, "the test has no proof")
        first.abort("client gone")
        try:
            early = held(instances, (4,))
        except LocalProtocolError as refusal:
            assert "found row 4" in str(refusal)  # noqa: PT017 - the writer may have acknowledged by now
        else:
            assert lease.released
            early.abort("the test is finished")
            until(lambda: early.lease.released)
        until(lambda: lease.released)
        again = held(instances, (3, 4, 5))
        again.abort("the test is finished")
        assert not again.wait(timeout_s=DEADLINE_S).ok


def test_a_refused_receive_changes_nothing() -> None:
    with cluster(Side(), Side(page=8)) as instances:
        first, request = held(instances, (0, 1, 2)), new_request_id()
        with pytest.raises(LocalProtocolError, match="found row 2"):
            receive(instances.decode[0], request, PageList((3, 4, 2)), need=(0, 20))
        assert instances.decode[0].manager.health().num_receiving <= 1
        receiver = receive(instances.decode[0], request, PageList((3, 4, 5)), need=(0, 20))
        sender = send(instances.prefill[0], request, PAGES_OF_SENDER, 20)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert sender.wait(timeout_s=DEADLINE_S).ok
        first.abort("the test is finished")
        assert not first.wait(timeout_s=DEADLINE_S).ok


def test_rows_that_are_not_needed_belong_to_nobody() -> None:
    """Pages before and after the needed tokens, and ids of no page."""
    with cluster(Side(), Side(page=8)) as instances:
        handles = [
            receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(8, 16)),
            receive(instances.decode[0], new_request_id(), PageList((0, 3, -1)), need=(8, 16)),
            receive(instances.decode[0], new_request_id(), PageList((-1, 2, 1)), need=(8, 16)),
            receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 8)),
            receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(4, 4)),
        ]
        with pytest.raises(LocalProtocolError, match="found row 1"):
            receive(instances.decode[0], new_request_id(), PageList((5, 1)), need=(0, 9))
        for handle in handles:
            handle.abort("the test is finished")
            handle.wait(timeout_s=DEADLINE_S)


def test_rows_are_free_as_soon_as_the_event_is_there() -> None:
    """The next request takes the same rows at once, in the server's thread."""
    with cluster(Side(), Side(page=8)) as instances:
        for _ in range(200):
            request = new_request_id()
            receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
            sender = send(instances.prefill[0], request, PAGES_OF_SENDER, 20)
            while (event := receiver.poll()) is None:
                pass
            assert event.ok
            assert sender.wait(timeout_s=DEADLINE_S).ok
        held_rows = instances.decode[0].manager._runtime.requests._held_rows
        until(lambda: not held_rows._receivers)  # nothing is kept of ended requests


def test_slots_are_held_by_component() -> None:
    class Control:
        pass

    rows = HeldRows({name: Placement(name, 1, 4, ()) for name in ("ssm", "conv")})

    def take(**ids: int) -> int:
        key = RequestKey(new_request_id(), 0)
        given = {name: np.array([each]) for name, each in ids.items()}
        return rows.take(Receiver(Control(), Ending(0.0), key=key, peer="prefill", tag=None, need={}, ids=given))  # type: ignore[arg-type]

    first = take(ssm=1, conv=2)
    second = take(ssm=2, conv=1)
    with pytest.raises(LocalProtocolError, match="rows of 'conv': expected rows that no other receive needs, found row 1"):
        take(ssm=3, conv=1)
    take(ssm=3, conv=3)
    rows.forget(first)
    take(ssm=1, conv=2)
    rows.forget(second)
    rows.forget(second)
    take(conv=1)


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([{"tokens": (0, 8)}, {"tokens": (7, 20)}], "token 7 of component 'kv' a second time"),
        ([{"tokens": (4, 8)}, {"tokens": (0, 4)}, {"tokens": (8, 12)}, {"tokens": (3, 4)}], "token 3 of"),
        ([{"tokens": (0, 4)}, {"tokens": (8, 12)}, {"tokens": (4, 8)}, {"tokens": (11, 20)}], "token 11 of"),
        ([{"tokens": (0, 8)}, {}], "token 0 of"),
        ([{}, {"tokens": (12, 20)}], "token 12 of"),
        (
            [{"tokens": (0, 8), "layers": [0, 1]}, {"tokens": (0, 8), "layers": [2, 1]}],
            r"'kv' of layers \[1, 2\] a second time",
        ),
        ([{"tokens": (0, 8), "layers": [0]}, {"tokens": (4, 12)}], "token 4 of"),
        ([{"tokens": (0, 8)}, {"tokens": (4, 12), "layers": [1]}], "token 4 of"),
    ],
)
def test_tokens_of_a_layer_are_sent_once(calls: list[dict[str, Any]], found: str) -> None:
    with cluster(Side(), Side(page=8)) as instances:
        rows = {"kv": Pages(np.arange(5))}
        sender = instances.prefill[0].manager.sender(new_request_id(), peer="decode-0")
        for call in calls[:-1]:
            sender.send(rows, **call)
        for _ in range(2):
            with pytest.raises(LocalProtocolError, match=f"expected tokens that were not sent before, found .*{found}"):
                sender.send(rows, **calls[-1])
        sender.abort("the test is finished")


def test_a_refused_chunk_changes_nothing_and_the_rest_may_be_sent() -> None:
    with cluster(Side(), Side(page=8)) as instances:
        request, rows = new_request_id(), {"kv": Pages(np.arange(5))}
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
        sender = instances.prefill[0].manager.sender(request, peer="decode-0")
        sender.send(rows, tokens=(8, 20), layers=[1])
        sender.send(rows, tokens=(0, 8))
        sender.send(rows, tokens=(4, 4))
        sender.send(rows, tokens=(0, 20), layers=[])
        with pytest.raises(LocalProtocolError, match="of component 'kv' a second time"):
            sender.finish(rows)
        sender.send(rows, tokens=(8, 20), layers=[0, 2])
        sender.finish()
        assert sender.wait(timeout_s=DEADLINE_S).ok
        assert receiver.wait(timeout_s=DEADLINE_S).ok


def sending(instances: Cluster, pages: tuple[int, ...], **more: Any) -> Sender:
    """A request of prefill whose rows stay leased until the test ends it."""
    sender = instances.prefill[0].manager.sender(new_request_id(), peer="decode-0")
    sender.send({"kv": Pages(pages)}, **more)
    return sender


def back(instances: Cluster, pages: tuple[int, ...], **more: Any) -> Receiver:
    """A receive at prefill, in pages of 4 tokens."""
    return instances.prefill[0].manager.receiver(
        new_request_id(), peer="decode-0", rows={"kv": Pages(pages)}, need={"kv": (0, 4 * len(pages))}, **more
    )


def test_rows_of_a_send_are_refused_to_a_receive_until_its_lease_is_released() -> None:
    """A send reads them, or will: what a receive writes there would travel."""
    with cluster(Side(), Side(page=8)) as instances:
        sends = [sending(instances, (3, 4, 5), tokens=(0, 12)) for _ in range(2)]  # as of a common prefix
        for held in sends:
            expected = (
                f"rows of 'kv': expected rows that no send reads, found row 5, which request {held.key} to 'decode-0' holds"
            )
            with pytest.raises(LocalProtocolError, match=re.escape(expected)):
                back(instances, (6, 5))
            held.abort("the test is finished")
            until(lambda held=held: held.lease.released)
        back(instances, (6, 5)).abort("the test is finished")


def test_a_send_holds_only_the_rows_of_its_tokens() -> None:
    """Of a whole list of pages, from the page with `first_token` on, and without ids of no page."""
    with cluster(Side(), Side(page=8)) as instances:
        sender = instances.prefill[0].manager.sender(new_request_id(), peer="decode-0")
        sender.send({"kv": Pages((1, 2, -1, 3), first_token=6)}, tokens=(9, 14))  # the pages of tokens 4, 8, 12 and 16
        free = back(instances, (1, 3, 0))
        free.abort("the test is finished")
        until(lambda: free.lease.released)
        with pytest.raises(LocalProtocolError, match="found row 2"):
            back(instances, (2,))
        sender.send({"kv": Pages((1, 2, -1, 3), first_token=6)}, tokens=(14, 20))
        with pytest.raises(LocalProtocolError, match="found row 3"):
            back(instances, (3,))
        sender.abort("the test is finished")
        until(lambda: sender.lease.released)
        back(instances, (2, 3)).abort("the test is finished")


def test_a_failed_send_whose_rows_are_quarantined_refuses_no_receive() -> None:
    """Nobody uses what it reads any more."""
    with cluster(Side(), Side(page=8)) as instances:
        sender = sending(instances, (3,))
        quarantine(sender.lease, "the test has no proof")
        back(instances, (3,)).abort("the test is finished")
        sender.abort("the test is finished")


def test_an_aborted_send_refuses_no_receive_although_its_manager_has_not_ended_it() -> None:
    """A server gives the rows of a request that it aborts to the next one at once."""
    with cluster(Side(), Side(page=8)) as instances:
        sender = sending(instances, (3,))
        go_on = threading.Event()

        def hold(_: float) -> None:
            go_on.wait(DEADLINE_S)

        instances.prefill[0].manager._runtime.command(hold)
        sender.abort("its client has left")
        next_one = back(instances, (3,))
        go_on.set()
        next_one.abort("the test is finished")


def test_rows_of_a_receive_are_refused_to_a_send() -> None:
    with cluster(Side(), Side(page=8)) as instances:
        receiver = back(instances, (3, 4))
        sender = instances.prefill[0].manager.sender(new_request_id(), peer="decode-0")
        expected = f"found row 4, which request {receiver.key} from 'decode-0' holds"
        for _ in range(2):
            with pytest.raises(LocalProtocolError, match=re.escape(expected)):
                sender.send({"kv": Pages((5, 4))}, tokens=(0, 8))
        back(instances, (5,)).abort("a refused send holds nothing")
        receiver.abort("the test is finished")
        until(lambda: receiver.lease.released)
        sender.send({"kv": Pages((5, 4))}, tokens=(0, 8))
        sender.abort("the test is finished")


def test_many_chunks_of_one_list_of_pages_hold_each_row_once() -> None:
    with cluster(Side(num_pages=64), Side(page=8)) as instances:
        requests = instances.prefill[0].manager._runtime.requests
        sender, pages = instances.prefill[0].manager.sender(new_request_id(), peer="decode-0"), Pages(np.arange(50))
        for start in range(0, 200, 2):
            sender.send({"kv": pages}, tokens=(start, start + 2))
        (given,) = [given for _, given in requests._held_rows._senders.values()]
        assert sorted(row for _, ids in given for row in ids.tolist()) == list(range(50))
        assert requests._held_rows._num_sends["kv"].max() == 1
        sender.abort("the test is finished")
        until(lambda: not requests._held_rows._num_sends["kv"].any())
        assert not requests._held_rows._senders
