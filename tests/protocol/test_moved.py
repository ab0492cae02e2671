"""An admitted instance that starts again at another address."""

from __future__ import annotations

import pytest

from disagg.protocol.messages import Reject, Welcome
from disagg.protocol.peer_effects import Connect, Disconnect, ReplyOn
from disagg.protocol.peers import PeerTable
from harness.simulator.connections import welcome
from tests.protocol.peer_table import LEADER, SECOND, hello, peer_table, reply, take_effects, take_reply

MOVED = "tcp://10.0.0.9:80"


def admitted(key: str = "key") -> PeerTable:
    """Decode-0 was admitted by its hello on `c1`, and has answered."""
    table = peer_table()
    table._admits = lambda *_: True
    table.on_inbound(b"c1", key, hello(leader=LEADER), 0.0)
    table.tick(0.0)
    reply(table, LEADER, welcome(epoch=7), 0.0)
    take_effects(table)
    return table


def lose(table: PeerTable) -> None:
    table.on_closed(b"c1", 1.0)
    table.tick(2.0)
    take_effects(table)


def test_an_admitted_instance_is_dialled_where_it_has_started_again() -> None:
    table = admitted()
    lose(table)
    table.on_inbound(b"c2", "key", hello(epoch=8, leader=MOVED), 3.0)
    gone, connect, answer = take_effects(table)
    assert (gone, connect) == (Disconnect(0), Connect(1, MOVED, "key"))
    assert isinstance(answer, ReplyOn)
    assert isinstance(answer.message, Welcome)
    table.tick(3.0)
    reply(table, MOVED, welcome(epoch=8), 3.0)
    assert table.instances["decode-0"].ready
    table.on_closed(b"c2", 4.0)
    table.tick(5.0)
    table.on_inbound(b"c3", "key", hello(epoch=9, table=b"bad", leader=MOVED), 6.0)
    assert table.instances == {}, "it was still admitted only"


@pytest.mark.parametrize("why", ["connected", "another rank", "key", "not admitted", "configured"])
def test_nobody_else_takes_its_name(why: str) -> None:
    table = admitted()
    if why == "another rank":
        table.on_inbound(b"c4", "key", hello(rank=1, epoch=70, leader=LEADER), 0.5)
    if why == "configured":
        table.add_peer("decode-0", LEADER, "key", 0.5)
    if why != "connected":
        lose(table)
    if why == "not admitted":
        table._admits = lambda _, address, __: address == LEADER
    take_effects(table)
    table.on_inbound(b"c2", "other" if why == "key" else "key", hello(epoch=8, leader=MOVED), 3.0)
    answer = take_reply(table)
    assert isinstance(answer, Reject) is (why in ("connected", "key", "not admitted"))
    assert table.instances["decode-0"].address == LEADER


def test_another_rank_of_a_moved_instance_does_not_move_it_back() -> None:
    """The old leader's address in a late hello of an ended process counts no more once the new one is connected."""
    table = admitted()
    lose(table)
    table.on_inbound(b"c2", "key", hello(epoch=8, leader=MOVED), 3.0)
    table.on_inbound(b"c5", "key", hello(rank=1, epoch=71, leader=SECOND), 3.5)
    assert table.instances["decode-0"].address == MOVED


def test_a_configured_instance_stays_although_it_was_admitted_before() -> None:
    table = admitted()
    table.add_peer("decode-0", LEADER, "key", 0.5)
    lose(table)
    table.on_inbound(b"c2", "key", hello(epoch=8, table=b"bad", leader=LEADER), 3.0)
    assert "decode-0" in table.instances
