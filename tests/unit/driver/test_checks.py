from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.checks import check_options
from buffer_rl.options.section import compose
from buffer_rl.plan.algorithms import LOSSES
from buffer_rl.plan.schedule import EarlyStop, parse_early_stop
from buffer_rl.weights.options import engines_may_differ

GOOD: dict[str, Any] = {
    "hf_checkpoint": "model",
    "prompt_data": "train.jsonl",
    "num_rollout": 3,
    "rm_type": "exact_match",
    "eval_prompt_data": ["dev=dev.jsonl"],
    "eval_interval": 2,
    "early_stop": "eval/dev>=0.25",
    "save": "checkpoints",
    "save_interval": 1,
}
KL_IN_REWARDS: dict[str, Any] = {"kl_coef": 0.01, "advantage_estimator": "remax"}
RECORDED = "rows_{rollout_id}.safetensors"
TRAIN_ONLY: dict[str, Any] = {"load_debug_rollout_data": RECORDED, "early_stop": None}
ROLLOUT_ONLY: dict[str, Any] = {"debug_rollout_only": True, "save": None, "save_interval": None}
TEACHER_ALONE: dict[str, Any] = {
    "use_opd": True,
    "opd_teacher_load": "teacher",
    "rm_type": None,
    "eval_prompt_data": [],
    "eval_interval": None,
    "early_stop": None,
}
STREAM: dict[str, Any] = {"stream_gradients": True, "schedule": "pipelined"}


