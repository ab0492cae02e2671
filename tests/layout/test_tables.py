"""Axes, tensors, components and layout tables: what they check, and tables of hostile bytes."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import LayoutError
from disagg.core.topology import Topology
from disagg.layout.ownership import EVERYTHING, Interval, Intervals, Owned, Periodic, Share, interval, positions_to_intervals
from disagg.layout.tables import (
    MAX_AXIS_SIZE,
    MAX_LAYER_IDS,
    MAX_LAYERS,
    Axis,
    ComponentLayout,
    LayoutTable,
    RankLayout,
    TensorLayout,
    TopologySizes,
    agreed_components,
    layout_table,
)
from disagg.testing.strategies import ownerships

SIZE = 24


LAYERS = Axis("layer", None, interval(0, 2))
TOKENS = Axis("token", None, EVERYTHING)
HEADS = Axis("kv_head", 4, interval(0, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kv_head", None, EVERYTHING), "only 'layer' and 'token'"),
        (("kv_head", 0, EVERYTHING), "expected a size of 1 to"),
        (("kv_head", MAX_AXIS_SIZE + 1, EVERYTHING), "expected a size of 1 to"),
        (("kv_head", 4, interval(2, 5)), r"expected positions below its size 4, found \[2, 5\)"),
        (("token", None, EVERYTHING, 0), "granule of at least 1, found 0"),
    ],
)
def test_impossible_axes_are_rejected_by_name(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=f"{arguments[0]}.*{message}"):
        Axis(*arguments)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((TOKENS, HEADS), "one 'layer'"),
        ((LAYERS, HEADS, HEADS), "distinct axes"),
        ((Axis("layer", None, EVERYTHING), HEADS), "as intervals of ids"),
        ((Axis("layer", None, interval(0, MAX_LAYERS + 1)),), f"below {MAX_LAYERS}"),
        ((LAYERS, Axis("kv_head", 4, interval(0, 2), 2)), "'kv_head': only a token axis may have a granule"),
    ],
)
def test_impossible_tensors_are_rejected_by_role(axes: tuple[Axis, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=f"tensor 'k'.*{message}"):
        TensorLayout("k", "float16", axes)


def test_a_tensor_has_axes_and_layers() -> None:
    tensor = TensorLayout("k", "float16", (HEADS, Axis("layer", None, positions_to_intervals([5, 6, 2])), TOKENS))
    assert tensor.layers == (5, 6, 2)
    assert tensor.layer_set == {2, 5, 6}
    assert tensor.token is tensor.axis("token") is TOKENS
    assert tensor.inner_axes == (HEADS,)
    assert TensorLayout("k", "float16", (LAYERS,)).token is None
    with pytest.raises(LayoutError, match="no axis 'dim' among 'kv_head layer token'"):
        tensor.axis("dim")


def test_components_hold_distinct_roles_of_one_kind_of_rows() -> None:
    paged, state = TensorLayout("k", "float16", (LAYERS, TOKENS)), TensorLayout("s", "float16", (LAYERS, HEADS))
    assert ComponentLayout("kv", "pages", (paged,)).tensor("k") is paged
    with pytest.raises(LayoutError, match="no tensor 'v'"):
        ComponentLayout("kv", "pages", (paged,)).tensor("v")
    with pytest.raises(LayoutError, match="expected distinct roles"):
        ComponentLayout("kv", "pages", (paged, paged))
    with pytest.raises(LayoutError, match="tensor 's': expected a 'token' axis with pages"):
        ComponentLayout("kv", "pages", (paged, state))
    with pytest.raises(LayoutError, match=r"tensor 'k': expected .* none with slots"):
        ComponentLayout("ssm", "slot", (paged,))


# ------------------------------------------------------------------------------------------------------------- tables


def component(name: str = "kv", *, optional: bool = False, dtype: str = "float16", **axes: Any) -> ComponentLayout:
    """A component of two tensors; `axes` replace those of the first."""
    first = {"layer": LAYERS, "token": TOKENS, "kv_head": HEADS} | axes
    return ComponentLayout(
        name,
        "pages",
        (
            TensorLayout("k", dtype, tuple(axis for axis in first.values() if axis)),
            TensorLayout(
                "v",
                dtype,
                (
                    LAYERS,
                    Axis("token", None, first["token"].owned),
                    Axis("kv_head", 4, Periodic(1, 1, 2)),
                    Axis("dim", 8, Share(0, 1)),
                ),
            ),
        ),
        optional,
    )


def table(*components: ComponentLayout | None) -> LayoutTable:
    return layout_table(Topology(), [[each] for each in components])


def test_tensors_that_share_pages_own_the_same_tokens() -> None:
    halves = [TensorLayout(role, "float16", (LAYERS, Axis("token", None, Periodic(i, 1, 2)))) for i, role in enumerate("kv")]
    with pytest.raises(LayoutError, match="expected tensors that own the same tokens"):
        ComponentLayout("kv", "pages", tuple(halves))


def test_a_table_lists_components_by_group_rank() -> None:
    kv, ssm = component(), component("ssm")
    found = layout_table(Topology(tp=2, dp=3), [[kv, kv], [None, ssm]])
    assert found.sizes == TopologySizes(dp=3, tp=2)
    assert found.sizes.topology == Topology(dp=3, tp=2)
    assert found.ranks == (RankLayout((kv,)), RankLayout((kv, ssm)))
    assert found.components == {"kv": (kv, kv), "ssm": (None, ssm)}


def test_a_table_has_the_number_of_ranks_of_its_topology() -> None:
    with pytest.raises(LayoutError, match="expected 2 ranks"):
        LayoutTable(TopologySizes(tp=2), (RankLayout(()),))


def test_a_rank_names_each_component_once() -> None:
    with pytest.raises(LayoutError, match="kv"):
        RankLayout((component(), component()))


@given(st.data())
def test_tables_survive_encoding(data: st.DataObject) -> None:
    axis = Axis("kv_head", SIZE, data.draw(ownerships(size=SIZE)))
    granule = data.draw(st.integers(1, 9))
    aligned: tuple[Owned, ...] = (EVERYTHING, Share(1, 3, 2 * granule))
    tokens = Axis("token", None, data.draw(st.sampled_from(aligned)), granule)
    given_table = table(component(kv_head=axis, token=tokens), None, component("draft", optional=True))
    encoded = given_table.encode()
    assert LayoutTable.decode(encoded) == given_table
    assert LayoutTable.decode(encoded).encode() == encoded


@pytest.mark.parametrize(
    "owned",
    [Periodic(0, 1, 2), Periodic(2, 4, 8), Periodic(0, 4, 6), Share(0, 2, 6), Intervals((Interval(0, 5),)), Periodic(2, 1, 1)],
)
def test_an_ownership_that_cuts_through_granules_is_rejected(owned: Owned) -> None:
    with pytest.raises(LayoutError, match="splits granules of 4"):
        Axis("token", None, owned, 4)


def test_agreed_components_are_those_of_both_sides() -> None:
    shared, draft = component(), component("draft", optional=True)
    assert agreed_components(table(shared, draft), table(shared)) == ("kv",)
    assert agreed_components(table(shared), table(shared, draft)) == ("kv",)
    assert agreed_components(table(draft, shared), table(shared, draft)) == ("draft", "kv")
    assert agreed_components(table(component("draft"), shared), table(shared, draft)) == ("draft", "kv")


def test_a_required_component_that_one_side_lacks_is_named() -> None:
    with pytest.raises(LayoutError, match="'ssm': required, but the peer does not have it"):
        agreed_components(table(component(), component("ssm")), table(component()))
    with pytest.raises(LayoutError, match="'ssm': required, but this side does not have it"):
        agreed_components(table(component()), table(component(), component("ssm")))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (component(dtype="bfloat16"), "tensor 'k': dtype: float16 here, bfloat16 at the peer"),
        (component(kv_head=Axis("kv_head", 8, interval(0, 2))), "axis 'kv_head': global size: 4 here, 8 at the peer"),
        (component(token=Axis("token", None, EVERYTHING, 4)), "axis 'token': granule: 1 here, 4 at the peer"),
        (component(dim=Axis("dim", 8, EVERYTHING)), "axis 'dim': global size: None here, 8 at the peer"),
        (component(kv_head=None), "axis 'kv_head': global size: 4 here, None at the peer"),
        (component(layer=Axis("layer", None, interval(0, 3))), r"tensor 'k': layers: \[0, 2\) here, \[0, 3\) at the peer"),
        (
            ComponentLayout("kv", "slot", (TensorLayout("k", "float16", (LAYERS, HEADS)),)),
            "rows: pages here, slot at the peer|axis 'token'",
        ),
    ],
)
def test_a_mismatch_is_reported_with_both_values(other: ComponentLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=f"component 'kv'.*({message})"):
        agreed_components(table(component()), table(other))


def test_another_model_of_the_same_page_size_is_rejected() -> None:
    """Pages have equal bytes, but the dtype or the global sizes differ. A table does not see a model's revision."""
    ours = component(dim=Axis("dim", 128, EVERYTHING))
    for theirs in (
        component(dtype="bfloat16", dim=Axis("dim", 128, EVERYTHING)),
        component(dim=Axis("dim", 64, EVERYTHING), kv_head=Axis("kv_head", 8, interval(0, 4))),
    ):
        with pytest.raises(LayoutError, match=r"here, .* at the peer"):
            agreed_components(table(ours), table(theirs))
    assert table(ours).encode() == table(component(dim=Axis("dim", 128, EVERYTHING))).encode(), "a table holds no revision"


