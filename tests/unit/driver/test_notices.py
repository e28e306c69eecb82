from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.config import compose
from buffer_rl.driver.notices import notices
from buffer_rl.options import CORE_SECTIONS


def texts(**options: Any) -> list[str]:
    return notices(compose(CORE_SECTIONS).model_validate({"num_rollout": 3, **options}))


def test_truncated_sampling_in_training_is_told_once_with_the_flags_that_do_it() -> None:
    (text,) = texts(rollout_top_p=0.9, rollout_min_p=0.1)
    assert text.startswith("--rollout-top-p 0.9, --rollout-min-p 0.1: ")
    assert "biased" in text
    (text,) = texts(rollout_top_k=20)
    assert text.startswith("--rollout-top-k 20: ")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_top_p": 0.9, "eval_top_k": 5, "eval_min_p": 0.1},
        {"rollout_top_p": 0.9, "loss_type": "sft_loss"},
        {"rollout_top_p": 0.9, "debug_rollout_only": True},
        {"rollout_top_p": 0.9, "num_rollout": 0},
    ],
)
def test_nothing_is_told_where_no_gradient_is_touched(options: dict[str, Any]) -> None:
    assert texts(**options) == []


@pytest.mark.parametrize("flag", ["--rollout-sample-filter-path", "--rollout-all-samples-process-path"])
def test_what_holds_every_group_back_is_told_where_it_costs_the_overlap(flag: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    (text,) = texts(schedule="pipelined", **{name: "mine:function"})
    assert text.startswith("--schedule pipelined overlaps nothing with generation here: ")
    assert flag in text
    assert texts(**{name: "mine:function"}) == []
