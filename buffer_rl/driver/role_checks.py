"""Checks before a run starts that roles have work, that gradients can be streamed, and that an advantage estimator sees
the rows and the fields that it reads: what depends on imported plugins, and so is in no section's check."""

from __future__ import annotations

from typing import Any

from buffer_rl.args import Args
from buffer_rl.kinds.kind import absent_of
from buffer_rl.kinds.marks import Scope, declared_scope, needs_of, scope_of, unit_of
from buffer_rl.kinds.trainer import HasValues, ReloadsReference, ReplaysExperts, Sleeps
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import flag_of
from buffer_rl.plan.algorithm import (
    estimator_needs,
    estimator_of,
    frozen_models,
    frozen_models_of_trainer,
    fused_roles,
    is_supervised,
    loss_flag,
    loss_of,
    own_roles,
    process_counts,
    uses_critic,
    uses_reference,
)
from buffer_rl.plan.counts import replicas_of, roles_in_resource
from buffer_rl.plan.roles import ADVANTAGE_FIELDS, CRITIC, FIELD_OF_MODEL, MODEL_OF_ROLE, PLACED, ROLES, worker_counts
from buffer_rl.plan.schedule import Schedule, rollout_only
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.trainer.options import REWARDS_TO_TRAIN_ON, STREAM

ADD_REFERENCE = "add --use-kl-loss (with --kl-loss-coef 0 for no KL penalty)"


def check_roles(args: Args, registry: PluginRegistry) -> None:
    """Raises ConfigError for roles without work, for gradients that cannot be streamed, and for an advantage estimator
    that would not see what it reads, as the plugins tell."""
    _check_own_roles(args, registry)
    _check_post_processors(args, registry)
    if args.num_actor_fwd_workers:
        why = "the supervised loss has no ratio" if is_supervised(args) else _why_no_old_log_probs(args)
        refuse(why, "--num-actor-fwd-workers: no old log-probabilities are needed: {}")
    if not is_supervised(args):
        _check_estimator(args, registry)
    if not rollout_only(args):
        _check_loss(args, registry)
        _check_trainer(args, registry)


def _check_own_roles(args: Args, registry: PluginRegistry) -> None:
    """Roles of ``--role-path`` wait for fields that come before theirs, and roles that are fused have processes; those
    of ``--resource`` are there."""
    own = own_roles(args, registry)
    unread = own and rollout_only(args)
    refuse(unread, "--role-path and --debug-rollout-only: no trainer reads what these roles add")
    unknown = min(roles_in_resource(args).keys() - own.keys(), default="")
    expected = f"roles among {', '.join(['actor', CRITIC, 'rollout (the engines)', *PLACED, *own])}"
    refuse(unknown, "--resource: there is no role '{}'", "--role-path adds a role of your own", expected)
    absent = CRITIC in replicas_of(args) and not uses_critic(args)
    refuse(absent, f"--resource: the role {CRITIC!r} is counted, and there is none", "add --use-critic")
    counts = process_counts(args, own)
    fused_roles(args, counts)
    added = {field for role in counts if role in ROLES for field in ROLES[role].fields}
    waiting = {name: set(row.needs) for name, (_, row) in own.items()}
    if "advantages" in counts:  # it waits for fields of the user's roles that the estimator declares
        estimator = registry.resolve("advantage", estimator_of(args)[1])
        waiting["advantages"] = {field for _, row in own.values() for field in row.fields} & needs_of(estimator)
        added -= ADVANTAGE_FIELDS
    if Schedule.of(args).streams and not args.stream_gradients:  # the trainer works beside the roles
        added |= {FIELD_OF_MODEL[model] for model in frozen_models_of_trainer(args)}
    fields = {name: row.fields for name, (_, row) in own.items()} | {"advantages": tuple(ADVANTAGE_FIELDS)}
    while ready := [name for name, needs in waiting.items() if needs <= added]:
        for name in ready:
            del waiting[name]
            added.update(fields[name])
    for reference, row in (own[name] for name in waiting if name in own):
        lacking, hint = sorted({*row.needs} - added), "give the role that adds it processes: --num-ref-workers 1"
        what = f"the role {reference!r} needs {lacking}, which no role with processes of its own adds before it"
        expected = f"{', '.join(sorted(added)) or 'nothing'}; columns of the rollout need not be named"
        refuse(True, f"--role-path: {what}", hint, expected)


def _check_estimator(args: Args, registry: PluginRegistry) -> None:
    flag, reference = estimator_of(args)
    estimator = registry.resolve("advantage", reference)
    for asked, other in ((args.num_advantage_workers, "--num-advantage-workers"), (args.stream_gradients, STREAM)):
        what = "advantages are normalised over a whole rollout, which is not there when they are computed"
        refuse(asked and args.normalize_advantages, f"{other} and --normalize-advantages: {what}")
        what = f"the advantage {reference!r} has scope 'rollout': it may need all groups of a rollout together"
        hint = "if it reads nothing beyond the rows of one prompt, declare it: @buffer_rl.kinds.marks.scoped('group')"
        refuse(asked and scope_of(estimator) is Scope.ROLLOUT, f"{other} and {flag}: {what}", hint)
    for name in sorted(estimator_needs(args, estimator)):
        who, where = f"the advantage {reference!r}", flag
        if name not in needs_of(estimator):
            by_teacher = args.use_opd and (not args.kl_coef or name == "teacher_log_probs")
            who, where = ("distillation", "--use-opd") if by_teacher else (who, f"--kl-coef and {flag}")
        _check_need(args, name, where, who)


