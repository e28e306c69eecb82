"""Checks before a run starts that roles have work, that gradients can be streamed, and that an advantage estimator sees
the rows and the fields that it reads.

What the options alone tell is checked with the others (``buffer_rl.driver.checks``); what depends on the plugins that
they name, here, once these are imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

from buffer_rl.driver.checks import STREAM
from buffer_rl.errors import ConfigError
from buffer_rl.kinds.kind import absent_of
from buffer_rl.kinds.marks import Scope, declared_scope, needs_of, scope_of, unit_of
from buffer_rl.kinds.trainer import HasValues, ReloadsReference, ReplaysExperts, Sleeps
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

if TYPE_CHECKING:
    from buffer_rl.args import Args

TESTED_TRANSFORMERS = (5, 23)
"""Their shards, and the plans by which they are made, are of this version."""


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
        _check_memory_options(args)
        check_delta(args)
        if args.fsdp_size != 1:
            _check_sharding(args)


def _check_own_roles(args: Args, registry: PluginRegistry) -> None:
    """Roles of ``--role-path`` wait for fields that come before theirs, and roles that are fused have processes; those
    of ``--resource`` are there."""
    own = own_roles(args, registry)
    if own and rollout_only(args):
        raise ConfigError("no trainer reads what these roles add", where="--role-path and --debug-rollout-only")
    if unknown := roles_in_resource(args).keys() - own.keys():
        raise ConfigError(
            f"there is no role {min(unknown)!r}",
            where="--resource",
            expected=f"roles among {', '.join(['actor', CRITIC, 'rollout (the engines)', *PLACED, *own])}",
            hint="--role-path adds a role of your own",
        )
    if CRITIC in replicas_of(args) and not uses_critic(args):
        hint = "add --use-critic, or take it out"
        raise ConfigError(f"the role {CRITIC!r} is counted, and there is none", where="--resource", hint=hint)
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
        raise ConfigError(
            f"the role {reference!r} needs {sorted(set(row.needs) - added)}, which no role with processes of its own "
            "adds before it",
            where="--role-path",
            expected=f"fields among {', '.join(sorted(added)) or 'none, as there is no such role'}; columns of the "
            "rollout are there without being named",
            hint="give the role that adds it processes: --num-ref-workers 1, or --role-path",
        )


def _check_estimator(args: Args, registry: PluginRegistry) -> None:
    flag, reference = estimator_of(args)
    estimator = registry.resolve("advantage", reference)
    for asked, other in ((args.num_advantage_workers, "--num-advantage-workers"), (args.stream_gradients, STREAM)):
        if asked and args.normalize_advantages:
            raise ConfigError(
                "advantages are normalised over a whole rollout, which is not there when they are computed",
                where=f"{other} and --normalize-advantages",
                hint="take one of the two out",
            )
        if asked and scope_of(estimator) is Scope.ROLLOUT:
            raise ConfigError(
                f"the advantage {reference!r} has scope 'rollout': it may need all groups of a rollout together",
                where=f"{other} and {flag}",
                expected="scope 'group' or 'row'",
                hint="if it reads nothing beyond the rows of one prompt, declare it: "
                "@buffer_rl.kinds.marks.scoped('group')",
            )
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
    if "ref_log_probs" in needs_of(loss) and not uses_reference(args) and not _converts(args):
        raise ConfigError(
            f"the loss {reference!r} needs 'ref_log_probs', and without --use-kl-loss there is no reference",
            where=loss_flag(args),
            hint="add --use-kl-loss (with --kl-loss-coef 0 for no KL penalty)",
        )


def _check_trainer(args: Args, registry: PluginRegistry) -> None:
    """A trainer that holds the reference model must be able to load it again, and one of a critic to compute values. (A
    factory's product is not known.)"""
    if args.ref_update_interval is not None and not uses_reference(args):
        raise ConfigError("there is no reference model", where="--ref-update-interval", hint="add --use-kl-loss")
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
        if isinstance(trainer, type) and (absent := absent_of(trainer, power)):
            raise ConfigError(
                f"the trainer {args.train_backend!r} {what}: it has no method {' and '.join(absent)}",
                where=f"{flag} and --train-backend",
                hint=f"add {other}, or the method (see buffer_rl.kinds.trainer.{power.__name__})",
            )


def _check_memory_options(args: Args) -> None:
    """What of the trainer's memory its backend decides, or a model of the user's own does not know."""
    if args.train_backend == "torch" and args.recompute_granularity == "selective":
        raise ConfigError(
            "the torch trainer recomputes whole layers",
            where="--recompute-granularity",
            expected="full",
        )
    own = {
        "--custom-model-provider-path": args.custom_model_provider_path,
        "--model-converter-path": args.model_converter_path,
    }
    given = [name for name, value in own.items() if value]
    if args.train_backend == "torch" and args.bf16 and given:
        raise ConfigError(
            f"a model of {given[0]} is trained in its own number format, float32",
            where="--bf16",
            hint=f"take it out, or {given[0]}",
        )
    if args.lora_dropout:
        raise ConfigError(
            "two passes over the same tokens would have other probabilities, so that no ratio begins at 1",
            where=f"--lora-dropout {args.lora_dropout:g}",
            hint="take it out",
        )
    if args.lora_publish == "adapter":
        _check_adapter_publication(args)
    if not args.lora_rank:
        if args.lora_adapter_path is not None:
            raise ConfigError("all weights would be trained", where="--lora-adapter-path", hint="add --lora-rank")
        return
    if given:
        raise ConfigError(
            f"adapters do not go with {given[0]}", where="--lora-rank", hint=f"take it out, or {given[0]}"
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "adapters are made by peft, which is not installed",
            where="--lora-rank",
            hint="pip install 'buffer-rl[scale]'",
        )


def _check_adapter_publication(args: Args) -> None:
    """What engines that keep their base, and read adapters from a folder, do not go with."""
    where = "--lora-publish adapter"
    if not args.lora_rank:
        raise ConfigError("all weights would be trained, and no adapter", where=where, hint="add --lora-rank")
    refused = {
        f"--weight-sync-mode {args.weight_sync_mode}": args.weight_sync_mode != "disk",
        "--offload-rollout": args.offload_rollout,
        "--check-weight-update-equal": args.check_weight_update_equal,
    }
    reasons = ("engines read adapters from a folder", "an engine's base goes with its memory", "the base is not sent")
    for (flag, is_given), reason in zip(refused.items(), reasons, strict=True):
        if is_given:
            hint = f"take {flag} out, or {where}"
            raise ConfigError(f"{reason}: it does not go with {flag}", where=where, hint=hint)


def check_delta(args: Args) -> None:
    """Raises ConfigError for ``--publish-delta`` where nobody could apply what changed, or nothing would be saved."""
    if not args.publish_delta:
        return
    refused = {
        f"--weight-sync-mode {args.weight_sync_mode}": (
            args.weight_sync_mode not in ("disk", "distributed"),
            "it sends all weights, through memory or in its own way",
        ),
        f"--rollout-engine {args.rollout_engine}": (
            args.rollout_engine != "embedded" and not args.engine_urls,
            "its engines take whole tensors",
        ),
        "--lora-publish adapter": (args.lora_publish == "adapter", "adapters are all that is sent"),
    }
    for flag, (is_given, reason) in refused.items():
        if is_given:
            raise ConfigError(f"{flag}: {reason}", where="--publish-delta", hint="take it out")


def _check_sharding(args: Args) -> None:
    """What a model that is split over ranks needs, and what does not know that it is."""
    size = args.num_train_ranks if args.fsdp_size == -1 else args.fsdp_size
    if not size or args.num_train_ranks % size:
        raise ConfigError(
            f"{args.num_train_ranks} ranks cannot be split into copies of {size}",
            where="--fsdp-size and --num-train-ranks",
            expected="a divisor of the number of ranks, or -1 for all of them",
        )
    others = {
        "--custom-model-provider-path": args.custom_model_provider_path,
        "--model-converter-path": args.model_converter_path,
        "a critic": estimator_of(args)[0] if uses_critic(args) else None,
    }
    if refused := [name for name, value in others.items() if value is not None]:
        raise ConfigError(
            f"a model that is split over ranks does not go with {', '.join(refused)}",
            where="--fsdp-size",
            hint="take it out, or --fsdp-size: each rank then has the whole model",
        )
    if size > 1 and importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            "transformers reads a part of a model with accelerate, which is not installed",
            where="--fsdp-size",
            hint="pip install 'buffer-rl[scale]'",
        )
    version = importlib.metadata.version("transformers")
    if tuple(map(int, version.split(".")[:2])) < TESTED_TRANSFORMERS:
        raise ConfigError(
            f"transformers {version} is older than what models were split with",
            where="--fsdp-size",
            expected=f"{'.'.join(map(str, TESTED_TRANSFORMERS))} or later",
        )


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
    if absent:
        if _converts(args):
            return
        raise ConfigError(f"{what}, which nothing computes: {absent}", where=flag, hint=hint)
    if role and worker_counts(args)[role]:
        return
    if args.stream_gradients and model != CRITIC and uses_critic(args):
        raise ConfigError(
            f"{what} of each group, for the advantages of the critic, which has not the model {model!r}",
            where=f"{STREAM} and {flag}",
            hint=f"add {flag_of(f'num_{role}_workers')} 1, or take {STREAM} out",
        )
    if not args.num_advantage_workers:
        return
    own = f"{flag_of(f'num_{role}_workers')} 1 or " if role else ""
    if args.stream_gradients:
        raise ConfigError(
            f"{what}, which the trainer computes, which waits for the advantages",
            where=f"--num-advantage-workers and {flag}",
            hint=f"add {flag_of(f'num_{role}_workers')} 1, or take --num-advantage-workers out",
        )
    if not Schedule.of(args).streams:
        raise ConfigError(
            f"{what}, which the trainer computes after the advantages under --schedule {args.schedule}",
            where=f"--num-advantage-workers and {flag}",
            hint=f"add {own}--schedule pipelined, or take --num-advantage-workers out",
        )


