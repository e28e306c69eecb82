"""Checks of options before a training run starts, and notices about them. No plugin is imported, and no file is read
but that of ``--eval-config``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.algo.rewards import rewards_kind
from buffer_rl.cluster.locality import require_local_engines
from buffer_rl.data.eval_sets import eval_sets_of
from buffer_rl.data.source import check_sources
from buffer_rl.driver.algorithm_checks import check_agents, check_algorithm
from buffer_rl.driver.async_checks import async_notices, check_async
from buffer_rl.driver.offload import check_offload
from buffer_rl.engines.external import urls_of
from buffer_rl.errors import ConfigError
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import did_you_mean, flag_of
from buffer_rl.plan.algorithm import (
    estimator_of,
    frozen_models,
    frozen_models_of_trainer,
    is_supervised,
    loss_of,
    uses_critic,
)
from buffer_rl.plan.algorithms import ALGORITHMS, LOSSES, Rewards
from buffer_rl.plan.counts import optimizer_steps
from buffer_rl.plan.roles import worker_counts
from buffer_rl.plan.schedule import Schedule, parse_early_stop, rollout_only, train_only
from buffer_rl.rollout.options import generate_path, is_built_in_rollout
from buffer_rl.rollout.prompts import check_template_kwargs

if TYPE_CHECKING:
    from buffer_rl.args import Args

FULL_TRAINING_LR = 1e-6
"""The default of ``--lr``."""


def check_options(args: Args) -> None:
    """Raises ConfigError naming the flags that contradict each other or that a training run lacks.

    args: the flat options of a training run, with every core section.
    """
    _check_modes(args)
    _check_required(args)
    _check_length(args)
    _check_partial_rollout(args)
    if not train_only(args):
        _check_reward(args)
    _check_evaluation(args)
    _check_sampling(args)
    _check_replay(args)
    check_algorithm(args)
    check_agents(args)
    require_local_engines(args.weight_sync_mode, [*args.engine_urls, *urls_of(args)])
    check_template_kwargs(args.apply_chat_template_kwargs)
    _check_custom_config(args)
    _check_optimizer(args)
    check_role_options(args)
    check_offload(args)
    check_async(args)
    if args.early_stop is not None:
        metric = parse_early_stop(args.early_stop).metric
        _check_evaluated(args, metric, "--early-stop", "an early stop needs evaluations during the run")
    for name in ("save_interval", "async_save", "keep_last", "keep_best"):
        if getattr(args, name) and args.save is None:
            raise ConfigError(f"{flag_of(name)} has no folder to save to", where="--save", hint="add --save PATH")
    if args.keep_best is not None:
        if args.keep_last is None:
            raise ConfigError("all checkpoints are kept", where="--keep-best", hint="add --keep-last N")
        _check_evaluated(args, args.keep_best.removeprefix("-"), "--keep-best", "it needs evaluations during the run")


def _check_required(args: Args) -> None:
    for name, flag, what in (
        ("hf_checkpoint", "--hf-checkpoint", "there is no model to train"),
        ("prompt_data", "--prompt-data", "there are no training prompts"),
    ):
        other_data = name == "prompt_data" and (train_only(args) or args.data_source_path is not None)
        if not getattr(args, name) and not other_data:
            own = "; or your own data source, with --data-source-path" if name == "prompt_data" else ""
            raise ConfigError(what, where=flag, hint=f"add {flag} PATH, or '{name}: PATH' in the file of --config{own}")
    if args.prompt_data and args.data_source_path is None:
        check_sources(args)
    _check_prompt_order(args)


def _check_prompt_order(args: Args) -> None:
    """An order by difficulty is the Buffer's own, of rows that it reads, and learns from rewards of trained groups."""
    if args.prompt_order != "difficulty":
        return
    others = {
        "--data-source-path": args.data_source_path is not None,
        "recorded rollouts": train_only(args),
        "--debug-rollout-only": rollout_only(args),
        "supervised fine-tuning, which has no rewards": is_supervised(args),
    }
    if found := [what for what, is_so in others.items() if is_so]:
        raise ConfigError(
            f"it does not go with {found[0]}",
            where="--prompt-order difficulty",
            hint="take it out; a data source of your own decides about its order by itself",
        )


def _check_length(args: Args) -> None:
    if args.num_rollout is None and args.num_epoch is None:
        raise ConfigError(
            "the length of the run is not given", where="--num-rollout", hint="add --num-rollout N or --num-epoch N"
        )