def _check_loss(args: Args, registry: PluginRegistry) -> None:
    """The reference log-probabilities that a loss declares as needed must be there."""
    reference = loss_of(args)
    loss = registry.resolve("loss", reference)
    unit_of(loss)  # raises where it declares none that there is
    absent = "ref_log_probs" in needs_of(loss) and not uses_reference(args) and not _converts(args)
    what = f"the loss {reference!r} needs 'ref_log_probs', and without --use-kl-loss there is no reference"
    refuse(absent, f"{loss_flag(args)}: {what}", ADD_REFERENCE)


def _check_trainer(args: Args, registry: PluginRegistry) -> None:
    """A trainer that holds the reference model must be able to load it again, and one of a critic to compute values. (A
    factory's product is not known.)"""
    updates = args.ref_update_interval is not None and not args.num_ref_workers
    needed: dict[type[Any], tuple[object, str]] = {
        ReloadsReference: (updates and "--ref-update-interval", "cannot update its reference model"),
        HasValues: (uses_critic(args) and estimator_of(args)[0], "has no value model"),
        ReplaysExperts: (args.replay_routed_experts and "--replay-routed-experts", "does not replay experts"),
        Sleeps: (args.offload_train and "--offload-train", "cannot give its memory to the engines"),
    }
    for power, (flag, what) in needed.items():
        trainer = registry.resolve("trainer", args.train_backend) if flag else None
        absent = " and ".join(absent_of(trainer, power)) if isinstance(trainer, type) else ""
        hint = f"take it out, --train-backend torch, or add the method (see buffer_rl.kinds.trainer.{power.__name__})"
        what = f"the trainer {args.train_backend!r} {what}: it has no method {absent}"
        refuse(absent, f"{flag} and --train-backend: {what}", hint)


def _converts(args: Args) -> bool:
    """Whether a function of the user's makes the columns, and may give any field itself."""
    return args.custom_convert_samples_to_train_data_path is not None


def _check_need(args: Args, name: str, flag: str, who: str) -> None:
    """A field that the estimator declares as needed, or that an option needs, must be there when it is called."""
    what = f"{who} needs {name!r}"
    model = next((model for model, field in FIELD_OF_MODEL.items() if field == name), None)
    if model is None or (model == "teacher" and model not in frozen_models(args)):
        return  # a column that the rollout gives, or not: looked at when it comes
    absent, hint = {
        "ref": ("" if uses_reference(args) else "without --use-kl-loss there is no reference", ADD_REFERENCE),
        CRITIC: ("" if uses_critic(args) else "there is no critic", "add --use-critic"),
        "actor": (_why_no_old_log_probs(args), f"rollout_log_probs may serve in its place; or take {STREAM} out"),
    }.get(model, ("", ""))
    if absent and _converts(args):
        return
    refuse(absent, f"{flag}: {what}, which nothing computes: {{}}", hint)
    role = next((role for role, computed in MODEL_OF_ROLE.items() if computed == model), None)
    if role and worker_counts(args)[role]:
        return
    own, where = f"{flag_of(f'num_{role}_workers')} 1", f"--num-advantage-workers and {flag}"
    late = args.stream_gradients and model != CRITIC and uses_critic(args)
    why = f"{what} of each group, for the advantages of the critic, which has not the model {model!r}"
    refuse(late, f"{STREAM} and {flag}: {why}", f"add {own}, or take {STREAM} out")
    if not args.num_advantage_workers:
        return
    why = f"{where}: {what}, which the trainer computes, which waits for the advantages"
    refuse(args.stream_gradients, why, f"add {own}, or take --num-advantage-workers out")
    why = f"{where}: {what}, which the trainer computes after the advantages under --schedule {args.schedule}"
    hint = f"add {f'{own} or ' if role else ''}--schedule pipelined, or take --num-advantage-workers out"
    refuse(not Schedule.of(args).streams, why, hint)


def _why_no_old_log_probs(args: Args) -> str:
    """Why nothing computes old log-probabilities, whatever needs them; empty where they can be had."""
    if args.stream_gradients:
        return f"with {STREAM}, each group has one forward pass, whose log-probabilities are the old ones"
    return "--use-rollout-logprobs takes the engine's" if args.use_rollout_logprobs else ""


def _check_post_processors(args: Args, registry: PluginRegistry) -> None:
    """A rollout's groups are encoded one by one as they finish, whatever the schedule."""
    hint = "what needs all groups of a rollout can be an advantage estimator: --custom-advantage-function-path"
    for kind, name in zip(("reward_post_process", "samples_to_train_data"), REWARDS_TO_TRAIN_ON, strict=True):
        reference = getattr(args, name)
        whole = reference is not None and declared_scope(registry.resolve(kind, reference)) is Scope.ROLLOUT
        what = f"{reference!r} declares the scope 'rollout', and this function gets one group at a time"
        refuse(whole, f"{flag_of(name)}: {what}", hint)
