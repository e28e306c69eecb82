"""What must hold for roles to have work, and for gradients to be streamed: said before anything starts.

What the options alone tell is checked with the others (``check_role_options``); what depends on the plugins that they
name, once these are imported (``check_roles``).
"""

from __future__ import annotations

from typing import Any

from buffer_rl.driver.schedule import Schedule
from buffer_rl.errors import ConfigError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.scope import Scope, scope_of

STREAM = "--stream-gradients"
ACCUMULATING = ("accumulate", "finish_accumulation")
"""What a trainer needs beyond ``buffer_rl.contracts.Trainer`` to stream gradients."""


def is_supervised(args: Any) -> bool:
    """Whether the loss is the supervised one, which has neither advantages nor ratios."""
    return bool(args.loss_type == "sft_loss" and args.custom_loss_function_path is None)


def needs_old_log_probs(args: Any, rollouts_use_engine: bool) -> bool:
    """Whether the loss takes a ratio to log-probabilities of the trainer's own: for rows that an engine sampled, which
    computes a little otherwise, and for several steps on a rollout; not for the supervised loss, which has none.

    With streamed gradients each group has one forward pass, by the weights that sampled it: its own log-probabilities
    are the old ones."""
    if args.stream_gradients or args.use_rollout_logprobs:
        return False
    return rollouts_use_engine or (args.num_steps_per_rollout > 1 and not is_supervised(args))


def check_role_options(args: Any) -> None:
    """Raises ConfigError for roles without work, and for gradients that cannot be streamed, as far as options tell."""
    if args.num_ref_workers and not args.use_kl_loss:
        raise ConfigError(
            "no reference log-probabilities are needed",
            where="--num-ref-workers",
            hint="add --use-kl-loss, or take it out",
        )
    if args.num_advantage_workers and is_supervised(args):
        raise ConfigError("the supervised loss has no advantages", where="--num-advantage-workers", hint="take it out")
    if not args.stream_gradients:
        return
    if not Schedule.named(args.schedule).streams:
        raise ConfigError(
            f"--schedule {args.schedule} starts training after the last group",
            where=STREAM,
            hint="add --schedule pipelined",
        )
    if args.num_steps_per_rollout > 1:
        raise ConfigError(
            f"{args.num_steps_per_rollout} optimizer steps a rollout: which groups belong to the first is known only "
            "at the end",
            where=f"{STREAM} and --num-steps-per-rollout",
            expected="--num-steps-per-rollout 1",
        )
    for what, flag, reference in whole_rollout_functions(args):
        if reference is not None:
            raise ConfigError(
                f"{what} sees the whole rollout, so no group is finished before all are",
                where=f"{STREAM} and {flag}",
                hint="take one of them out",
            )


def whole_rollout_functions(args: Any) -> list[tuple[str, str, str | None]]:
    """Plugins that see all groups of a rollout before any is finished: what they are, their flags, their values."""
    return [
        ("a sample filter", "--rollout-sample-filter-path", args.rollout_sample_filter_path),
        ("this function", "--rollout-all-samples-process-path", args.rollout_all_samples_process_path),
    ]


def check_roles(args: Any, registry: PluginRegistry) -> None:
    """Raises ConfigError for roles without work, and for gradients that cannot be streamed, as the plugins tell."""
    if args.num_actor_fwd_workers:
        _check_actor_fwd(args, registry)
    estimator = args.custom_advantage_function_path or args.advantage_estimator
    flag = "--custom-advantage-function-path" if args.custom_advantage_function_path else "--advantage-estimator"
    if args.num_advantage_workers:
        _require_group_scope(registry, "advantage", estimator, f"--num-advantage-workers and {flag}")
    if not args.stream_gradients:
        return
    if not is_supervised(args):
        _require_group_scope(registry, "advantage", estimator, f"{STREAM} and {flag}")
    flag = "--custom-loss-function-path" if args.custom_loss_function_path else "--loss-type"
    _require_group_scope(registry, "loss", args.custom_loss_function_path or args.loss_type, f"{STREAM} and {flag}")
    backend = registry.resolve("trainer", args.train_backend)
    if absent := [name for name in ACCUMULATING if not hasattr(backend, name)]:
        raise ConfigError(
            f"the trainer {args.train_backend!r} cannot sum gradients before the step's totals are known: it has no "
            f"{' and no '.join(absent)}",
            where=f"{STREAM} and --train-backend",
            expected=f"a trainer with {' and '.join(ACCUMULATING)} (see buffer_rl.contracts.Trainer)",
        )


def _check_actor_fwd(args: Any, registry: PluginRegistry) -> None:
    rollout = registry.resolve("rollout", args.rollout_function_path)
    if needs_old_log_probs(args, bool(getattr(rollout, "uses_engine", True))):
        return
    if args.stream_gradients:
        why = f"with {STREAM}, each group has one forward pass, whose log-probabilities are the old ones"
    elif args.use_rollout_logprobs:
        why = "--use-rollout-logprobs takes the engine's"
    else:
        why = f"{args.rollout_function_path!r} never asks the engine, and there is one optimizer step a rollout"
    raise ConfigError(
        f"no old log-probabilities are needed: {why}", where="--num-actor-fwd-workers", hint="take it out"
    )


def _require_group_scope(registry: PluginRegistry, kind: str, reference: str, where: str) -> None:
    if scope_of(registry.resolve(kind, reference)) is Scope.GROUP:
        return
    sums = {
        "advantage": "it reads nothing beyond the rows of one prompt",
        "loss": "it is a sum over rows, divided by the totals that --loss-agg-mode names,",
    }
    raise ConfigError(
        f"the {kind} {reference!r} has scope 'rollout': it may need all groups of a rollout together",
        where=where,
        expected="scope 'group'",
        hint=f"if {sums[kind]} declare it: @buffer_rl.scope.scoped('group')",
    )
