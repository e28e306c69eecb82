"""A run with functions as they are written for slime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_slimes_rollout_function_reward_filter_and_evaluation_train(
    train: Callable[[Any], Any], make_options: Callable[..., Any]
) -> None:
    file = Path(__file__).with_name("slime_functions.py")
    args = make_options(
        rollout_function_path=f"{file}:generate_rollout",
        custom_rm_path=f"{file}:reward_func",
        dynamic_sampling_filter_path=f"{file}:check_not_all_zero",
        num_rollout=2,
    )
    assert train(args).steps == 2
    lines = [json.loads(line) for line in (Path(args.run_dir) / "metrics.jsonl").read_text().splitlines()]
    rollouts = [line for line in lines if line["kind"] == "rollout"]
    assert [line["rollout/num_groups"] for line in rollouts] == [3, 3]
    for line in rollouts:  # what the function leased and did not return is a drop that is seen
        assert line.get("rollout/drop_unreported", 0) == line["rollout/slime_dropped"]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 2]
    for line in evaluations:
        assert line["eval/letters"] >= 0
        assert 0 <= line["eval/letters/truncated"] <= 1
    for line in lines:
        if line["kind"] == "train":
            assert line["train/grad_norm"] > 0