def _check_partial_rollout(args: Args) -> None:
    in_flight = args.over_sampling_batch_size
    if in_flight is not None and in_flight < args.rollout_batch_size:
        raise ConfigError(
            f"{in_flight} groups in flight cannot give {args.rollout_batch_size} a step",
            where="--over-sampling-batch-size and --rollout-batch-size",
            expected=f"at least {args.rollout_batch_size}",
        )
    masks = args.mask_offpolicy_in_partial_rollout
    if masks and not args.partial_rollout:
        raise ConfigError(
            "there are no older tokens to mask: without --partial-rollout, a response is generated in one rollout",
            where="--mask-offpolicy-in-partial-rollout",
            hint="add --partial-rollout",
        )
    if args.partial_rollout and not masks and Schedule.of(args).max_staleness == 0:
        raise ConfigError(
            f"a continued response has tokens of older weights, and --schedule {args.schedule} trains on tokens of "
            "exactly the weights that it updates",
            where="--partial-rollout",
            hint="add --mask-offpolicy-in-partial-rollout: older tokens are then context, with a loss mask of 0",
        )


def _check_reward(args: Args) -> None:
    """A rollout or generate function of the user's own may score for itself; the built-in ones cannot. With a teacher a
    sample that nothing scores has the reward 0, but an evaluation of such samples would say nothing."""
    own_function = not is_built_in_rollout(args) or generate_path(args) is not None
    if args.num_reward_workers > 1 and not args.rm_model:
        raise ConfigError("there is no reward model", where="--num-reward-workers", hint="add --rm-model PATH")
    for server in args.rm_servers:
        name, _, url = server.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            what = f"{mask_url(server)!r} is no server with a name"
            raise ConfigError(what, where="--rm-servers", expected="NAME=http://HOST:PORT/PATH")
    scores = any((args.rm_type, args.row_rm_types, args.custom_rm_path, args.custom_group_rm_path, args.rm_model))
    distils = args.use_opd and all(s.rm_type for s in eval_sets_of(args))
    if not scores and not own_function and not is_supervised(args) and not distils:
        raise ConfigError(
            "nothing scores the samples",
            where="--rm-type and --custom-rm-path",
            hint="add --custom-rm-path module:fn (your function), --rm-type NAME (a registered one) or --rm-model PATH",
        )


def _check_evaluation(args: Args) -> None:
    sets = eval_sets_of(args)
    if args.eval_interval is not None and not sets:
        raise ConfigError(
            "--eval-interval has nothing to evaluate",
            where="--eval-prompt-data",
            hint="add --eval-prompt-data NAME=PATH",
        )
    for name in ("custom_rm_path", "custom_group_rm_path"):
        if getattr(args, name) is not None and (named := [s.name for s in sets if s.rm_type]):
            raise ConfigError(
                f"the evaluation set {named[0]!r} names an rm_type, but {flag_of(name)} scores every sample",
                where=f"--eval-config and {flag_of(name)}",
                hint="take one of them out",
            )


def _check_sampling(args: Args) -> None:
    """What an engine refuses at the first request; SGLang also a top-k of 0, which other libraries read as "all"."""
    if wrong := [token for token in args.rollout_stop_token_ids if token < 0]:
        raise ConfigError(f"{wrong[0]} is no token id", where="--rollout-stop-token-ids", expected="0 or more")
    given = {"--rollout-top-k": args.rollout_top_k, "--eval-top-k": args.eval_top_k}
    given |= {f"--eval-config {args.eval_config}, the set {s.name!r}": s.top_k for s in eval_sets_of(args)}
    if zero := [where for where, top_k in given.items() if top_k == 0]:
        raise ConfigError("top_k is 0", where=zero[0], expected="-1 for all tokens, or at least 1", hint="write -1")


_TRUNCATING = (("rollout_top_p", 1.0), ("rollout_top_k", -1), ("rollout_min_p", 0.0))


def _truncating(args: Args) -> list[tuple[str, float]]:
    """The options that cut off a part of the distribution that training samples come from, and their values."""
    cut = [(name, getattr(args, name)) for name, neutral in _TRUNCATING if getattr(args, name) != neutral]
    return cut if args.rollout_temperature > 0 and not is_supervised(args) else []


def _check_replay(args: Args) -> None:
    if args.replay_kept_tokens and not _truncating(args):
        raise ConfigError(
            "no tokens are cut off when training samples are drawn",
            where="--replay-kept-tokens",
            expected="--rollout-top-p, --rollout-top-k or --rollout-min-p, and a temperature above 0",
            hint="take it out",
        )


def _check_custom_config(args: Args) -> None:
    """A name that is an option has a meaning for the run, which what functions see on ``args`` never changes."""
    if options := sorted(set(args.custom_config_path or ()) & set(type(args).model_fields)):
        raise ConfigError(
            f"{options[0]} is an option of the run, and no name of your own",
            where="--custom-config-path",
            expected="names that no option has",
            hint=f"take it out of there and give {flag_of(options[0])}",
        )


