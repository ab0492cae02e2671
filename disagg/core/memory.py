"""Memory that an engine may access."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from disagg.core.errors import ConfigError

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Device:
    """The CPU, or a GPU by its index. Raises `ConfigError` for a kind other than `"cpu"` and `"cuda"`."""

    kind: str = "cpu"
    index: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise ConfigError(f"device kind: expected 'cpu' or 'cuda', found {self.kind!r}")

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse `"cpu"`, `"cuda"` or `"cuda:1"`. Raises `ConfigError` for anything else."""
        kind, colon, index = text.partition(":")
        if colon and not index.isdecimal():
            raise ConfigError(f"device: expected 'cpu' or 'cuda:N', found {text!r}")
        return cls(kind, int(index or 0))


CPU = Device()


@dataclass(frozen=True, order=True)
class MemoryRegion:
    """`nbytes` bytes from `address` in this process, for an engine to register. `owner` keeps them alive. Raises
    `ConfigError` unless address and size are positive integers.
    """

    address: int
    nbytes: int
    device: Device = CPU
    owner: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _make_plain(self, "address", "nbytes")
        if self.address <= 0 or self.nbytes <= 0 or self.address + self.nbytes > 2**64:
            raise ConfigError(f"memory region: expected a positive address and size, found {self.address:#x} + {self.nbytes}")


@dataclass(frozen=True, order=True)
class RemoteRegion:
    """`nbytes` bytes from `address` in a *peer's* process. This process must not dereference it."""

    address: int
    nbytes: int
    device: Device = CPU


def merge_regions(regions: Sequence[MemoryRegion]) -> tuple[MemoryRegion, ...]:
    """Sort regions and join overlapping ones, on the CPU adjacent ones too. Adjacent regions of a GPU may be two
    allocations, which an engine cannot register as one.
    """
    merged: list[MemoryRegion] = []
    for region in sorted(regions, key=lambda r: (r.device, r.address, r.nbytes)):
        last = merged[-1] if merged else None
        slack = int(region.device == CPU)
        if last is not None and last.device == region.device and region.address < last.address + last.nbytes + slack:
            stop = max(last.address + last.nbytes, region.address + region.nbytes)
            merged[-1] = MemoryRegion(last.address, stop - last.address, last.device)
        else:
            merged.append(region)
    return tuple(merged)


def _make_plain(record: object, *names: str) -> None:
    """Convert NumPy's integers in these fields to Python's, which messages can encode."""
    for name in names:
        given = getattr(record, name)
        try:
            plain = tuple(map(operator.index, given)) if isinstance(given, tuple) else operator.index(given)
        except TypeError:
            raise ConfigError(f"{type(record).__name__} {name}: expected integers, found {given!r}") from None
        object.__setattr__(record, name, plain)


@dataclass(frozen=True)
class RawTensor:
    """A tensor's address of element 0, shape, strides in *elements*, dtype name and device. Without an `owner`, the caller
    must keep the memory alive while a manager uses it. Raises `ConfigError` for an unknown dtype, negative numbers, or
    another number of strides than sizes.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device = CPU
    owner: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"dtype: expected one of {', '.join(ITEMSIZE)}, found {self.dtype!r}")
        if len(self.shape) != len(self.strides):
            raise ConfigError(f"tensor: expected {len(self.shape)} strides for shape {self.shape}, found {len(self.strides)}")
        if any(size < 0 for size in self.shape) or any(stride < 0 for stride in self.strides):
            raise ConfigError(f"tensor: expected sizes and strides of at least 0, found {self.shape}, {self.strides}")
        _make_plain(self, "pointer", "shape", "strides")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes_spanned(self) -> int:
        """Bytes from the first element to the end of the last; 0 if there are none."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    def select(self, axis: int, index: int) -> RawTensor:
        """Raises `ConfigError` for an index outside `axis`."""
        if not 0 <= index < self.shape[axis]:
            raise ConfigError(f"tensor axis {axis}: expected an index in [0, {self.shape[axis]}), found {index}")
        keep = [i for i in range(len(self.shape)) if i != axis]
        return RawTensor(
            self.pointer + index * self.strides[axis] * self.itemsize,
            tuple(self.shape[i] for i in keep),
            tuple(self.strides[i] for i in keep),
            self.dtype,
            self.device,
            self.owner,
        )

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.pointer, self.nbytes_spanned, self.device, self.owner)


@runtime_checkable
class _TorchLike(Protocol):
    """This module never imports torch."""

    def data_ptr(self) -> int: ...
    def stride(self) -> tuple[int, ...]: ...


@runtime_checkable
class _ArrayLike(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


def raw_tensor(tensor: Any) -> RawTensor:
    """The `RawTensor` of a torch tensor, a NumPy array, a `RawTensor` or `(pointer, shape, strides, dtype, device)`, with
    strides in elements. It holds the tensor or array. Raises `ConfigError` for anything else, and for read-only arrays.
    """
    if isinstance(tensor, RawTensor):
        return tensor
    if isinstance(tensor, _TorchLike):
        shape = tuple(int(size) for size in tensor.shape)  # type: ignore[attr-defined]
        dtype = str(tensor.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        device = Device.parse(str(tensor.device))  # type: ignore[attr-defined]
        return RawTensor(tensor.data_ptr(), shape, tuple(tensor.stride()), dtype, device, tensor)
    if isinstance(tensor, _ArrayLike):
        interface = tensor.__array_interface__
        dtype = str(tensor.dtype)  # type: ignore[attr-defined]
        if dtype not in ITEMSIZE:
            raise ConfigError(f"dtype: expected one of {', '.join(ITEMSIZE)}, found {dtype!r}")
        itemsize = ITEMSIZE[dtype]
        if any(stride % itemsize for stride in tensor.strides):
            raise ConfigError(f"tensor: expected strides in whole elements of {itemsize} bytes, found {tensor.strides}")
        if interface["data"][1]:
            raise ConfigError("tensor: expected writable memory, found a read-only array")
        strides = tuple(stride // itemsize for stride in tensor.strides)
        return RawTensor(int(interface["data"][0]), tuple(interface["shape"]), strides, dtype, owner=tensor)
    if isinstance(tensor, tuple) and len(tensor) == 5:
        pointer, shape, strides, dtype, device = tensor
        where = device if isinstance(device, Device) else Device.parse(str(device))
        return RawTensor(int(pointer), tuple(shape), tuple(strides), str(dtype).removeprefix("torch."), where)
    raise ConfigError(
        "tensor: expected a torch tensor, a NumPy array, a RawTensor or (pointer, shape, strides, dtype, device), "
        f"found {type(tensor).__name__}"
    )
