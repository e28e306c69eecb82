"""Places of ranks, routes of rows to them, and numbered units dealt out to groups."""

from __future__ import annotations

import pytest

from buffer_rl.plan.layout import (
    PP_DP_TP,
    Axis,
    Layout,
    grouping,
    layout_of,
)
from buffer_rl.trainer.peers import check_topologies

FOR_INFERENCE: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")
# (pp, dp, tp) of ranks 0, 1, 2, …
COORDINATES: dict[str, tuple[Layout, list[tuple[int, int, int]]]] = {
    "DP2": (Layout(dp_size=2), [(0, 0, 0), (0, 1, 0)]),
    "DP2 x TP2": (Layout(dp_size=2, tp_size=2), [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]),
    "DP2 x TP2 x PP2": (
        Layout(dp_size=2, tp_size=2, pp_size=2),
        [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)],
    ),
    "DP2 x TP2 x PP2 for inference": (
        Layout(dp_size=2, tp_size=2, pp_size=2, order=FOR_INFERENCE),
        [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)],
    ),
}
HEADS = {"DP2": [0, 1], "DP2 x TP2": [0, 2], "DP2 x TP2 x PP2": [4, 6], "DP2 x TP2 x PP2 for inference": [2, 6]}
SHARDS = {
    "DP2": [0, 1],
    "DP2 x TP2": [0, 0, 1, 1],
    "DP2 x TP2 x PP2": [0, 0, 1, 1, 0, 0, 1, 1],
    "DP2 x TP2 x PP2 for inference": [0, 0, 0, 0, 1, 1, 1, 1],
}


@pytest.mark.parametrize("name", COORDINATES)
def test_each_rank_has_its_coordinates_and_each_shard_its_ranks_and_its_head(name: str) -> None:
    layout, table = COORDINATES[name]
    assert layout.world_size == len(table)
    found = [layout.coordinates(rank) for rank in range(len(table))]
    assert [(at["pp"], at["dp"], at["tp"]) for at in found] == table
    assert [layout.rank(at) for at in found] == list(range(len(table)))
    places = [layout.topology(rank) for rank in range(len(table))]
    assert [rank for rank, place in enumerate(places) if place.is_head] == HEADS[name]
    assert [place.dp_rank for place in places] == SHARDS[name]
    assert [places[rank].dp_rank for rank in HEADS[name]] == [0, 1]
    assert {(place.in_step, place.share) for place in places} == {(False, None)}
    check_topologies(places)


@pytest.mark.parametrize(("pp_size", "dp_size", "tp_size"), [(2, 3, 4), (1, 5, 2), (3, 1, 1)])
def test_ranks_follow_the_formula_of_their_order(pp_size: int, dp_size: int, tp_size: int) -> None:
    for pp in range(pp_size):
        for dp in range(dp_size):
            for tp in range(tp_size):
                for order, rank in (
                    (PP_DP_TP, pp * (dp_size * tp_size) + dp * tp_size + tp),
                    (FOR_INFERENCE, dp * (pp_size * tp_size) + pp * tp_size + tp),
                ):
                    place = Layout(dp_size=dp_size, tp_size=tp_size, pp_size=pp_size, order=order).topology(rank)
                    assert (place.dp_rank, place.dp_size) == (dp, dp_size)
                    assert place.is_head == (pp == pp_size - 1 and tp == 0)


def test_of_context_ranks_the_first_is_the_head_and_all_get_the_rows() -> None:
    layout = layout_of(8, tp_size=2, cp_size=2)
    order: tuple[Axis, ...] = ("dp", "cp", "tp")
    found = [tuple(layout.coordinates(rank)[axis] for axis in order) for rank in range(8)]
    assert found == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert [rank for rank in range(8) if layout.is_head(rank)] == [0, 4]
    assert [layout.topology(rank).dp_rank for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_actor_and_critic_on_the_same_workers() -> None:
    """Rank by rank: of each worker the shard that each role has there, and whether it is the head of it."""
    roles = {"actor": Layout(dp_size=2, tp_size=2), "critic": Layout(dp_size=2, pp_size=2)}
    places = {role: [layout.topology(rank) for rank in range(4)] for role, layout in roles.items()}
    table = [{role: (own[rank].dp_rank, own[rank].is_head) for role, own in places.items()} for rank in range(4)]
    assert table == [
        {"actor": (0, True), "critic": (0, False)},
        {"actor": (0, False), "critic": (1, False)},
        {"actor": (1, True), "critic": (0, True)},
        {"actor": (1, False), "critic": (1, True)},
    ]


def test_a_rank_outside_of_whole_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks, in replicas of 2"):
        layout_of(3, tp_size=2).topology(0)
    with pytest.raises(ValueError, match="rank 4 of 4 ranks"):
        layout_of(4, tp_size=2).topology(4)


def test_units_are_dealt_out_in_runs_and_the_rest_one_by_one() -> None:
    assert grouping(6, 3) == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert grouping(7, 3) == {0: [0, 1, 6], 1: [2, 3], 2: [4, 5]}
    assert grouping(8, 3) == {0: [0, 1, 6], 1: [2, 3, 7], 2: [4, 5]}
    assert grouping(2, 3) == {0: [0], 1: [1], 2: []}