def test_ranks_of_one_instance_must_agree_among_themselves() -> None:
    odd = layout_table(Topology(tp=2), [[component(), component(dtype="bfloat16")]])
    with pytest.raises(LayoutError, match=r"'kv'.*dtype: ranks of one instance differ: float16 and bfloat16"):
        agreed_components(odd, odd)


# ------------------------------------------------------------------------------------------------------- hostile tables


def hostile(**changes: Any) -> bytes:
    """An encoded table with `path__to__key=value` changed."""
    plain: Any = msgspec.to_builtins(table(component()))
    for path, value in changes.items():
        *steps, last = (int(step) if step.isdecimal() else step for step in path.split("__"))
        at = plain
        for step in steps:
            at = at[step]
        at[last] = value
    return msgspec.msgpack.encode(plain)


FIRST = "ranks__0__components__0__tensors__0"
HUGE = [2**24 + 1, 2**31, 2**53, 2**62, 2**63, 2**64 - 1]


@contextlib.contextmanager
def bounded_memory(nbytes: int) -> Any:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def rejected(data: bytes) -> None:
    with bounded_memory(4 << 20), pytest.raises(LayoutError, match=r"cannot be read"):
        LayoutTable.decode(data)


def test_a_table_cut_at_any_byte_is_rejected() -> None:
    data = table(component(), component("draft", optional=True)).encode()
    for stop in range(len(data)):
        rejected(data[:stop])
    rejected(data + b"\x00")


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("field", ["dp", "tp", "pp", "ep"])
def test_a_table_of_a_giant_topology_is_rejected(field: str, size: int) -> None:
    data = hostile(**{f"sizes__{field}": size})
    if field == "dp" and size < 2**64:
        LayoutTable.decode(data)  # groups are alike, so a table lists one
    else:
        rejected(data)