def _check_optimizer(args: Args) -> None:
    if args.num_steps_per_rollout > args.rollout_batch_size:
        raise ConfigError(
            f"{args.num_steps_per_rollout} optimizer steps on {args.rollout_batch_size} groups",
            where="--num-steps-per-rollout and --rollout-batch-size",
            expected="at least one group for each step",
        )
    if args.lr_decay_style == "constant":
        return
    if args.min_lr > args.lr:
        raise ConfigError(
            f"the learning rate would rise from {args.lr:g} to {args.min_lr:g}", where="--lr and --min-lr"
        )
    if args.lr_decay_iters is not None and args.lr_decay_iters <= args.lr_warmup_iters:
        raise ConfigError(
            f"the decay ends at step {args.lr_decay_iters}, the warm-up at step {args.lr_warmup_iters}",
            where="--lr-decay-iters and --lr-warmup-iters",
            hint="--lr-decay-iters counts the warm-up too",
        )


def _check_evaluated(args: Args, metric: str, flag: str, needs: str) -> None:
    """Raises ConfigError if no evaluation during the run gives the metric that an option names."""
    metrics = [f"eval/{eval_set.name}" for eval_set in eval_sets_of(args)]
    if not any(metric == known or metric.startswith(f"{known}/") for known in metrics):
        raise ConfigError(
            f"the metric {metric!r} is of no evaluation set",
            where=flag,
            expected="eval/NAME with a NAME of --eval-prompt-data" + (f": {', '.join(metrics)}" if metrics else ""),
            hint=did_you_mean(metric, metrics),
        )
    if args.eval_interval is None:
        raise ConfigError(needs, where=flag, hint="add --eval-interval N")


PLACEHOLDER = "{rollout_id}"


def _check_modes(args: Args) -> None:
    """Raises ConfigError for a half run that lacks what it works on, or that could not do what it is asked to."""
    for name, flag in (
        ("save_debug_rollout_data", "--save-debug-rollout-data"),
        ("load_debug_rollout_data", "--load-debug-rollout-data"),
    ):
        template = getattr(args, name)
        if template is not None and PLACEHOLDER not in template:
            raise ConfigError(
                f"{template!r} names one file for all rollouts",
                where=flag,
                expected=f"a path with {PLACEHOLDER}, such as 'rollouts/{PLACEHOLDER}.safetensors'",
            )
    if train_only(args):
        _check_train_only(args)
    if rollout_only(args):
        for name in ("save", "load"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    "there is no trainer to save or to resume",
                    where=f"--debug-rollout-only and --{name}",
                    hint="to generate with a checkpoint's weights: --hf-checkpoint CHECKPOINT/hf",
                )


def _check_train_only(args: Args) -> None:
    if args.load_debug_rollout_data is None:
        raise ConfigError(
            "there are no rollouts to train on",
            where="--debug-train-only",
            hint="add --load-debug-rollout-data PATH, written by --save-debug-rollout-data",
        )
    if rollout_only(args):
        raise ConfigError("nothing is left of the run", where="--debug-rollout-only and --load-debug-rollout-data")
    if args.num_rollout is None and (args.data_source_path is not None or not args.prompt_data):
        raise ConfigError(
            "the number of recorded rollouts is not known", where="--num-rollout", hint="add --num-rollout N"
        )
    for name, flag in (
        ("save_debug_rollout_data", "--save-debug-rollout-data"),
        ("early_stop", "--early-stop"),
        ("keep_best", "--keep-best"),
    ):
        if getattr(args, name) is not None:
            raise ConfigError(f"{flag} needs rollouts, and none are generated", where=flag, hint=f"take {flag} out")


STREAM = "--stream-gradients"


