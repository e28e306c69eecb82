"""Places of ranks, and numbered units dealt out to groups."""

from __future__ import annotations

import pytest

from buffer_rl.train.layout import DP_PP_TP, PP_DP_TP, Axis, grouping, topology_of
from buffer_rl.train.ranks import check_topologies


@pytest.mark.parametrize(("order", "heads"), [(PP_DP_TP, [4, 6]), (DP_PP_TP, [2, 6])])
def test_heads_are_on_the_last_stage_with_tensor_rank_0(order: tuple[Axis, ...], heads: list[int]) -> None:
    places = [topology_of(rank, 8, tp_size=2, pp_size=2, order=order) for rank in range(8)]
    assert [rank for rank, place in enumerate(places) if place.is_head] == heads
    assert [places[rank].dp_rank for rank in heads] == [0, 1]
    check_topologies(places)


@pytest.mark.parametrize(("pp_size", "dp_size", "tp_size"), [(2, 3, 4), (1, 5, 2), (3, 1, 1)])
def test_ranks_follow_the_formula_of_their_order(pp_size: int, dp_size: int, tp_size: int) -> None:
    world = pp_size * dp_size * tp_size
    for pp in range(pp_size):
        for dp in range(dp_size):
            for tp in range(tp_size):
                for order, rank in (
                    (PP_DP_TP, pp * (dp_size * tp_size) + dp * tp_size + tp),
                    (DP_PP_TP, dp * (pp_size * tp_size) + pp * tp_size + tp),
                ):
                    place = topology_of(rank, world, tp_size=tp_size, pp_size=pp_size, order=order)
                    assert (place.dp_rank, place.dp_size) == (dp, dp_size)
                    assert place.is_head == (pp == pp_size - 1 and tp == 0)


def test_a_rank_outside_of_whole_replicas_is_refused() -> None:
    for rank, world in ((0, 3), (4, 4)):
        with pytest.raises(ValueError, match=f"rank {rank} of {world} ranks"):
            topology_of(rank, world, tp_size=2)


def test_units_are_dealt_out_in_runs_and_the_rest_one_by_one() -> None:
    assert grouping(6, 3) == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert grouping(7, 3) == {0: [0, 1, 6], 1: [2, 3], 2: [4, 5]}
    assert grouping(8, 3) == {0: [0, 1, 6], 1: [2, 3, 7], 2: [4, 5]}
    assert grouping(2, 3) == {0: [0], 1: [1], 2: []}
