"""What a server needs by name comes from `disagg`, and shows nothing that is the library's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest

import disagg
from disagg import KVManager, Lease, Pages, Receiver, Sender

INSIDE = {
    "Backend",
    "BackendOptions",
    "RemotePeer",
    "Admit",
    "Channel",
    "Wire",
    "GivenRows",
    "TokenRange",
    "Verify",
}
"""Types of modules with pages of their own, of tests, and aliases of plain types."""


def test_every_public_name_exists() -> None:
    assert sorted(set(disagg.__all__)) == disagg.__all__
    assert all(hasattr(disagg, name) for name in disagg.__all__)


@pytest.mark.parametrize("kind", [KVManager, Receiver, Sender])
def test_types_in_public_signatures_come_from_the_package(kind: type) -> None:
    named: set[str] = set()
    for name, member in inspect.getmembers(kind):
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            for annotation in function.__annotations__.values():
                named |= set(re.findall(r"[A-Z]\w*", re.sub(r"\"[^\"]*\"|'[^']*'", "", annotation)))
    ours = {name for name in named if getattr(inspect.getmodule(kind), name, None) is not None}
    ours = {name for name in ours if getattr(getattr(inspect.getmodule(kind), name), "__module__", "").startswith("disagg")}
    assert ours - {"Control", "Ending"} <= INSIDE | set(disagg.__all__)


def test_what_only_the_library_calls_is_not_shown() -> None:
    assert not {"release", "quarantine"} & set(dir(Lease))
    for handle in (Receiver, Sender):
        assert not {"begin", "end", "wake", "take", "yield_to_waiter", "moments"} & set(dir(handle))


def test_pages_take_a_plain_list() -> None:
    """`make check` also reads this with mypy."""
    assert Pages([1, 2]) == Pages((1, 2))


def test_every_argument_of_a_manager_is_documented() -> None:
    text = inspect.getdoc(KVManager) or ""
    arguments = [name for name in inspect.signature(KVManager).parameters if name != "self"]
    assert [name for name in arguments if not re.search(rf"`{name}\b", text)] == []


@pytest.mark.parametrize("called", [KVManager, KVManager.add_peer, KVManager.receiver, KVManager.sender, Sender.send])
def test_docstrings_name_every_parameter(called: Callable[..., object]) -> None:
    text = inspect.getdoc(called) or ""
    parameters = [name for name in inspect.signature(called).parameters if name != "self"]
    assert [name for name in parameters if not re.search(rf"`{name}\b", text)] == []