@pytest.mark.parametrize("size", HUGE)
def test_a_table_with_giant_axes_is_rejected(size: int) -> None:
    rejected(hostile(**{f"{FIRST}__axes__2__size": size}))
    rejected(hostile(**{f"{FIRST}__axes__0__owned__parts": [[0, size]]}))
    rejected(hostile(**{f"{FIRST}__axes__2__owned__parts": [[0, size]]}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sizes__tp", 0),
        ("sizes__tp", -1),
        ("sizes__tp", "1"),
        ("sizes__surplus", 1),
        ("ranks", []),
        ("ranks", None),
        ("ranks__0__components__0__name", b"kv"),
        ("ranks__0__components__0__rows", "rings"),
        (f"{FIRST}__dtype", "float7"),
        (f"{FIRST}__dtype", ""),
        (f"{FIRST}__axes", []),
        (f"{FIRST}__axes__1__granule", 0),
        (f"{FIRST}__axes__1__granule", -(2**63)),
        (f"{FIRST}__axes__1__owned", {"form": "periodic", "offset": 0, "run": 1, "period": 2**62}),
        (f"{FIRST}__axes__1__owned", {"form": "periodic", "offset": 2**64 - 1, "run": 1, "period": 1}),
        (f"{FIRST}__axes__1__owned", {"form": "share", "index": 3, "parts": 3}),
        (f"{FIRST}__axes__1__owned", {"form": "anything"}),
        (f"{FIRST}__axes__1__owned", {"parts": []}),
        (f"{FIRST}__axes__2__owned__parts", [[0, 1], [0, 1]]),
        (f"{FIRST}__axes__2__owned__parts", [[0, 1, 2]]),
        (f"{FIRST}__axes__2__owned__parts", [[0.5, 1]]),
    ],
)
def test_a_table_with_a_wrong_value_is_rejected(path: str, value: Any) -> None:
    rejected(hostile(**{path: value}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x82\xa5sizes\x80\xa5ranks\xdd\xff\xff\xff\xff",
        b"\x82\xa5sizes\x80\xa5ranks\x91\x81\xaacomponents\x91\x84\xa4name\xa1\xff",
        b"{}",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_other_than_a_table_are_rejected(data: bytes) -> None:
    rejected(data)


@given(st.binary(max_size=200))
def test_garbage_raises_only_layout_errors(data: bytes) -> None:
    with contextlib.suppress(LayoutError):
        LayoutTable.decode(data)


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_table_with_one_byte_changed_raises_only_layout_errors(place: int, byte: int) -> None:
    data = bytearray(table(component(), component("ssm")).encode())
    data[place % len(data)] = byte
    try:
        found = LayoutTable.decode(bytes(data))
    except LayoutError:
        return
    assert LayoutTable.decode(found.encode()) == found


def many_tensors(*axes: Axis, count: int = 2000) -> bytes:
    """A table with a component that the other side need not have, and which names much in few bytes."""
    tensors = tuple(TensorLayout(str(number), "bool", axes) for number in range(count))
    return table(component(), ComponentLayout("x", "slot", tensors, optional=True)).encode()


@pytest.mark.parametrize(
    "axes",
    [(Axis("layer", None, interval(0, MAX_LAYERS)),), (Axis("layer", None, Intervals(())), Axis("a", 8192, Periodic(0, 1, 2)))],
    ids=["layers", "periods"],
)
def test_a_table_is_not_expanded(axes: tuple[Axis, ...]) -> None:
    """It may come from anybody."""
    data, local = many_tensors(*axes), table(component())
    tracemalloc.start()
    assert agreed_components(local, LayoutTable.decode(data)) == agreed_components(local, local)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_tensors_of_equal_layers_share_them() -> None:
    tensors = LayoutTable.decode(many_tensors(Axis("layer", None, interval(3, 9)))).ranks[0].by_name["x"].tensors
    assert {tensor.layers for tensor in tensors} == {(3, 4, 5, 6, 7, 8)}
    assert len({id(tensor.layers) for tensor in tensors}) == 1


def test_layers_that_differ_from_tensor_to_tensor_are_bounded() -> None:
    tensors = tuple(
        TensorLayout(str(number), "bool", (Axis("layer", None, interval(number, MAX_LAYERS)),)) for number in range(17)
    )
    data = table(ComponentLayout("x", "slot", tensors)).encode()
    with pytest.raises(LayoutError, match=f"expected at most {MAX_LAYER_IDS} layer ids"):
        LayoutTable.decode(data)