def _why_no_old_log_probs(args: Args) -> str:
    """Why nothing computes old log-probabilities, whatever needs them; empty where they can be had."""
    if args.stream_gradients:
        return f"with {STREAM}, each group has one forward pass, whose log-probabilities are the old ones"
    return "--use-rollout-logprobs takes the engine's" if args.use_rollout_logprobs else ""


def _check_post_processors(args: Args, registry: PluginRegistry) -> None:
    """A rollout's groups are encoded one by one as they finish, whatever the schedule."""
    for kind, flag, reference in (
        ("reward_post_process", "--custom-reward-post-process-path", args.custom_reward_post_process_path),
        (
            "samples_to_train_data",
            "--custom-convert-samples-to-train-data-path",
            args.custom_convert_samples_to_train_data_path,
        ),
    ):
        if reference is not None and declared_scope(registry.resolve(kind, reference)) is Scope.ROLLOUT:
            raise ConfigError(
                f"{reference!r} declares the scope 'rollout', and this function gets one group at a time",
                where=flag,
                expected="scope 'group', or none declared",
                hint="what needs all groups of a rollout can be an advantage estimator: "
                "--custom-advantage-function-path",
            )


def _check_actor_fwd(args: Args) -> None:
    why = "the supervised loss has no ratio" if is_supervised(args) else _why_no_old_log_probs(args)
    if why:
        raise ConfigError(
            f"no old log-probabilities are needed: {why}", where="--num-actor-fwd-workers", hint="take it out"
        )
