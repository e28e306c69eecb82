"""Trajectories of turns: rows by the function that makes those of the run's own agents."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from buffer_rl.agents.turns import rows
from buffer_rl_rollout_service.options import require_versions
from buffer_rl_rollout_service.trajectory import Trajectory

FIRST: dict[str, Any] = {"prompt_ids": [5, 6], "output_ids": [7, 1], "log_probs": [-0.5, -0.25]}
NEXT: dict[str, Any] = {
    "prompt_ids": [5, 6, 7, 1, 8],
    "output_ids": [9],
    "log_probs": [-1.0],
    "finish_reason": "length",
}
OTHER: dict[str, Any] = {"prompt_ids": [6], "output_ids": [4], "log_probs": [-2.0]}


def trajectory(*turns: dict[str, Any], **more: Any) -> Trajectory:
    return Trajectory.model_validate({"instance_id": "p", "uid": "0", "reward": 1.0, "turns": list(turns), **more})


def test_the_rows_are_those_of_the_runs_own_agents_in_any_order_and_a_repeated_turn_has_an_ordinal() -> None:
    turns = trajectory(NEXT, FIRST, OTHER, FIRST, weight_version=3).made_turns()
    assert [turn.ordinal for turn in turns] == [0, 0, 0, 1]
    made = rows(turns)
    assert sorted(row.tokens for row in made) == [[5, 6, 7, 1], [5, 6, 7, 1, 8, 9], [6, 4]]
    assert {span.version for row in made for span in row.weight_versions} == {3}
    spans = [{"version": 2, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 2}]
    (row,) = rows(trajectory({**FIRST, "spans": spans}, weight_version=3).made_turns())
    assert [(span.version, span.start, span.end) for span in row.weight_versions] == [(2, 0, 1), (4, 1, 2)]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"turns": [{**FIRST, "log_probs": [-0.5]}]}, "1 log_probs"),
        ({"turns": [{**FIRST, "prompt_ids": []}]}, "prompt_ids"),
        ({"turns": [{**FIRST, "output_ids": [], "log_probs": []}]}, "no turn has output_ids"),
        ({"turns": [{**FIRST, "spans": [{"version": 1, "start": 0, "end": 1}]}]}, "do not tile"),
        ({"turns": [{**FIRST, "version": 1}, OTHER]}, "some tell their versions"),
        ({"turns": [FIRST], "loss_mask": [1, 1]}, "loss_mask belongs to tokens"),
        ({"turns": [FIRST], "tokens": [1, 2]}, "either messages or tokens or turns"),
        ({"turns": []}, "turns"),
    ],
)
def test_turns_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        trajectory(**changes) if "turns" not in changes else Trajectory.model_validate(
            {"instance_id": "p", "uid": "0", "reward": 1.0, **changes}
        )


def test_an_asynchronous_run_needs_the_versions_of_all_turns() -> None:
    for turns, more in (([{**FIRST, "version": 0}], {}), ([FIRST], {"weight_version": 0})):
        require_versions({"items": [{"uid": "0", "instance_id": "p", "turns": turns, **more}]}, where="here")
    with pytest.raises(ValueError, match="does not say which weights"):
        require_versions({"items": [{"uid": "0", "instance_id": "p", "turns": [FIRST]}]}, where="here")
