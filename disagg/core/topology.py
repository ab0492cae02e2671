"""How an instance divides a model over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from disagg.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The parallel sizes of an instance, and one rank of it (the `*_rank` fields).

    Ranks with the same data-parallel index form a *group*: they have the same requests. In a group, ranks are numbered with
    tensor parallelism fastest, then context, then pipeline. Expert parallelism divides the tensor-parallel ranks (`moe_tp =
    tp // ep`), so it adds no ranks.

    Raises `ConfigError` if a size is below 1, a rank is outside its size, or `ep` does not divide `tp`.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    dp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "cp", "tp", "ep"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"topology {name}: expected an integer of at least 1, found {size!r}")
        for name in ("dp", "pp", "cp", "tp"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, name)
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
                raise ConfigError(f"topology {name}_rank: expected 0 to {size - 1} ({name}={size}), found {rank!r}")
        if self.tp % self.ep:
            raise ConfigError(f"topology ep: expected a divisor of tp={self.tp}, found {self.ep}")

    @property
    def group_size(self) -> int:
        return self.pp * self.cp * self.tp

    @property
    def num_ranks(self) -> int:
        return self.dp * self.group_size

    @property
    def group_rank(self) -> int:
        return (self.pp_rank * self.cp + self.cp_rank) * self.tp + self.tp_rank

    @property
    def rank(self) -> int:
        return self.dp_rank * self.group_size + self.group_rank

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank % self.moe_tp

    @property
    def ep_rank(self) -> int:
        return self.tp_rank // self.moe_tp

    def at(self, rank: int) -> Topology:
        """The same instance, seen from `rank`. Raises `ConfigError` outside 0 to `num_ranks - 1`."""
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank: expected 0 to {self.num_ranks - 1}, found {rank}")
        rest, tp_rank = divmod(rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        dp_rank, pp_rank = divmod(rest, self.pp)
        return replace(self, dp_rank=dp_rank, pp_rank=pp_rank, cp_rank=cp_rank, tp_rank=tp_rank)

    def group(self) -> Iterator[Topology]:
        first = self.dp_rank * self.group_size
        return (self.at(first + i) for i in range(self.group_size))
