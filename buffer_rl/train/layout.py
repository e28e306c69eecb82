"""Ranks of a trainer by the axes of its parallelism: data, pipeline and tensor. Pure data, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from buffer_rl.types import Topology

Axis = Literal["pp", "dp", "tp"]

PP_DP_TP: tuple[Axis, ...] = ("pp", "dp", "tp")
"""Outermost axis first: ``rank = pp * (dp_size * tp_size) + dp * tp_size + tp``."""

DP_PP_TP: tuple[Axis, ...] = ("dp", "pp", "tp")
"""``rank = dp * (pp_size * tp_size) + pp * tp_size + tp``."""


def topology_of(
    rank: int, world_size: int, *, tp_size: int = 1, pp_size: int = 1, order: Sequence[Axis] = PP_DP_TP
) -> Topology:
    """The place of ``rank``: its replica, and whether it is the head of it, which is on the last pipeline stage and has
    tensor rank 0.

    order: the axes, outermost first. Raises ValueError unless ``tp_size * pp_size`` divides ``world_size``."""
    replica = tp_size * pp_size
    if world_size % replica or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} ranks, in replicas of {replica}")
    sizes: dict[Axis, int] = {"pp": pp_size, "dp": world_size // replica, "tp": tp_size}
    at, left = {}, rank
    for axis in reversed(order):  # the innermost changes first
        left, at[axis] = divmod(left, sizes[axis])
    return Topology(dp_rank=at["dp"], dp_size=sizes["dp"], is_head=at["pp"] == pp_size - 1 and at["tp"] == 0)


def grouping(num_units: int, num_groups: int) -> dict[int, list[int]]:
    """Which of ``num_units`` numbered units belong to each of ``num_groups`` groups: runs of equal length, and what is
    left one by one from the first group on."""
    size = num_units // num_groups
    whole = size * num_groups
    extra = {group: [whole + group] if whole + group < num_units else [] for group in range(num_groups)}
    return {group: [*range(group * size, (group + 1) * size), *extra[group]] for group in range(num_groups)}
