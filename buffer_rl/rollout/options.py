"""Options of rollouts, rewards, filters and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from buffer_rl.options.section import Section, option

if TYPE_CHECKING:
    from buffer_rl.args import Args


class RolloutOptions(Section):
    """How rollouts are generated and scored."""

    heading: ClassVar[str] = "Rollout"

    rollout_function_path: str = option(
        "buffer_rl.rollout.default:DefaultRollout", "the function that produces a rollout", kind="rollout"
    )
    custom_generate_function_path: str | None = option(
        None, "a function that fills one sample's response, in place of the built-in one", kind="generate"
    )
    rollout_batch_size: int = option(32, "prompt groups a training step", ge=1, common=True)
    over_sampling_batch_size: int | None = option(
        None,
        "prompt groups in flight at a time, at least --rollout-batch-size (the default); once as many as a step needs "
        "are kept, the others are aborted and go back to the queue",
        ge=1,
    )
    partial_rollout: bool = option(
        False, "groups that go back to the queue keep what was generated of them, and are continued later"
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False, "with --partial-rollout: tokens of older weights are context alone, with a loss mask of 0"
    )
    n_samples_per_prompt: int = option(8, "samples a prompt group", ge=1, common=True)
    rollout_temperature: float = option(1.0, "sampling temperature; 0 is greedy", ge=0, common=True)
    rollout_top_p: float = option(1.0, "nucleus sampling: keep the most probable tokens up to this mass", gt=0, le=1)
    rollout_top_k: int = option(-1, "keep this many of the most probable tokens; -1 keeps all", ge=-1)
    rollout_min_p: float = option(
        0.0, "keep tokens of at least this fraction of the most probable one's probability", ge=0, le=1
    )
    replay_kept_tokens: bool = option(
        False,
        "the engine returns which tokens --rollout-top-p, -top-k and -min-p kept, and every log-probability is "
        "renormalised over them: samples and log-probabilities are then of the same distribution",
    )
    rollout_max_prompt_len: int | None = option(
        None, "training prompts of more tokens than this are rejected as prompt_too_long, and replaced", ge=1
    )
    rollout_max_response_len: int = option(1024, "most response tokens of a sample", ge=1, common=True)
    rollout_max_context_len: int | None = option(None, "most tokens of prompt and response together", ge=2)
    rollout_stop: list[str] = option(
        [], "stop strings; the one that ends a response stays in its text, as in its tokens"
    )
    rollout_stop_token_ids: list[int] = option([], "stop token ids, besides the tokenizer's end token")
    rollout_skip_special_tokens: bool = option(True, "leave special tokens out of the response text")
    rollout_concurrency: int = option(512, "most samples in flight from one rollout worker", ge=1)
    rollout_timeout_s: float = option(3600.0, "deadline of one whole rollout, in seconds", gt=0)
    generate_timeout_s: float = option(600.0, "deadline of one generation request, in seconds", gt=0)
    custom_generate_timeout_s: float | None = option(
        None,
        "deadline of one call of --custom-generate-function-path, with all its requests and tools, in seconds; half of "
        "--rollout-timeout-s where absent",
        gt=0,
    )
    dynamic_sampling_filter_path: str | None = option(
        None, "decides whether a finished group is trained on; dropped groups are replaced", kind="filter", common=True
    )
    buffer_filter_path: str | None = option(
        None, "chooses which queued groups to lease next; the oldest where absent", kind="buffer_filter"
    )
    rollout_sample_filter_path: str | None = option(
        None, "marks samples of a whole rollout that are not trained on", kind="sample_filter"
    )
    custom_rollout_log_function_path: str | None = option(
        None,
        "sees the samples and metrics of each training rollout; adds metrics, or logs in our place",
        kind="rollout_log",
    )
    rollout_all_samples_process_path: str | None = option(
        None, "receives all groups of a rollout at its end, kept and dropped", kind="all_samples_process"
    )
    dynamic_sampling_max_drops: int = option(
        100, "give up a rollout after this many dropped groups for each wanted one", ge=1
    )
    max_infra_failures: int | None = option(
        None,
        "end the run after more than this many failed attempts at groups for reasons of the engines or the network; "
        "such a group goes back to the queue and is tried again, and after four goes into quarantine if the engines "
        "answer others; 4 for each of --rollout-batch-size, and at least 16, where absent",
        ge=0,
    )
    max_data_failures: int | None = option(
        None,
        "end the run after more than this many failed attempts at groups for reasons of their own: the prompt, its "
        "reward; the second such failure of a group puts it into quarantine; as above where absent",
        ge=0,
    )


class RewardOptions(Section):
    """How samples are scored."""

    heading: ClassVar[str] = "Reward"

    rm_type: str | None = option(
        None,
        "the reward of every row that does not choose one of --row-rm-types: a registered name",
        kind="reward",
        one_of="reward",
        common=True,
    )
    row_rm_types: list[str] = option(
        [],
        "registered rewards that a row's metadata may choose (rm_type) in place of --rm-type; each is marked by its "
        "author as safe for data to choose",
        metavar="NAME",
    )
    custom_rm_path: str | None = option(
        None, "your reward function, module:fn or ./file.py:fn", kind="reward", one_of="reward", common=True
    )
    reward_key: str | None = option(None, "which entry to train on where a reward is a mapping")
    rm_url: str | None = option(
        None,
        "address of a reward server, for the reward 'remote'; rows of data cannot choose one",
        pattern="^https?://.",
    )
    custom_group_rm_path: str | None = option(
        None,
        "your reward function for all samples of a prompt together, in place of the others",
        kind="group_reward",
        one_of="reward",
    )
    rm_model: str | None = option(
        None,
        "a reward model, in place of --rm-type: a Hugging Face folder of a sequence classifier with one label, whose "
        "logit is the reward",
        metavar="PATH",
        one_of="reward",
    )
    num_reward_workers: int = option(1, "processes that hold the reward model", ge=1)
    rm_model_timeout_s: float = option(
        600.0, "deadline of one answer of the reward model, in seconds, a restart of its process included", gt=0
    )
    custom_reward_post_process_path: str | None = option(
        None,
        "turns a group's rewards into those to train on (else normalised)",
        kind="reward_post_process",
        one_of="rewards_to_train_on",
    )
    custom_convert_samples_to_train_data_path: str | None = option(
        None,
        "turns a group's samples into training columns, the rewards to train on among them",
        kind="samples_to_train_data",
        one_of="rewards_to_train_on",
    )
    rm_timeout_s: float = option(30.0, "deadline of one reward, in seconds", gt=0)
    on_reward_error: Literal["retry", "quarantine", "abort"] = option(
        "retry",
        "a group whose reward cannot be computed is tried once more and then put into quarantine (retry), at once "
        "(quarantine), or ends the run (abort)",
    )
    rm_workers: int = option(1, "processes that compute synchronous rewards off the event loop", ge=1)
    grpo_std_normalization: bool = option(True, "divide a group's centred rewards by their standard deviation")
    disable_rewards_normalization: bool = option(
        False, "give the advantage estimator the rewards as they are, whatever its normalisation within a group is"
    )
    overlong_buffer_len: int = option(
        0,
        "the last tokens below --rollout-max-response-len in which a response's reward falls, before it is normalised, "
        "by up to --overlong-penalty-factor (DAPO); 0: none",
        ge=0,
    )
    overlong_penalty_factor: float = option(1.0, "penalty of a response of --rollout-max-response-len tokens", ge=0)
    length_penalty: float = option(
        0.0,
        "subtract this from the reward of a response of --rollout-max-response-len tokens, and in proportion from that "
        "of others, before it is normalised",
        ge=0,
    )
    reward_clip: list[float] = option(
        [], "clip rewards to -C and C, or to two bounds, before they are scaled and normalised"
    )
    reward_scale: float = option(1.0, "multiply rewards by this before they are normalised", gt=0)


class EvalOptions(Section):
    """Evaluation on held-out prompts."""

    heading: ClassVar[str] = "Evaluation"

    eval_function_path: str | None = option(
        None, "the function that evaluates; the rollout function where absent", kind="rollout"
    )
    eval_prompt_data: list[str] = option(
        [], "evaluation sets, as NAME=PATH or NAME PATH; see also --eval-config", metavar="NAME=PATH", common=True
    )
    eval_config: str | None = option(
        None, "a YAML file of evaluation sets, each with sampling options of its own", metavar="FILE"
    )
    eval_input_key: str | None = option(
        None, "as --input-key, for evaluation sets; a set of --eval-config may name its own"
    )
    eval_label_key: str | None = option(
        None, "as --label-key, for evaluation sets; a set of --eval-config may name its own"
    )
    custom_eval_rollout_log_function_path: str | None = option(
        None,
        "sees the samples and metrics of each evaluation; adds metrics, or logs in our place",
        kind="eval_rollout_log",
    )
    eval_interval: int | None = option(
        None, "evaluate every this many training steps (and at the end)", ge=1, common=True
    )
    skip_eval_before_train: bool = option(False, "do not evaluate the initial weights")
    n_samples_per_eval_prompt: int = option(1, "samples an evaluation prompt", ge=1)
    eval_temperature: float | None = option(None, "as --rollout-temperature, for evaluation", ge=0)
    eval_top_p: float | None = option(None, "as --rollout-top-p, for evaluation", gt=0, le=1)
    eval_top_k: int | None = option(None, "as --rollout-top-k, for evaluation", ge=-1)
    eval_min_p: float | None = option(None, "as --rollout-min-p, for evaluation", ge=0, le=1)
    eval_max_response_len: int | None = option(None, "as --rollout-max-response-len, for evaluation", ge=1)


def is_built_in_rollout(args: Args) -> bool:
    """Whether ``--rollout-function-path`` is as it is where nothing is said."""
    default = RolloutOptions.model_fields["rollout_function_path"].default
    return bool(args.rollout_function_path == default)
