"""Checks before a run starts that roles have work, that gradients can be streamed, and that an advantage estimator sees
the rows and the fields that it reads: what depends on imported plugins, and so is in no section's check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from buffer_rl.errors import ConfigError
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
from buffer_rl.train.options import STREAM

if TYPE_CHECKING:
    from buffer_rl.args import Args


def check_roles(args: Args, registry: PluginRegistry) -> None:
    """Raises ConfigError for roles without work, for gradients that cannot be streamed, and for an advantage estimator
    that would not see what it reads, as the plugins tell."""
    _check_own_roles(args, registry)
    _check_post_processors(args, registry)
    if args.num_actor_fwd_workers:
        _check_actor_fwd(args)
    if not is_supervised(args):
        _check_estimator(args, registry)
    if not rollout_only(args):
        _check_loss(args, registry)
        _check_trainer(args, registry)


def _check_own_roles(args: Args, registry: PluginRegistry) -> None:
    """Roles of ``--role-path`` wait for fields that come before theirs, and roles that are fused have processes; those
    of ``--resource`` are there."""
    own, where = own_roles(args, registry), "--role-path and --debug-rollout-only"
    refuse(own and rollout_only(args), "no trainer reads what these roles add", where)
    unknown = min(roles_in_resource(args).keys() - own.keys(), default="")
    expected = f"roles among {', '.join(['actor', CRITIC, 'rollout (the engines)', *PLACED, *own])}"
    refuse(unknown, "there is no role '{}'", "--resource", expected, "--role-path adds a role of your own")
    what, hint = f"the role {CRITIC!r} is counted, and there is none", "add --use-critic, or take it out"
    refuse(CRITIC in replicas_of(args) and not uses_critic(args), what, "--resource", hint=hint)
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
        expected = f"fields among {', '.join(sorted(added)) or 'none, as there is no such role'}; columns of the "
        raise ConfigError(
            f"the role {reference!r} needs {sorted(set(row.needs) - added)}, which no role with processes of its own "
            "adds before it",
            where="--role-path",
            expected=f"{expected}rollout are there without being named",
            hint="give the role that adds it processes: --num-ref-workers 1, or --role-path",
        )


def _check_estimator(args: Args, registry: PluginRegistry) -> None:
    flag, reference = estimator_of(args)
    estimator = registry.resolve("advantage", reference)
    for asked, other in ((args.num_advantage_workers, "--num-advantage-workers"), (args.stream_gradients, STREAM)):
        what = "advantages are normalised over a whole rollout, which is not there when they are computed"
        where = f"{other} and --normalize-advantages"
        refuse(asked and args.normalize_advantages, what, where, hint="take one of the two out")
        what = f"the advantage {reference!r} has scope 'rollout': it may need all groups of a rollout together"
        hint = "if it reads nothing beyond the rows of one prompt, declare it: @buffer_rl.kinds.marks.scoped('group')"
        whole = asked and scope_of(estimator) is Scope.ROLLOUT
        refuse(whole, what, f"{other} and {flag}", "scope 'group' or 'row'", hint)
    declared = needs_of(estimator)
    for name in sorted(estimator_needs(args, estimator)):
        who = f"the advantage {reference!r}"
        if name not in declared:
            by_teacher = args.use_opd and (not args.kl_coef or name == "teacher_log_probs")
            who, flag = ("distillation", "--use-opd") if by_teacher else (who, f"--kl-coef and {flag}")
        _check_need(args, registry, name, flag, who)


def _check_loss(args: Args, registry: PluginRegistry) -> None:
    """The reference log-probabilities that a loss declares as needed must be there."""
    reference = loss_of(args)
    loss = registry.resolve("loss", reference)
    unit_of(loss)  # raises where it declares none that there is
    absent = "ref_log_probs" in needs_of(loss) and not uses_reference(args) and not _converts(args)
    what = f"the loss {reference!r} needs 'ref_log_probs', and without --use-kl-loss there is no reference"
    hint = "add --use-kl-loss (with --kl-loss-coef 0 for no KL penalty)"
    refuse(absent, what, loss_flag(args), hint=hint)


def _check_trainer(args: Args, registry: PluginRegistry) -> None:
    """A trainer that holds the reference model must be able to load it again, and one of a critic to compute values. (A
    factory's product is not known.)"""
    needed: list[tuple[type[Any], str, str, str]] = []
    if args.ref_update_interval is not None and not args.num_ref_workers:
        what, flag = "cannot update its reference model", "--ref-update-interval"
        needed.append((ReloadsReference, what, flag, "--num-ref-workers 1"))
    if uses_critic(args):
        needed.append((HasValues, "has no value model", estimator_of(args)[0], "an estimator without a critic"))
    if args.replay_routed_experts:
        other = "--train-backend torch"
        needed.append((ReplaysExperts, "does not replay the engine's experts", "--replay-routed-experts", other))
    if args.offload_train:
        needed.append((Sleeps, "cannot give its memory to the engines", "--offload-train", "--train-backend torch"))
    for power, what, flag, other in needed:
        trainer = registry.resolve("trainer", args.train_backend)
        absent = " and ".join(absent_of(trainer, power)) if isinstance(trainer, type) else ""
        hint = f"add {other}, or the method (see buffer_rl.kinds.trainer.{power.__name__})"
        what = f"the trainer {args.train_backend!r} {what}: it has no method {absent}"
        refuse(absent, what, f"{flag} and --train-backend", hint=hint)


def _converts(args: Args) -> bool:
    """Whether a function of the user's makes the columns, and may give any field itself."""
    return args.custom_convert_samples_to_train_data_path is not None


def _check_need(args: Args, registry: PluginRegistry, name: str, flag: str, who: str) -> None:
    """A field that the estimator declares as needed, or that an option needs, must be there when it is called."""
    what = f"{who} needs {name!r}"
    model = next((model for model, field in FIELD_OF_MODEL.items() if field == name), None)
    if model is None or (model == "teacher" and model not in frozen_models(args)):
        return  # a column that the rollout gives, or not: looked at when it comes
    role = next((role for role, computed in MODEL_OF_ROLE.items() if computed == model), None)
    absent, hint = "", ""
    if model == "ref":
        absent = "" if uses_reference(args) else "without --use-kl-loss there is no reference"
        hint = "add --use-kl-loss (with --kl-loss-coef 0 for no KL term in the loss)"
    elif model == CRITIC:
        absent = "" if uses_critic(args) else "there is no critic"
        hint = "add --use-critic, or a function of --custom-convert-samples-to-train-data-path that gives them"
    elif model == "actor":
        absent = _why_no_old_log_probs(args)
        hint = "take it out of needs; rollout_log_probs, the engine's, may serve in its place"
        hint += f"; or take {STREAM} out" if args.stream_gradients else ""
    if absent and _converts(args):
        return
    refuse(absent, f"{what}, which nothing computes: {{}}", flag, hint=hint)
    if role and worker_counts(args)[role]:
        return
    own, where = f"{flag_of(f'num_{role}_workers')} 1", f"--num-advantage-workers and {flag}"
    late = args.stream_gradients and model != CRITIC and uses_critic(args)
    why = f"{what} of each group, for the advantages of the critic, which has not the model {model!r}"
    refuse(late, why, f"{STREAM} and {flag}", hint=f"add {own}, or take {STREAM} out")
    if not args.num_advantage_workers:
        return
    why = f"{what}, which the trainer computes, which waits for the advantages"
    refuse(args.stream_gradients, why, where, hint=f"add {own}, or take --num-advantage-workers out")
    why = f"{what}, which the trainer computes after the advantages under --schedule {args.schedule}"
    hint = f"add {f'{own} or ' if role else ''}--schedule pipelined, or take --num-advantage-workers out"
    refuse(not Schedule.of(args).streams, why, where, hint=hint)


def _why_no_old_log_probs(args: Args) -> str:
    """Why nothing computes old log-probabilities, whatever needs them; empty where they can be had."""
    if args.stream_gradients:
        return f"with {STREAM}, each group has one forward pass, whose log-probabilities are the old ones"
    return "--use-rollout-logprobs takes the engine's" if args.use_rollout_logprobs else ""


def _check_post_processors(args: Args, registry: PluginRegistry) -> None:
    """A rollout's groups are encoded one by one as they finish, whatever the schedule."""
    hint = "what needs all groups of a rollout can be an advantage estimator: --custom-advantage-function-path"
    named = {
        "reward_post_process": "custom_reward_post_process_path",
        "samples_to_train_data": "custom_convert_samples_to_train_data_path",
    }
    for kind, name in named.items():
        reference = getattr(args, name)
        whole = reference is not None and declared_scope(registry.resolve(kind, reference)) is Scope.ROLLOUT
        what = f"{reference!r} declares the scope 'rollout', and this function gets one group at a time"
        refuse(whole, what, flag_of(name), "scope 'group', or none declared", hint)


def _check_actor_fwd(args: Args) -> None:
    why = "the supervised loss has no ratio" if is_supervised(args) else _why_no_old_log_probs(args)
    refuse(why, "no old log-probabilities are needed: {}", "--num-actor-fwd-workers", hint="take it out")
