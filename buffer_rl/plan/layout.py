"""Ranks of a trainer by the axes of its parallelism: data, pipeline, context and tensor. Pure data, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from buffer_rl.records.groups import Topology

Axis = Literal["pp", "dp", "cp", "tp"]

PP_DP_TP: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
"""The order for training, outermost axis first: ``rank = pp * (dp_size * tp_size) + dp * tp_size + tp`` without context
parallelism, whose axis is inside of data and outside of tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks lie along each axis. A shard is the rows of one replica: its number is the coordinate of the axis
    ``dp``.

    order: the axes, outermost first. Ranks for inference often have ``("dp", "pp", "cp", "tp")``, so that a replica's
    ranks follow each other: ``rank = dp * (pp_size * tp_size) + pp * tp_size + tp``.
    """

    dp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    order: Sequence[Axis] = field(default=PP_DP_TP)

    @property
    def sizes(self) -> dict[Axis, int]:
        """Ranks along each axis, in the layout's order."""
        known: dict[Axis, int] = {"pp": self.pp_size, "dp": self.dp_size, "cp": self.cp_size, "tp": self.tp_size}
        return {axis: known[axis] for axis in self.order}

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where ``rank`` is along each axis. Raises ValueError for a rank that the layout does not have."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of {self.world_size} ranks")
        at, left = {}, rank
        for axis, size in reversed(self.sizes.items()):  # the innermost changes first
            left, at[axis] = divmod(left, size)
        return at

    def rank(self, coordinates: Mapping[Axis, int]) -> int:
        """The inverse of ``coordinates``; an axis that is left out is 0."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def is_head(self, rank: int) -> bool:
        """Whether the rank is the one of its replica that has its results: on the last pipeline stage, with context and
        tensor rank 0."""
        at = self.coordinates(rank)
        return at["pp"] == self.pp_size - 1 and at["cp"] == 0 and at["tp"] == 0

    def topology(self, rank: int, *, in_step: bool = False, shares: bool = False) -> Topology:
        """The rank's place as a trainer declares it. shares: every rank has the tensors of ``Trainer.export``."""
        dp, share = self.coordinates(rank)["dp"], (rank, self.world_size) if shares else None
        return Topology(dp_rank=dp, dp_size=self.dp_size, is_head=self.is_head(rank), in_step=in_step, share=share)


def layout_of(world_size: int, *, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1) -> Layout:
    """The layout of ``world_size`` ranks, with as many replicas as fit. Raises ValueError unless
    ``tp_size * pp_size * cp_size`` divides them."""
    replica = tp_size * pp_size * cp_size
    if world_size % replica:
        raise ValueError(f"{world_size} ranks, in replicas of {replica}")
    return Layout(dp_size=world_size // replica, pp_size=pp_size, cp_size=cp_size, tp_size=tp_size)


def grouping(num_units: int, num_groups: int) -> dict[int, list[int]]:
    """Which of ``num_units`` numbered units belong to each of ``num_groups`` groups: runs of equal length, and what is
    left one by one from the first group on."""
    size = num_units // num_groups
    whole = size * num_groups
    extra = {group: [whole + group] if whole + group < num_units else [] for group in range(num_groups)}
    return {group: [*range(group * size, (group + 1) * size), *extra[group]] for group in range(num_groups)}
