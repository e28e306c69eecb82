"""What runs that train on tokens of older weights refuse, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.checks import check_options, notices
from buffer_rl.options.section import compose
from buffer_rl.plan.algorithms import LOSSES
from buffer_rl.plan.schedule import idle_workers_text, workers_per_ticket

GOOD: dict[str, Any] = {
    "hf_checkpoint": "model",
    "prompt_data": "train.jsonl",
    "num_rollout": 3,
    "rm_type": "exact_match",
    "schedule": "async",
    "use_tis": True,
}
PLAIN: dict[str, Any] = {"use_tis": False}
ONE_STEP_OFF: dict[str, Any] = {"schedule": "one-step-off"}
WITH_REFERENCE: dict[str, Any] = {"use_kl_loss": True}
TRAIN_ONLY: dict[str, Any] = {"load_debug_rollout_data": "rows_{rollout_id}.safetensors", **PLAIN}
RATIO_LOSSES = [name for name in LOSSES if name not in ("sft_loss", "dpo", "decoupled_ppo")]


def args_of(**changes: Any) -> Any:
    return compose(CORE_SECTIONS).model_validate({**GOOD, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        ONE_STEP_OFF,
        {**ONE_STEP_OFF, "deterministic": True},
        {"num_actor_fwd_workers": 1},
        {"over_sampling_batch_size": 32, "rollout_batch_size": 32},
        {**PLAIN, "loss_type": "decoupled_ppo"},
        {**PLAIN, "use_rollout_logprobs": True},
        {**PLAIN, "allow_uncorrected": True},
        {**PLAIN, "loss_type": "sft_loss", "rm_type": None},
        {**PLAIN, "loss_type": "dpo", **WITH_REFERENCE},
        {**PLAIN, "custom_loss_function_path": "mine:loss"},
        {**PLAIN, "debug_rollout_only": True},
        {**PLAIN, "num_rollout": 0},
        {**TRAIN_ONLY, "deterministic": True},
        {**PLAIN, "max_staleness": 0, "deterministic": True, "over_sampling_batch_size": 64},
    ],
)
def test_what_goes_with_older_weights_or_with_none_is_accepted(changes: dict[str, Any]) -> None:
    check_options(args_of(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partial_rollout": True}, ["continue by themselves", "--partial-rollout", "take --partial-rollout out"]),
        ({"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}, ["continue by themselves"]),
        ({"partial_rollout": True, **ONE_STEP_OFF}, ["continue by themselves", "--schedule one-step-off"]),
        (
            {"over_sampling_batch_size": 9, "rollout_batch_size": 8, "max_staleness": 4},
            ["16 more groups", "--over-sampling-batch-size", "at most --rollout-batch-size 8", "--target-staleness"],
        ),
        ({"deterministic": True}, ["--deterministic", "--schedule one-step-off", "how long"]),
        ({"schedule": "pipelined", "max_staleness": 1}, ["--max-staleness: --schedule pipelined", "exactly 0"]),
        ({**ONE_STEP_OFF, "max_staleness": 2}, ["--max-staleness: --schedule one-step-off", "exactly 1"]),
        ({"target_staleness": 0}, ["--target-staleness: 0 does not go with --schedule async", "from 1 to"]),
        ({"offload_train": True}, ["--offload-train", "--schedule lockstep"]),
        ({"offload_rollout": True, **ONE_STEP_OFF}, ["--offload-rollout", "--schedule lockstep"]),
    ],
)
def test_what_does_not_go_with_older_weights_is_named_with_what_to_take_instead(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(args_of(**changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sharing"),
    [
        ({}, 3),
        ({"over_sampling_batch_size": 8}, 3),
        ({"over_sampling_batch_size": 9}, 1),
        ({"rollout_sample_filter_path": "m:f"}, 1),
        ({"rollout_all_samples_process_path": "m:f"}, 1),
        ({"custom_rollout_log_function_path": "m:f"}, 1),
        ({"buffer_filter_path": "m:f"}, 1),
    ],
)
def test_rollout_workers_share_a_ticket_unless_something_must_see_all_of_its_groups(
    changes: dict[str, Any], sharing: int
) -> None:
    args = args_of(num_rollout_workers=3, rollout_batch_size=8, schedule="lockstep", **changes)
    assert workers_per_ticket(args, concurrent=True) == sharing
    assert workers_per_ticket(args, concurrent=False) == 1
    assert ("2 of them stay idle" in idle_workers_text(args, sharing)) is (sharing == 1)
    # Two tickets run at once: the next one opens a version early.
    assert "1 of them stay idle" in idle_workers_text(args_of(num_rollout_workers=3, target_staleness=1), 1)


@pytest.mark.parametrize("loss", RATIO_LOSSES)
@pytest.mark.parametrize(("schedule", "steps"), [(ONE_STEP_OFF, "1 step older"), ({"max_staleness": 3}, "3 steps old")])
def test_a_ratio_loss_without_a_correction_is_refused(loss: str, schedule: dict[str, Any], steps: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(args_of(**PLAIN, **schedule, loss_type=loss))
    message = str(caught.value)
    for word in (steps, loss, "decoupled_ppo", "--use-tis", "--use-rollout-logprobs", "--allow-uncorrected"):
        assert word in message
    check_options(args_of(**schedule, loss_type=loss))


def test_the_loss_of_an_algorithm_is_looked_at_where_none_is_named() -> None:
    with pytest.raises(ConfigError, match="cispo"):
        check_options(args_of(**PLAIN, advantage_estimator="cispo"))


def test_several_optimizer_steps_and_a_loss_of_ones_own_are_worth_a_notice() -> None:
    assert notices(args_of()) == []
    (steps,) = notices(args_of(num_steps_per_rollout=2, num_passes_per_rollout=2))
    assert "4 optimizer steps a rollout" in steps
    assert "by up to 3 more steps" in steps
    (own,) = notices(args_of(**PLAIN, custom_loss_function_path="mine:loss"))
    assert "the loss mine:loss" in own
    assert notices(args_of(custom_loss_function_path="mine:loss")) == []
    assert notices(args_of(**PLAIN, custom_loss_function_path="mine:loss", max_staleness=0)) == []


def test_functions_that_see_a_whole_rollout_are_told_that_they_see_a_ticket() -> None:
    sees, alone = notices(args_of(rollout_function_path="mine:rollout", rollout_all_samples_process_path="mine:all"))
    assert "--rollout-function-path and --rollout-all-samples-process-path sees is a ticket, and rollout_id" in sees
    assert (
        "--rollout-function-path mine:rollout for one ticket at a time, unless it declares concurrent = True" in alone
    )
    (logs,) = notices(args_of(custom_rollout_log_function_path="mine:log"))
    assert "what --custom-rollout-log-function-path sees is a ticket" in logs
    assert notices(args_of(rollout_function_path="buffer_rl.rollout.sft:SFTRollout", loss_type="sft_loss")) == []
    assert notices(args_of(rollout_function_path="mine:rollout", **ONE_STEP_OFF)) == []  # its steps train on tickets
