from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.algo.rewards import normalized
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.checks import notices
from buffer_rl.options.section import compose
from buffer_rl.plan.algorithms import ALGORITHMS, LOSSES


def texts(**options: Any) -> list[str]:
    return notices(compose(CORE_SECTIONS).model_validate({"num_rollout": 3, **options}))


def test_truncated_sampling_in_training_is_told_once_with_the_flags_that_do_it() -> None:
    (text,) = texts(rollout_top_p=0.9, rollout_min_p=0.1)
    assert text.startswith("--rollout-top-p 0.9, --rollout-min-p 0.1: ")
    assert "biased" in text
    assert "--replay-kept-tokens" in text
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
        {"rollout_top_p": 0.9, "replay_kept_tokens": True},
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


def test_a_rollout_without_chance_is_told_where_its_equal_samples_teach_nothing() -> None:
    (text,) = texts(rollout_temperature=0.0)
    assert text.startswith("--rollout-temperature 0: ")
    quiet: list[dict[str, Any]] = [
        {"eval_temperature": 0.0},
        {"rollout_temperature": 0.0, "advantage_estimator": "reinforce_plus_plus"},
        {"rollout_temperature": 0.0, "num_rollout": 0},
        {"rollout_temperature": 0.0, "custom_generate_function_path": "mine:generate"},  # which may use a tool
    ]
    assert [texts(**options) for options in quiet] == [[]] * len(quiet)


OF_THE_GROUP = ["grpo", "dr_grpo", "rloo", "pass_at_k", "gpg", "reinforce_plus_plus_baseline", "gspo", "cispo"]


@pytest.mark.parametrize("estimator", OF_THE_GROUP)
def test_groups_of_one_sample_are_told_where_their_advantages_are_0(estimator: str) -> None:
    for loss in (None, *(LOSSES.keys() - {"sft_loss"})):
        (text,) = texts(n_samples_per_prompt=1, advantage_estimator=estimator, loss_type=loss)
        assert text.startswith("--n-samples-per-prompt 1: ")
    assert normalized(ALGORITHMS[estimator].rewards, np.array([3.0]), k=1).tolist() == [0.0]


@pytest.mark.parametrize(
    "options",
    [
        {"custom_reward_post_process_path": "mine:centred"},
        {"custom_convert_samples_to_train_data_path": "mine:columns"},
        {"custom_advantage_function_path": "mine:advantages"},
        {"advantage_estimator": "mine:advantages"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "remax"},
        {"advantage_estimator": "gae"},
        {"disable_rewards_normalization": True},
        {"custom_loss_function_path": "mine:loss"},
        {"rollout_function_path": "mine:rollout"},
        {"loss_type": "sft_loss"},
        {"loss_type": "mine:loss"},
        {"num_rollout": 0},
        {"debug_rollout_only": True},
        {"load_debug_rollout_data": "rows_{rollout_id}.safetensors"},
    ],
)
def test_groups_of_one_sample_are_no_matter_where_something_else_makes_the_advantages(options: dict[str, Any]) -> None:
    assert texts(n_samples_per_prompt=1, **options) == []


def test_multimodal_fields_that_the_engine_never_gets_are_told() -> None:
    keys = {"image": "images"}
    for more in ({}, {"num_rollout": 0}, {"debug_rollout_only": True}):
        (text,) = texts(multimodal_keys=keys, **more)
        assert text.startswith("--multimodal-keys image: the built-in generate function")
    assert texts(multimodal_keys=keys, custom_generate_function_path="mine:generate") == []
    assert texts(multimodal_keys=keys, num_rollout=0, eval_function_path="mine:evaluate") == []
    assert texts(multimodal_keys=keys, rollout_function_path="mine:rollout") == []
    assert texts(multimodal_keys=keys, load_debug_rollout_data="rows_{rollout_id}.safetensors") == []


def test_relative_folders_in_the_copy_that_ray_makes_of_a_jobs_working_folder_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert texts(save="ck") == []
    copy = tmp_path / "working_dir_files" / "_ray_pkg_aa8f81ea65607a82"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    (text,) = texts(save="ck")
    assert text.startswith("--run-dir and --save: a relative path lies in Ray's copy")
    (text,) = texts(save="s3://bucket/ck")
    assert text.startswith("--run-dir: ")
    assert texts(run_dir="/runs/a", save="/ck") == texts(run_dir="/runs/a") == []
