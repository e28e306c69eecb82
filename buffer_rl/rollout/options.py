"""Options of rollouts, rewards, filters and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from buffer_rl.options.section import Section, option

if TYPE_CHECKING:
    from buffer_rl.args import Args


class RolloutOptions(Section):
    """Batch, sampling, filters and limits of rollouts."""

    heading: ClassVar[str] = "Rollout"

    rollout_function_path: str = option(
        "buffer_rl.rollout.default:DefaultRollout", "function that produces a rollout", kind="rollout"
    )
    custom_generate_function_path: str | None = option(
        None, "function that generates the response of one sample, in place of the built-in one", kind="generate"
    )
    rollout_batch_size: int = option(32, "number of prompts per training step", ge=1, common=True)
    over_sampling_batch_size: int | None = option(
        None,
        "number of prompts in progress at a time, at least --rollout-batch-size (the default); when enough groups "
        "are kept, the others are aborted and requeued",
        ge=1,
    )
    partial_rollout: bool = option(False, "requeued groups keep their partial responses and continue later")
    mask_offpolicy_in_partial_rollout: bool = option(
        False, "with --partial-rollout: a loss mask of 0 for tokens of older weights"
    )
    n_samples_per_prompt: int = option(8, "number of samples per prompt", ge=1, common=True)
    rollout_temperature: float = option(1.0, "sampling temperature; 0 is greedy", ge=0, common=True)
    rollout_top_p: float = option(
        1.0, "nucleus sampling: keep the most probable tokens up to this cumulative probability", gt=0, le=1
    )
    rollout_top_k: int = option(-1, "keep only the K most probable tokens; -1 keeps all", ge=-1)
    rollout_min_p: float = option(0.0, "keep tokens with at least this fraction of the highest probability", ge=0, le=1)
    replay_kept_tokens: bool = option(
        False,
        "renormalise all log-probabilities over the tokens that --rollout-top-p, -top-k and -min-p kept, as reported "
        "by the engine, so that they match the sampling distribution",
    )
    replay_routed_experts: bool = option(
        False,
        "for mixture-of-experts models: train each token with the experts that computed it in the engine (routing "
        "replay), whatever the trainer's routers would choose",
    )
    replay_recomputed_experts: bool = option(
        False,
        "allow --replay-routed-experts with publications that retract requests: experts of tokens that were sampled "
        "before one are those that the newest weights chose for them (rollout/experts_recomputed)",
    )
    rollout_max_prompt_len: int | None = option(
        None, "maximum number of prompt tokens; longer prompts are rejected (prompt_too_long) and replaced", ge=1
    )
    rollout_max_response_len: int = option(1024, "maximum number of response tokens per sample", ge=1, common=True)
    rollout_max_context_len: int | None = option(None, "maximum number of prompt and response tokens together", ge=2)
    rollout_stop: list[str] = option([], "stop strings; the response keeps the one that ends it")
    rollout_stop_token_ids: list[int] = option([], "stop token ids, in addition to the tokenizer's end token")
    rollout_skip_special_tokens: bool = option(True, "omit special tokens from the response text")
    rollout_concurrency: int = option(512, "maximum number of samples in progress per rollout worker", ge=1)
    rollout_timeout_s: float = option(
        3600.0,
        "deadline for one rollout, in seconds; in a schedule with a staleness of S, S + 1 times as long may pass after "
        "the last group that a rollout leased, finished or dropped",
        gt=0,
    )
    generate_timeout_s: float = option(600.0, "deadline for one generation request, in seconds", gt=0)
    custom_generate_timeout_s: float | None = option(
        None,
        "deadline for one call of --custom-generate-function-path, including its requests and tools, in seconds; if "
        "not set: half of the rollout's deadline, which --rollout-timeout-s sets",
        gt=0,
    )
    dynamic_sampling_filter_path: str | None = option(
        None, "decides if a finished group is trained on; dropped ones are replaced", kind="filter", common=True
    )
    buffer_filter_path: str | None = option(
        None, "chooses the queued groups to lease next; if not set: the oldest", kind="buffer_filter"
    )
    rollout_sample_filter_path: str | None = option(
        None, "excludes samples of a complete rollout from training", kind="sample_filter"
    )
    custom_rollout_log_function_path: str | None = option(
        None,
        "receives samples and metrics of each training rollout; adds metrics, or replaces logging",
        kind="rollout_log",
    )
    rollout_all_samples_process_path: str | None = option(
        None, "receives all groups at the end of a rollout, kept and dropped", kind="all_samples_process"
    )
    dynamic_sampling_max_drops: int = option(
        100, "end a rollout with an error after N dropped groups per wanted one", ge=1
    )
    max_infra_failures: int | None = option(
        None,
        "end the run after more than N group failures caused by engines or network; a failed group is requeued, and "
        "quarantined after four failures if the engines answer others. Default: 4 x --rollout-batch-size, at least "
        "16",
        ge=0,
    )
    max_data_failures: int | None = option(
        None,
        "end the run after more than N group failures caused by the prompt or its reward; the second failure "
        "quarantines a group. Default as for --max-infra-failures",
        ge=0,
    )


class RewardOptions(Section):
    """Reward functions, reward models and normalisation."""

    heading: ClassVar[str] = "Reward"

    rm_type: str | None = option(
        None,
        "reward function by registered name, for example math; rows may choose another one of --row-rm-types",
        kind="reward",
        one_of="reward",
        common=True,
    )
    row_rm_types: list[str] = option(
        [],
        "registered rewards that a row's metadata may choose (rm_type) instead of --rm-type; their authors must have "
        "marked them as safe for that",
        metavar="NAME",
    )
    custom_rm_path: str | None = option(
        None, "your reward function: module:fn or ./file.py:fn", kind="reward", one_of="reward", common=True
    )
    reward_key: str | None = option(None, "entry to train on, if the reward is a mapping")
    rm_url: str | None = option(
        None, "URL of a reward server, for the reward 'remote'; not for rows to choose", pattern="^https?://."
    )
    rm_servers: list[str] = option(
        [],
        "reward servers by name, as NAME=URL, for rows with that name in metadata.rm_server; of a name that is given "
        "again, any",
        metavar="NAME=URL",
    )
    custom_group_rm_path: str | None = option(
        None, "your reward function for all samples of a prompt together", kind="group_reward", one_of="reward"
    )
    rm_model: str | None = option(
        None,
        "reward model: a Hugging Face folder of a sequence classifier with one label; the reward is its logit",
        metavar="PATH",
        one_of="reward",
    )
    num_reward_workers: int = option(1, "number of processes of the reward model", ge=1)
    rm_model_timeout_s: float = option(
        600.0, "deadline for one answer of the reward model, including a restart of its process, in seconds", gt=0
    )
    custom_reward_post_process_path: str | None = option(
        None,
        "converts a group's rewards to the values to train on; if not set, they are normalised",
        kind="reward_post_process",
        one_of="rewards_to_train_on",
    )
    custom_convert_samples_to_train_data_path: str | None = option(
        None,
        "converts a group's samples to training columns, including the rewards to train on",
        kind="samples_to_train_data",
        one_of="rewards_to_train_on",
    )
    rm_timeout_s: float = option(30.0, "deadline for one reward, in seconds", gt=0)
    on_reward_error: Literal["retry", "quarantine", "abort"] = option(
        "retry", "if a reward fails: retry once, then quarantine the group; quarantine it at once; or abort the run"
    )
    rm_workers: int = option(1, "number of processes for synchronous rewards", ge=1)
    grpo_std_normalization: bool = option(True, "divide a group's centred rewards by their standard deviation")
    disable_rewards_normalization: bool = option(
        False, "give the advantage estimator the raw rewards, whatever its normalisation within a group is"
    )
    overlong_buffer_len: int = option(
        0,
        "length penalty of DAPO: within the last N tokens before --rollout-max-response-len the reward falls by up "
        "to --overlong-penalty-factor; 0: off",
        ge=0,
    )
    overlong_penalty_factor: float = option(1.0, "penalty of a response of --rollout-max-response-len tokens", ge=0)
    length_penalty: float = option(
        0.0,
        "penalty of a response of --rollout-max-response-len tokens, proportionally less for shorter ones; "
        "subtracted before rewards are normalised",
        ge=0,
    )
    reward_clip: list[float] = option([], "clip rewards to [-C, C], or to two bounds, before scaling and normalisation")
    reward_scale: float = option(1.0, "factor for rewards, applied before normalisation", gt=0)


class EvalOptions(Section):
    """Evaluation on held-out prompts."""

    heading: ClassVar[str] = "Evaluation"

    eval_function_path: str | None = option(
        None, "function for evaluation; if not set: the rollout function", kind="rollout"
    )
    eval_prompt_data: list[str] = option(
        [], "evaluation sets: NAME=PATH or NAME PATH; see also --eval-config", metavar="NAME=PATH", common=True
    )
    eval_config: str | None = option(
        None, "YAML file of evaluation sets, each with own sampling options", metavar="FILE"
    )
    eval_input_key: str | None = option(None, "--input-key for evaluation sets; --eval-config may have another")
    eval_label_key: str | None = option(None, "--label-key for evaluation sets; --eval-config may have another")
    custom_eval_rollout_log_function_path: str | None = option(
        None,
        "receives samples and metrics of each evaluation; adds metrics, or replaces logging",
        kind="eval_rollout_log",
    )
    eval_interval: int | None = option(None, "evaluate every N training steps, and at the end", ge=1, common=True)
    skip_eval_before_train: bool = option(False, "skip the evaluation of the initial weights")
    n_samples_per_eval_prompt: int = option(1, "number of samples per evaluation prompt", ge=1)
    eval_temperature: float | None = option(None, "--rollout-temperature for evaluation", ge=0)
    eval_top_p: float | None = option(None, "--rollout-top-p for evaluation", gt=0, le=1)
    eval_top_k: int | None = option(None, "--rollout-top-k for evaluation", ge=-1)
    eval_min_p: float | None = option(None, "--rollout-min-p for evaluation", ge=0, le=1)
    eval_max_response_len: int | None = option(None, "--rollout-max-response-len for evaluation", ge=1)


PLAY = "buffer_rl.agents.play:play"
"""The generate function of agents."""


def plays_agents(args: Args) -> bool:
    """Whether agents play the samples."""
    return bool(args.agent_path or args.agent_command or args.tools_path or args.environment)


def generate_path(args: Args) -> str | None:
    """The generate function of a run: that of agents, the user's, or None for the built-in one."""
    return PLAY if plays_agents(args) else args.custom_generate_function_path


def is_built_in_rollout(args: Args) -> bool:
    """Whether ``--rollout-function-path`` is as it is where nothing is said."""
    default = RolloutOptions.model_fields["rollout_function_path"].default
    return bool(args.rollout_function_path == default)
