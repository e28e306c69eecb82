"""Options of rollouts, rewards, filters and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from buffer_rl.algo.rewards import reward_bounds, rewards_kind
from buffer_rl.args import Args
from buffer_rl.data.eval_sets import eval_sets_of
from buffer_rl.options.checks import first, given, needs, refuse
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import Section, flag_of, option
from buffer_rl.plan.algorithm import estimator_of, is_supervised, loss_of
from buffer_rl.plan.algorithms import ALGORITHMS, LOSSES, Rewards
from buffer_rl.plan.schedule import Schedule, rollout_only, train_only


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
        False, "with --partial-rollout: a loss mask of 0 for tokens of older weights", needs="partial_rollout"
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
        needs="replay_routed_experts",
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
        None, "chooses which groups that were given back are leased next; if not set: the oldest", kind="buffer_filter"
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

    @staticmethod
    def check(args: Args) -> None:
        size, in_flight = args.rollout_batch_size, args.over_sampling_batch_size
        what = f"--over-sampling-batch-size: {in_flight} groups in flight cannot give {size} a step"
        refuse(in_flight is not None and in_flight < size, what, expected=f"at least {size}")
        unmasked = args.partial_rollout and not args.mask_offpolicy_in_partial_rollout
        what = f"--partial-rollout: --schedule {args.schedule} does not train on tokens of older weights"
        hint = "add --mask-offpolicy-in-partial-rollout: older tokens are then context, with a loss mask of 0"
        refuse(unmasked and Schedule.of(args).max_staleness == 0, what, hint)
        wrong = next((f"{token}" for token in args.rollout_stop_token_ids if token < 0), "")
        refuse(wrong, "--rollout-stop-token-ids: {} is no token id", expected="0 or more")
        # Engines refuse it at the first request: SGLang also a top-k of 0, which other libraries read as "all".
        found = {"--rollout-top-k": args.rollout_top_k, "--eval-top-k": args.eval_top_k}
        found |= {f"--eval-config {args.eval_config}, the set {s.name!r}": s.top_k for s in eval_sets_of(args)}
        zero = first({where: top_k == 0 for where, top_k in found.items()})
        refuse(zero, "{}: top_k is 0", "write -1", "-1 for all tokens, or at least 1")
        _check_replay(args)

    @staticmethod
    def notices(args: Args) -> Iterator[str]:
        trains = args.num_rollout != 0 and not rollout_only(args) and not is_supervised(args)
        if trains and (cut := _truncating(args)) and not args.replay_kept_tokens:
            yield (
                f"{', '.join(f'{flag_of(name)} {value}' for name, value in cut)}: training samples come from a part of "
                "the distribution, but log-probabilities, the engine's and the trainer's, are of the whole; nothing "
                "corrects for it, so gradients are biased towards the tokens that are kept (--replay-kept-tokens "
                "renormalises both over these tokens; the same flags with --eval- touch evaluations only)"
            )
        built_in = is_built_in_rollout(args)
        if trains and built_in and not train_only(args) and _compares_in_groups(args):
            if args.n_samples_per_prompt == 1:
                yield (
                    "--n-samples-per-prompt 1: a reward minus the mean of its group is 0 where the group has one "
                    "sample, so every advantage is 0 and rewards change nothing (take more samples a prompt, or "
                    "--custom-reward-post-process-path or --custom-advantage-function-path of your own)"
                )
            elif args.rollout_temperature == 0 and generate_path(args) is None:
                yield (
                    "--rollout-temperature 0: the samples of a prompt are equal, so a reward minus the mean of its "
                    "group is 0 and rewards change nothing (--eval-temperature 0 is for evaluations alone)"
                )
        generates = not train_only(args) and not (args.num_rollout == 0 and args.eval_function_path)
        if args.multimodal_keys and generates and built_in and generate_path(args) is None:
            yield (
                f"--multimodal-keys {', '.join(args.multimodal_keys)}: the built-in generate function sends the "
                "prompt's text alone to the engine, so the model does not see these fields; rewards and filters do (a "
                "function of --custom-generate-function-path can send them)"
            )


_TRUNCATING = ("rollout_top_p", "rollout_top_k", "rollout_min_p")


def _truncating(args: Args) -> list[tuple[str, float]]:
    """The options that cut off a part of the distribution that training samples come from, and their values."""
    cut = [(name, getattr(args, name)) for name in _TRUNCATING if given(args, name)]
    return cut if args.rollout_temperature > 0 and not is_supervised(args) else []


def _check_replay(args: Args) -> None:
    uncut, what = args.replay_kept_tokens and not _truncating(args), "no tokens are cut off when samples are drawn"
    expected = "--rollout-top-p, --rollout-top-k or --rollout-min-p, and a temperature above 0"
    refuse(uncut, f"--replay-kept-tokens: {what}", "take it out", expected)
    what = "--replay-routed-experts: no engine computes the tokens of supervised fine-tuning"
    refuse(args.replay_routed_experts and is_supervised(args), what)
    schedule = Schedule.of(args)
    replays = args.replay_routed_experts and schedule.mixes_versions and not schedule.drains
    what = "a publication retracts requests, and the new weights choose other experts for the tokens before it"
    hint = "add --publication drain, or --replay-recomputed-experts to replay these all the same"
    where = f"--replay-routed-experts and --schedule {args.schedule}"
    refuse(replays and not args.replay_recomputed_experts, f"{where}: {what}", hint)


def _compares_in_groups(args: Args) -> bool:
    """Whether the built-in normalisation, estimator and loss, which nothing replaces, compare rewards in a group."""
    own = given(args, "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    built_in = loss_of(args) in LOSSES and estimator_of(args)[1] in ALGORITHMS
    by_group = rewards_kind(args) is not Rewards.RAW and not args.use_opd
    return built_in and by_group and not own


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

    @staticmethod
    def check(args: Args) -> None:
        if not train_only(args):
            _check_scores(args)
        reward_bounds(args)
        shaping = ("overlong_buffer_len", "length_penalty", "reward_clip", "reward_scale")
        refuse(is_supervised(args) and given(args, *shaping), "{}: the supervised loss reads no rewards")
        length, most = args.overlong_buffer_len, args.rollout_max_response_len
        what = f"--overlong-buffer-len: a buffer of {length} of at most {most} tokens"
        refuse(length > most, what, expected="at most --rollout-max-response-len")
        path = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
        replaced = path and given(args, *shaping, "disable_rewards_normalization")
        refuse(replaced, f"{{}}: {path} makes the rewards to train on")


def _check_scores(args: Args) -> None:
    """A rollout or generate function of the user's own may score for itself; the built-in ones cannot. With a teacher a
    sample that nothing scores has the reward 0, but an evaluation of such samples would say nothing."""
    needs(args, "rm_model", "there is no reward model", "num_reward_workers")
    for server in args.rm_servers:
        name, _, url = server.partition("=")
        what = f"--rm-servers: {mask_url(server)!r} is no server with a name"
        refuse(not name or not url.startswith(("http://", "https://")), what, expected="NAME=http://HOST:PORT/PATH")
    scores = given(args, "rm_type", "row_rm_types", "custom_rm_path", "custom_group_rm_path", "rm_model")
    others = not is_built_in_rollout(args) or generate_path(args) is not None or is_supervised(args)
    distils = args.use_opd and all(s.rm_type for s in eval_sets_of(args))
    hint = "add --custom-rm-path module:fn (your function), --rm-type NAME (a registered one) or --rm-model PATH"
    refuse(not (scores or others or distils), "--rm-type and --custom-rm-path: nothing scores the samples", hint)


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

    @staticmethod
    def check(args: Args) -> None:
        sets = eval_sets_of(args)
        what, hint = "--eval-prompt-data: --eval-interval has nothing to evaluate", "add --eval-prompt-data NAME=PATH"
        refuse(args.eval_interval is not None and not sets, what, hint)
        named = next((s.name for s in sets if s.rm_type), "")
        what = f"--eval-config and {{}}: the set {named!r} names an rm_type, but {{}} scores every sample"
        refuse(named and given(args, "custom_rm_path", "custom_group_rm_path"), what)


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
    return bool(args.rollout_function_path == RolloutOptions.model_fields["rollout_function_path"].default)


def whole_rollout_functions(args: Args) -> dict[str, str]:
    """Plugins of the run that see all groups of a rollout before any is finished: what each is, by its option."""
    seeing = {"rollout_sample_filter_path": "a sample filter", "rollout_all_samples_process_path": "this function"}
    return {name: what for name, what in seeing.items() if given(args, name)}