def check(**changes: Any) -> None:
    check_options(compose(CORE_SECTIONS).model_validate({**GOOD, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_rollout": None, "num_epoch": 1},
        {"num_rollout": 0},
        {"offload_train": True, "offload_rollout": True},
        {"offload_train": True, "rollout_external_engine_addrs": ["b:1"]},
        {"offload_train": True, "offload_rollout": True, **TRAIN_ONLY},
        {"prompt_data": None, "data_source_path": "mine:Source"},
        {"prompt_data_weights": [1.0, 2.0], "data_source_path": "mine:Source"},
        {"custom_rm_path": "my_reward:score"},
        {"rm_type": None, "custom_rm_path": "my_reward:score"},
        {"rm_type": None, "rm_model": "classifier", "num_reward_workers": 2},
        {"rm_type": None, "loss_type": "sft_loss"},
        {"rm_type": None, "rollout_function_path": "mine:rollout"},
        {"early_stop": "eval/dev/length < 10"},
        {"early_stop": None, "eval_interval": None, "eval_prompt_data": []},
        {"save_interval": None},
        {"keep_last": 1, "keep_best": "-eval/dev/length"},
        {"rollout_top_k": 1, "eval_top_k": -1},
        {"eps_clip": 1.0, "eps_clip_high": 4.0, "loss_type": "cispo"},  # no lower bound
        {"use_kl_loss": True, "kl_loss_coef": 0.01},
        {"replay_kept_tokens": True, "rollout_top_p": 0.9},
        {"replay_routed_experts": True},
        {"replay_routed_experts": True, "schedule": "one-step-off", "use_tis": True},
        {"replay_routed_experts": True, "schedule": "async", "use_tis": True, "publication": "drain"},
        {"replay_routed_experts": True, "replay_recomputed_experts": True, "schedule": "async", "use_tis": True},
        {"use_kl_loss": True, "kl_loss_coef": 0.0},
        {"kl_loss_coef": 0.01, "custom_loss_function_path": "mine:loss"},
        {"kl_loss_coef": 0.01, "custom_advantage_function_path": "mine:advantages"},
        {"kl_loss_coef": 0.01, "advantage_estimator": "registered"},
        {"kl_loss_coef": 0.01, "loss_type": "sft_loss"},
        {"kl_loss_coef": 0.01, "loss_type": "registered"},
        {"kl_loss_coef": 0.01, "num_rollout": 0},
        {"kl_coef": 0.01, "gamma": 0.9, "advantage_estimator": "reinforce_plus_plus", "num_ref_workers": 1},
        {"kl_coef": 0.01, "lambd": 0.9, "custom_advantage_function_path": "mine:advantages"},
        {"advantage_estimator": "ppo", "critic_lr": 1e-5, "num_critic_only_steps": 2},
        {"advantage_estimator": "gae", "use_critic": True, "value_clip": None},
        {"custom_advantage_function_path": "mine:advantages", "use_critic": True},
        {**STREAM, "advantage_estimator": "ppo", "kl_coef": 0.1, "num_ref_workers": 1},
        {"advantage_estimator": "pass_at_k", "pass_at_k": 4, "n_samples_per_prompt": 5, "normalize_advantages": True},
        {"overlong_buffer_len": 8, "rollout_max_response_len": 8, "disable_rewards_normalization": True},
        {"length_penalty": 0.5, "reward_clip": [2.0], "reward_scale": 0.1},
        {"reward_clip": [-3.0, -1.0]},
        {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_target": 0.1, "num_advantage_workers": 1},
        {**KL_IN_REWARDS, "kl_target": 0.1, "use_kl_loss": True},
        {**KL_IN_REWARDS, "kl_target": 0.1, "kl_horizon": 7.0, "rollout_batch_size": 3, "n_samples_per_prompt": 11},
        {"kl_loss_coef": 0.01, **ROLLOUT_ONLY},
        {"use_opd": True, "opd_teacher_load": "teacher", "num_teacher_workers": 1, "opd_kl_coef": 0.5},
        TEACHER_ALONE,
        {"use_opd": True, "custom_rm_path": "mine:asks_the_teacher"},
        {**STREAM, "num_ref_workers": 2, "use_kl_loss": True, "num_advantage_workers": 1},
        {**STREAM, "rollout_batch_size": 2, "over_sampling_batch_size": 4},
        {**STREAM, "partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
        {"schedule": "pipelined", "num_steps_per_rollout": 2, "rollout_sample_filter_path": "mine:filter"},
    ],
)
def test_options_that_go_together_pass(changes: dict[str, Any]) -> None:
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hf_checkpoint": None}, ["--hf-checkpoint"]),
        ({"prompt_data": None}, ["--prompt-data", "--data-source-path"]),
        ({"num_rollout": None}, ["--num-rollout", "--num-epoch"]),
        ({"rm_type": None}, ["--rm-type", "--custom-rm-path", "--rm-model"]),
        ({"num_reward_workers": 2}, ["--num-reward-workers: there is no reward model"]),
        ({"rm_servers": ["http://127.0.0.1/x?token=abc"]}, ["is no server with a name", "token=***"]),
        ({"eval_prompt_data": [], "early_stop": None}, ["--eval-interval", "--eval-prompt-data"]),
        ({"eval_prompt_data": ["dev"]}, ["'dev' is no evaluation set"]),
        ({"early_stop": "eval/dev=>1"}, ["--early-stop", "'eval/dev=>1'"]),
        ({"early_stop": "eval/dve>=1"}, ["'eval/dve'", "did you mean eval/dev?"]),
        ({"save": None, "save_interval": None, "keep_last": 1}, ["--keep-last", "--save", "add --save PATH"]),
        ({"save": "s", "keep_best": "eval/dev"}, ["--keep-best", "add --keep-last N"]),
        ({"save": "s", "keep_last": 1, "keep_best": "-eval/dve"}, ["--keep-best", "'eval/dve'", "eval/dev"]),
        ({"early_stop": "eval/development>=1"}, ["is of no evaluation set"]),
        ({"early_stop": "dev>=1"}, ["is of no evaluation set"]),
        ({"eval_interval": None}, ["--early-stop", "--eval-interval"]),
        ({"save": None}, ["--save-interval", "--save PATH"]),
        ({"save": None, "save_interval": None, "async_save": True}, ["--async-save", "--save PATH"]),
        ({"rollout_batch_size": 4, "over_sampling_batch_size": 3}, ["3 groups in flight", "at least 4"]),
        (
            {"mask_offpolicy_in_partial_rollout": True},
            ["nothing reads it without --partial-rollout", "add --partial-rollout"],
        ),
        ({"num_ref_workers": 1}, ["--num-ref-workers: no reference log-probabilities", "add --use-kl-loss"]),
        ({"num_teacher_workers": 1}, ["--num-teacher-workers: no teacher's log-probabilities"]),
        ({"use_opd": True, "rm_type": None, "opd_teacher_load": "teacher"}, ["--rm-type"]),  # of an evaluation
        ({"use_opd": True}, ["--use-opd: there is no teacher", "sets teacher_log_probs"]),
        ({"use_opd": True, "opd_teacher_load": "teacher", "loss_type": "dpo"}, ["--use-opd: dpo reads no advantages"]),
        ({"opd_teacher_load": "teacher"}, ["--opd-teacher-load: nothing reads it", "add --use-opd"]),
        ({"opd_kl_coef": 0.5}, ["--opd-kl-coef: nothing reads it"]),
        ({"custom_tis_function_path": "m:w"}, ["--custom-tis-function-path: nothing reads it", "add --use-tis"]),
        ({"num_advantage_workers": 1, "loss_type": "sft_loss"}, ["--num-advantage-workers: ", "has no advantages"]),
        ({"stream_gradients": True}, ["--stream-gradients: --schedule lockstep", "add --schedule pipelined"]),
        ({**STREAM, "num_steps_per_rollout": 2}, ["--stream-gradients and --num-steps-per-rollout: 2 optimizer steps"]),
        ({**STREAM, "num_passes_per_rollout": 3}, ["--stream-gradients and --num-passes-per-rollout: 3 optimizer"]),
        (
            {**STREAM, "rollout_sample_filter_path": "mine:filter"},
            ["--stream-gradients and --rollout-sample-filter-path: a sample filter sees the whole rollout"],
        ),
        (
            {**STREAM, "rollout_all_samples_process_path": "mine:process"},
            ["--stream-gradients and --rollout-all-samples-process-path: this function sees the whole rollout"],
        ),
        (
            {"offload_train": True, "schedule": "pipelined"},
            ["--offload-train and --schedule pipelined: engines generate while", "--schedule lockstep, or"],
        ),
        ({"offload_rollout": True, "schedule": "pipelined"}, ["--offload-rollout and --schedule pipelined"]),
        (
            {"offload_rollout": True, "router_url": "http://a", "engine_urls": ["http://b"]},
            ["--offload-rollout and --router-url: the run does not start these engines", "--offload-train alone goes"],
        ),
        (
            {"offload_rollout": True, "rollout_external_engine_addrs": ["b:1"]},
            ["--offload-rollout and --rollout-external-engine-addrs"],
        ),
        ({"rollout_top_k": 0}, ["--rollout-top-k: top_k is 0", "-1 for all tokens", "hint: write -1"]),
        (
            {"replay_routed_experts": True, "schedule": "async", "use_tis": True},
            ["--replay-routed-experts and --schedule async: a publication retracts", "add --publication drain, or"],
        ),
        (
            {"replay_recomputed_experts": True},
            ["--replay-recomputed-experts: nothing reads it", "add --replay-routed-experts"],
        ),
        (
            {"replay_routed_experts": True, "loss_type": "sft_loss", "rm_type": None},
            ["--replay-routed-experts: no engine computes the tokens of supervised fine-tuning"],
        ),
        ({"replay_kept_tokens": True}, ["--replay-kept-tokens: no tokens are cut off", "--rollout-top-p"]),
        (
            {"prompt_order": "difficulty", "data_source_path": "m:S", "prompt_data": None},
            ["--prompt-order difficulty: it does not go with --data-source-path", "a data source of your own"],
        ),
        (
            {"prompt_order": "difficulty", "debug_rollout_only": True, "save": None, "save_interval": None},
            ["--prompt-order difficulty: it does not go with --debug-rollout-only"],
        ),
        (
            {"prompt_order": "difficulty", "difficulty_weights": "hard:1"},
            ["--difficulty-weights: 'hard' is no pool", "such as 0:0.2,mid:1,1:0.1,unseen:1"],
        ),
        ({"difficulty_weights": "0:1,1:1"}, ["--difficulty-weights: --prompt-order epoch has no pools", "add"]),
        (
            {"replay_kept_tokens": True, "rollout_min_p": 0.1, "rollout_temperature": 0.0},
            ["--replay-kept-tokens: no tokens are cut off", "a temperature above 0"],
        ),
        ({"eval_top_k": 0}, ["--eval-top-k: top_k is 0"]),
        ({"rollout_stop_token_ids": [3, -1]}, ["--rollout-stop-token-ids: -1 is no token id"]),
        ({"kl_loss_coef": 0.01}, ["--kl-loss-coef: the loss has no KL penalty that 0.01", "add --use-kl-loss"]),
        ({"kl_loss_coef": 0.01, **TRAIN_ONLY}, ["--kl-loss-coef"]),
        ({"kl_loss_coef": 0.01, "advantage_estimator": "rloo"}, ["--kl-loss-coef"]),
        *(
            ({"kl_loss_coef": 0.01, "loss_type": loss}, ["--kl-loss-coef"])
            for loss in sorted(LOSSES.keys() - {"sft_loss"})
        ),
        (
            {"kl_coef": 0.01},
            ["--kl-coef: the advantage 'grpo' does not read it", "remax, gae", "add --use-kl-loss --kl-loss-coef"],
        ),
        ({"use_critic": True}, ["--use-critic and --advantage-estimator: the advantage 'grpo' reads no values"]),
        ({"critic_lr": 0.1}, ["--critic-lr: there is no critic", "add --advantage-estimator ppo, or --use-critic"]),
        (
            {"advantage_estimator": "ppo", "loss_type": "sft_loss", "value_clip": 0.5},
            ["--value-clip: the supervised loss has no critic"],
        ),
        (
            {**STREAM, "advantage_estimator": "ppo", "num_advantage_workers": 1},
            ["--stream-gradients and --num-advantage-workers: the critic computes the advantages"],
        ),
        (
            {**STREAM, "advantage_estimator": "ppo", "kl_coef": 0.1},
            [
                "--stream-gradients and --kl-coef: the critic needs log-probabilities of the model 'ref'",
                "--num-ref-workers 1",
            ],
        ),
        ({"gamma": 0.9, "advantage_estimator": "remax"}, ["--gamma", "reinforce_plus_plus, gae", "take it out"]),
        (
            {"advantage_estimator": "pass_at_k", "pass_at_k": 4, "n_samples_per_prompt": 4},
            ["--pass-at-k: the best of 4 is the same for all of 4 samples"],
        ),
        ({"overlong_buffer_len": 9, "rollout_max_response_len": 8}, ["--overlong-buffer-len: a buffer of 9"]),
        (
            {"overlong_buffer_len": 9, "custom_reward_post_process_path": "mine:fn"},
            ["--overlong-buffer-len: mine:fn makes the rewards to train on"],
        ),
        ({"reward_clip": [-2.0]}, ["--reward-clip: no reward is between 2 and -2", "one number above 0"]),
        ({"reward_clip": [1.0, 1.0]}, ["--reward-clip: no reward is between 1 and 1"]),
        ({"reward_clip": [1.0, 2.0, 3.0]}, ["no reward is between 1 and 2 and 3", "a lower and a higher one"]),
        *(
            (
                {**shaping, "custom_convert_samples_to_train_data_path": "mine:fn"},
                [f"{flag}: mine:fn makes the rewards"],
            )
            for flag, shaping in (
                ("--reward-clip", {"reward_clip": [1.0]}),
                ("--reward-scale", {"reward_scale": 0.5}),
                ("--length-penalty", {"length_penalty": 0.5}),
            )
        ),
        (
            {**STREAM, **KL_IN_REWARDS, "advantage_estimator": "ppo", "num_ref_workers": 1, "kl_target": 0.1},
            ["--kl-target and --stream-gradients: only the policy's trainer knows"],
        ),
        ({"loss_type": "sft_loss", "length_penalty": 0.5}, ["--length-penalty: the supervised loss reads no rewards"]),
        ({"kl_target": 0.1}, ["--kl-target: there is no KL coefficient", "add --use-kl-loss --kl-loss-coef C"]),
        ({"kl_target": 0.1, "use_kl_loss": True}, ["--kl-target: there is no KL coefficient"]),
        (
            {"kl_target": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1, "loss_type": "sft_loss"},
            ["--kl-target: there is no KL coefficient"],
        ),
        (
            {**KL_IN_REWARDS, "kl_target": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1},
            ["--kl-target, --kl-coef and --kl-loss-coef: there are two KL coefficients"],
        ),
        (
            {**KL_IN_REWARDS, "kl_target": 0.1, "num_advantage_workers": 1},
            ["--kl-target and --num-advantage-workers: only the trainer", "take --num-advantage-workers out"],
        ),
        (
            {
                **KL_IN_REWARDS,
                "kl_target": 0.1,
                "kl_horizon": 0.2 * 33,
                "rollout_batch_size": 3,
                "n_samples_per_prompt": 11,
            },
            ["--kl-horizon: the KL coefficient would be multiplied by 0 if", "more than 6.6"],
        ),
        ({"partial_rollout": True}, ["--partial-rollout: ", "older weights", "--mask-offpolicy-in-partial-rollout"]),
    ],
)
def test_options_that_contradict_each_other_are_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**changes)
    for word in words:
        assert word in str(caught.value)