def check_role_options(args: Args) -> None:
    """Raises ConfigError for roles without work, and for gradients that cannot be streamed, as far as options tell."""
    for model, what, hint in (
        ("ref", "reference", "add --use-kl-loss"),
        ("teacher", "teacher's", "add --use-opd --opd-teacher-load PATH"),
    ):
        if worker_counts(args)[model] and model not in frozen_models(args):
            raise ConfigError(
                f"no {what} log-probabilities are needed",
                where=flag_of(f"num_{model}_workers"),
                hint=f"{hint}, or take it out",
            )
    if args.num_advantage_workers and is_supervised(args):
        raise ConfigError("the supervised loss has no advantages", where="--num-advantage-workers", hint="take it out")
    if not args.stream_gradients:
        return
    if args.num_advantage_workers and uses_critic(args):
        raise ConfigError(
            "the critic computes the advantages that it streams gradients of",
            where=f"{STREAM} and --num-advantage-workers",
            hint="take one of them out",
        )
    for option, model in (("kl_coef", "ref"), ("use_opd", "teacher")):
        if getattr(args, option) and uses_critic(args) and model in frozen_models_of_trainer(args):
            raise ConfigError(
                f"the critic needs log-probabilities of the model {model!r} for each group, which the policy's trainer "
                "computes too late",
                where=f"{STREAM} and {flag_of(option)}",
                hint=f"add --num-{model}-workers 1",
            )
    if not Schedule.of(args).streams:
        raise ConfigError(
            f"--schedule {args.schedule} starts training after the last group",
            where=STREAM,
            hint="add --schedule pipelined",
        )
    if (steps := optimizer_steps(args)) > 1:
        several = "--num-steps-per-rollout" if args.num_steps_per_rollout > 1 else "--num-passes-per-rollout"
        raise ConfigError(
            f"{steps} optimizer steps a rollout: the first could start only at the end, with the groups that belong "
            "to it",
            where=f"{STREAM} and {several}",
            expected=f"{several} 1",
        )
    for what, flag, reference in whole_rollout_functions(args):
        if reference is not None:
            raise ConfigError(
                f"{what} sees the whole rollout, so no group is finished before all are",
                where=f"{STREAM} and {flag}",
                hint="take one of them out",
            )


def whole_rollout_functions(args: Args) -> list[tuple[str, str, str | None]]:
    """Plugins that see all groups of a rollout before any is finished: what they are, their flags, their values."""
    return [
        ("a sample filter", "--rollout-sample-filter-path", args.rollout_sample_filter_path),
        ("this function", "--rollout-all-samples-process-path", args.rollout_all_samples_process_path),
    ]


def notices(args: Args) -> list[str]:
    """One text for each thing to know; a run starts all the same.

    args: the flat options of a training run, with every core section, as ``check_options`` accepts them.
    """
    found = []
    trains = args.num_rollout != 0 and not rollout_only(args) and not is_supervised(args)
    cut = _truncating(args)
    if trains and cut and not args.replay_kept_tokens:
        given = ", ".join(f"{flag_of(name)} {value}" for name, value in cut)
        found.append(
            f"{given}: training samples come from a part of the distribution, but log-probabilities, the engine's and "
            "the trainer's, are of the whole; nothing corrects for it, so gradients are biased towards the tokens that "
            "are kept (--replay-kept-tokens renormalises both over these tokens; the same "
            "flags with --eval- touch evaluations only)"
        )
    built_in = is_built_in_rollout(args)
    if trains and built_in and not train_only(args) and _is_alone_in_its_group(args):
        found.append(
            "--n-samples-per-prompt 1: a reward minus the mean of its group is 0 where the group has one sample, so "
            "every advantage is 0 and rewards change nothing (take more samples a prompt, or "
            "--custom-reward-post-process-path or --custom-advantage-function-path of your own)"
        )
    generates = not train_only(args) and not (args.num_rollout == 0 and args.eval_function_path)
    if args.multimodal_keys and generates and built_in and generate_path(args) is None:
        found.append(
            f"--multimodal-keys {', '.join(args.multimodal_keys)}: the built-in generate function sends the prompt's "
            "text alone to the engine, so the model does not see these fields; rewards and filters do (a function of "
            "--custom-generate-function-path can send them)"
        )
    if Schedule.of(args).streams and not rollout_only(args):
        for what, flag, reference in whole_rollout_functions(args):
            if reference is not None:
                found.append(
                    f"--schedule {args.schedule} overlaps nothing with generation here: with {flag}, {what} sees the "
                    "whole rollout, so no group is finished before all are"
                )
    if args.lora_rank and args.lr < 5 * FULL_TRAINING_LR:
        found.append(
            f"--lr {args.lr:g} is one of full training: adapters learn with 5 to 20 times as much, "
            f"{5 * FULL_TRAINING_LR:g} or more"
        )
    return found + async_notices(args, [flag for _, flag, path in whole_rollout_functions(args) if path is not None])


def _is_alone_in_its_group(args: Args) -> bool:
    """Whether the built-in normalisation, estimator and loss, which nothing replaces, get groups of one sample."""
    own = (
        args.custom_reward_post_process_path,
        args.custom_convert_samples_to_train_data_path,
    )
    built_in = loss_of(args) in LOSSES and estimator_of(args)[1] in ALGORITHMS
    by_group = rewards_kind(args) is not Rewards.RAW and not args.use_opd
    return args.n_samples_per_prompt == 1 and built_in and by_group and not any(own)
