"""Timers of sessions, against naive references."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.protocol.timers import Timers, Tombstone, Tombstones
from disagg.protocol.types import RequestKey


def test_a_timer_rearmed_for_an_earlier_time_is_popped_once() -> None:
    class Session:
        armed_at = float("inf")
        due = 5.0

    timers, session = Timers(), Session()
    timers.arm(session)
    session.due = 2.0
    timers.arm(session)
    timers.arm(session)
    assert timers.next == 2.0
    assert timers.pop(1.0) is None
    assert timers.pop(2.0) is session
    assert timers.pop(9.0) is None
    assert timers.next == float("inf")


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(("arm", "disarm", "pop")), st.integers(1, 20)), max_size=60))
def test_timers_pop_each_armed_session_when_it_is_due(steps: list[tuple[int, str, int]]) -> None:
    """Compares with a dictionary of due times."""

    class Session:
        armed_at = float("inf")
        due = float("inf")

    timers, all_sessions, wanted = Timers(), [Session() for _ in range(5)], dict[int, float]()
    now = 0.0
    for number, step, time_ in steps:
        session = all_sessions[number]
        if step == "arm":
            session.due = now + time_
            timers.arm(session)
            wanted[number] = min(wanted.get(number, float("inf")), session.due)
        elif step == "disarm":
            for _ in range(70):  # more stale entries than the heap keeps
                timers.disarm(session)
                session.due = now + 1.0
                timers.arm(session)
            timers.disarm(session)
            wanted.pop(number, None)
        else:
            now += time_
            found = set()
            while (popped := timers.pop(now)) is not None:
                found.add(all_sessions.index(popped))  # type: ignore[arg-type]
            assert found == {n for n, due in wanted.items() if due <= now}
            wanted = {n: due for n, due in wanted.items() if due > now}
    assert len(timers) <= 64 + 2 * 5 + 70


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.booleans()), max_size=80),
)
def test_tombstones_are_bounded_for_all_peers_together(limit: int, steps: list[tuple[str, int, bool]]) -> None:
    """Those that are kept are the newest of their instance, and no instance with more than a share pushes out one with less."""
    tombstones, put = Tombstones(limit), dict[str, list[RequestKey]]()
    for peer, number, forgets in steps:
        key = RequestKey(number.to_bytes(16, "big"), 0)
        if forgets:
            tombstones.forget(peer)
            put.pop(peer, None)
            assert tombstones.get(peer, key) is None
            continue
        before = {each: kept(tombstones, each, keys) for each, keys in put.items()}
        put.setdefault(peer, [])
        put[peer] = [each for each in put[peer] if each != key] + [key]
        tombstones.put(peer, key, Tombstone(None, reason="over"))
        found = {each: kept(tombstones, each, keys) for each, keys in put.items()}
        assert len(tombstones) == sum(map(len, found.values())) <= limit
        for each, keys in found.items():
            assert keys == put[each][len(put[each]) - len(keys) :]
            if len(keys) < len(before.get(each, ())):
                assert each == peer or len(keys) + 1 >= len(found[peer])


def kept(tombstones: Tombstones, peer: str, keys: list[RequestKey]) -> list[RequestKey]:
    return [key for key in keys if tombstones.get(peer, key) is not None]