def test_a_set_of_the_evaluation_file_with_a_top_k_of_0_is_named(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text("eval:\n  datasets:\n  - {name: hard, path: hard.jsonl, top_k: 0}\n")
    with pytest.raises(ConfigError, match=r"eval\.yaml, the set 'hard': top_k is 0"):
        check(eval_config=str(file))


def test_over_sampled_and_masked_partial_rollouts_are_accepted() -> None:
    check(
        rollout_batch_size=4,
        over_sampling_batch_size=4,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
    )


@pytest.mark.parametrize(
    ("text", "metric", "op", "value"),
    [
        ("eval/dev>=0.25", "eval/dev", ">=", 0.25),
        (" eval/dev-2.x/length < -1e3 ", "eval/dev-2.x/length", "<", -1000.0),
        ("a>.5", "a", ">", 0.5),
        ("a<=5.", "a", "<=", 5.0),
    ],
)
def test_conditions_are_read(text: str, metric: str, op: str, value: float) -> None:
    assert parse_early_stop(text) == EarlyStop(metric=metric, op=op, value=value)


@pytest.mark.parametrize("text", ["", "eval/dev", ">=1", "a>=", "a>=b", "a==1", "a>=1 and b>=2", "a>=nan", "a>=."])
def test_other_texts_are_no_conditions(text: str) -> None:
    with pytest.raises(ConfigError, match="--early-stop"):
        parse_early_stop(text)


@pytest.mark.parametrize(("op", "met_by"), [(">=", {0.5, 0.6}), (">", {0.6}), ("<=", {0.4, 0.5}), ("<", {0.4})])
def test_a_condition_is_met_by_its_own_metric_alone(op: str, met_by: set[float]) -> None:
    stop = EarlyStop(metric="m", op=op, value=0.5)
    assert {value for value in (0.4, 0.5, 0.6) if stop.met({"m": value})} == met_by
    assert not stop.met({"other": 0.5})
    assert not stop.met({"m": float("nan")})


@pytest.mark.parametrize(
    "changes",
    [
        {**TRAIN_ONLY, "prompt_data": [], "rm_type": None},
        {**TRAIN_ONLY, "debug_train_only": True},
        {**ROLLOUT_ONLY, "save_debug_rollout_data": RECORDED},
        {"num_steps_per_rollout": 4, "rollout_batch_size": 4},
        {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 3, "lr": 1e-3, "min_lr": 1e-3},
    ],
)
def test_half_runs_and_decays_that_fit_are_accepted(changes: dict[str, Any]) -> None:
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"save_debug_rollout_data": "rows"}, "--save-debug-rollout-data"),
        ({**TRAIN_ONLY, "load_debug_rollout_data": "rows"}, "--load-debug-rollout-data"),
        ({"debug_train_only": True}, "no rollouts to train on"),
        ({**TRAIN_ONLY, **ROLLOUT_ONLY}, "nothing is left"),
        ({**TRAIN_ONLY, "prompt_data": [], "num_rollout": None, "num_epoch": 1}, "--num-rollout"),
        ({**TRAIN_ONLY, "early_stop": "eval/dev>=0.25"}, "--early-stop"),
        ({**TRAIN_ONLY, "save_debug_rollout_data": RECORDED}, "--save-debug-rollout-data"),
        ({**ROLLOUT_ONLY, "save": "folder"}, "--debug-rollout-only and --save"),
        ({**ROLLOUT_ONLY, "load": "folder"}, "--debug-rollout-only and --load"),
        ({"num_steps_per_rollout": 5, "rollout_batch_size": 4}, "--num-steps-per-rollout"),
        ({"lr_decay_style": "linear", "lr": 1e-6, "min_lr": 1e-5}, "--min-lr"),
        ({"lr_decay_style": "linear", "lr_warmup_iters": 5, "lr_decay_iters": 5}, "--lr-decay-iters"),
        (
            {"advantage_estimator": "ppo", "lr_decay_style": "linear", "lr": 1, "min_lr": 0.1, "critic_lr": 0.01},
            "--critic-lr and --min-lr",
        ),
        (
            {
                "advantage_estimator": "ppo",
                "lr_decay_style": "linear",
                "lr_decay_iters": 5,
                "critic_lr_warmup_iters": 5,
            },
            "--lr-decay-iters and --critic-lr-warmup-iters",
        ),
    ],
)
def test_half_runs_and_decays_that_do_not_fit_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(**changes)


@pytest.mark.parametrize(
    ("options", "differ"),
    [
        ({}, False),
        ({"router_url": "http://127.0.0.1:9"}, False),  # the run's own
        ({"router_url": "http://127.0.0.1:9", "engine_urls": ["http://127.0.0.1:8"]}, True),
        ({"rollout_engine": "my_launcher:launch"}, True),
        ({"custom_model_provider_path": "my_model:make"}, True),
        ({"model_converter_path": "my_model:Converter"}, True),
        ({"trainer_load": "saves/step_000004/trainer"}, True),
    ],
)
def test_version_0_is_published_to_engines_that_this_package_did_not_start(options: Any, differ: bool) -> None:
    assert engines_may_differ(compose(CORE_SECTIONS)(**options)) is differ  # type: ignore[arg-type]


def test_a_name_of_custom_config_path_that_is_an_option_is_refused() -> None:
    check(custom_config_path={"max_turns": 3})
    with pytest.raises(ConfigError, match=r"(?s)lr is an option of the run.*take it out of there and give --lr"):
        check(custom_config_path={"max_turns": 3, "lr": 1.0})
