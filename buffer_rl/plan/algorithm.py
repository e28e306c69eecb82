"""What the options ask of the roles (``buffer_rl.plan.roles``): which models, fields and estimators a run has.

Without torch and Ray, so that options can be checked before either is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffer_rl.args import Args
from buffer_rl.errors import PluginError
from buffer_rl.kinds.marks import Scope, declared_scope, needs_of, scope_of
from buffer_rl.options.checks import refuse
from buffer_rl.plan.algorithms import algorithm_of
from buffer_rl.plan.counts import ENGINE, ROLE_ALIASES, optimizer_steps, replicas_of
from buffer_rl.plan.roles import (
    ACTOR,
    CRITIC,
    DEDICATED,
    DERIVED_FIELDS,
    MODEL_FIELDS,
    ROLES,
    SAMPLED_FIELDS,
    Role,
    worker_counts,
)
from buffer_rl.plugin.calls import place
from buffer_rl.plugin.registry import PluginRegistry

TAKEN = {*ROLES, *ROLE_ALIASES, ENGINE, "buffer", "storage", "data_source", "record", "train_log_probs", "values"}
"""Names that no role of ``--role-path`` may have: those of other processes, and of the trainer's reading tasks."""

REFERENCE_FOLDER = "ref"
"""The folder of the reference model's weights in a checkpoint, once ``--ref-update-interval`` has changed them."""


def checkpoint_folder(role: str) -> str:
    """The folder of a trained role's ranks in a checkpoint."""
    return "trainer" if role == ACTOR else role


def uses_critic(args: Args) -> bool:
    """Whether a value model is trained beside the policy."""
    return (args.use_critic or algorithm_of(estimator_of(args)[1]).critic) and not is_supervised(args)


def role_args(args: Args, role: str) -> Any:
    """The options as a trained role sees them: the critic's learning rate is its own, it measures no KL divergence
    that a coefficient could follow, and it has no adapters."""
    if role != CRITIC:
        return args
    lr = args.lr if args.critic_lr is None else args.critic_lr
    own = {"lr": lr, "lr_warmup_iters": args.critic_lr_warmup_iters, "kl_target": None, "lora_rank": 0}
    return args.model_copy(update=own)


def is_supervised(args: Args) -> bool:
    """Whether the loss is the supervised one, which has neither advantages nor ratios."""
    return loss_of(args) == "sft_loss"


def loss_of(args: Args) -> str:
    """The name or path of the run's loss: the user's own, the one that is asked for, or that of the algorithm."""
    named: str | None = args.custom_loss_function_path or args.loss_type
    return named or algorithm_of(estimator_of(args)[1]).loss


def loss_flag(args: Args) -> str:
    """The flag by which a run's loss is named, or would be."""
    return "--custom-loss-function-path" if args.custom_loss_function_path else "--loss-type"


def estimator_of(args: Args) -> tuple[str, str]:
    """The flag that names the run's advantage estimator, and the reference."""
    if args.custom_advantage_function_path:
        return "--custom-advantage-function-path", args.custom_advantage_function_path
    return "--advantage-estimator", args.advantage_estimator


def uses_reference(args: Args) -> bool:
    """Whether log-probabilities under the reference model are computed: for a penalty in the loss or in the reward."""
    return bool(args.use_kl_loss or args.kl_coef)


def frozen_models(args: Args) -> list[str]:
    """Models beside the actor whose log-probabilities the run computes; each is a role where it has processes."""
    used = {"ref": uses_reference(args), "teacher": args.use_opd and args.opd_teacher_load is not None}
    return [model for model, is_used in used.items() if is_used]


def frozen_models_of_trainer(args: Args) -> list[str]:
    """Those of ``frozen_models`` that have no processes of their own."""
    return [model for model in frozen_models(args) if not worker_counts(args)[model]]


def adapted_option(args: Args) -> str | None:
    """The KL coefficient that ``--kl-target`` adapts, in the token rewards or in the loss; None where both are fixed.
    Options with both are refused."""
    if args.kl_target is None:
        return None
    return "kl_coef" if args.kl_coef else "kl_loss_coef"


def estimator_scope(args: Args, estimator: object) -> Scope:
    """The scope of a run's advantages: the estimator's, and of a whole rollout where they are normalised over it."""
    return Scope.ROLLOUT if args.normalize_advantages else scope_of(estimator)


def estimator_needs(args: Args, estimator: object) -> frozenset[str]:
    """The columns that a run's estimator needs: those that it declares, and for a KL penalty in the token rewards or
    for distillation the log-probabilities under the reference or the teacher, and under the policy that sampled."""
    needs = needs_of(estimator)
    if args.kl_coef and "kl_coef" in algorithm_of(estimator_of(args)[1]).options:
        needs |= {"ref_log_probs", policy_field(args)}
    if args.turn_rewards:
        needs |= {"turn_rewards"}
    if args.use_opd:
        needs |= {"teacher_log_probs", policy_field(args)}
    return needs


def policy_field(args: Args) -> str:
    """The column of log-probabilities under the policy that sampled the tokens, for the KL penalty in the reward and
    for distillation. The trainer's old ones are of the step's weights, which sampled them only if none are older."""
    sampled = args.use_rollout_logprobs or args.stream_gradients or trains_on_older(args)
    return "rollout_log_probs" if sampled else "old_log_probs"


def trains_on_older(args: Args) -> bool:
    """Whether tokens may be of older weights than those that are trained (see ``plan.schedule.Schedule``)."""
    return bool(args.schedule == "one-step-off" or (args.schedule == "async" and args.max_staleness != 0))


def old_log_probs_pass(args: Args, estimator: object, backend: object = None) -> str:
    """What of the options asks for old log-probabilities before the first optimizer step on a rollout, and so for a
    forward pass of their own by the trainer or by ``--num-actor-fwd-workers``; empty where nothing does.

    Nothing does where a rollout has one step: its own forward pass is by the weights that the step starts from, so its
    log-probabilities, without a gradient, are the old ones (``buffer_rl.trainer.objective``). With streamed gradients
    there is one step; ``--use-rollout-logprobs`` takes the engine's; the supervised loss has no ratio.

    backend: what ``--train-backend`` names, where it is not the default one (see
    ``buffer_rl.kinds.trainer.Trainer``)."""
    if args.stream_gradients or args.use_rollout_logprobs:
        return ""
    has_ratio = not is_supervised(args)
    asking = {
        "--num-actor-fwd-workers": args.num_actor_fwd_workers > 0,
        "several optimizer steps on a rollout": has_ratio and optimizer_steps(args) > 1,
        "an advantage estimator that needs old_log_probs": has_ratio
        and "old_log_probs" in estimator_needs(args, estimator),
        "an advantage estimator that does not declare what it reads": has_ratio and declared_scope(estimator) is None,
        "a trainer backend that may read the column": getattr(backend, "reads_old_log_probs", backend is not None),
    }
    return next((reason for reason, asks in asking.items() if asks), "")


def own_roles(args: Args, registry: PluginRegistry) -> dict[str, tuple[str, Role]]:
    """The roles of ``--role-path``, by name: each its reference and its row.

    Raises PluginError for a class without a row, ConfigError for names and fields that another role has."""
    found: dict[str, tuple[str, Role]] = {}
    taken = {*SAMPLED_FIELDS, *DERIVED_FIELDS, *MODEL_FIELDS}
    for reference in args.role_path:
        row = getattr(registry.resolve("role", reference), "role", None)
        if not (isinstance(row, Role) and row.fields):
            expected = "role = buffer_rl.plan.roles.Role(name=..., fields=(...,)) in the class"
            raise PluginError("it has no row of the table of roles", where=place("role", reference), expected=expected)
        where, names = f"--role-path: {reference!r}", {*TAKEN, *found}
        expected = f"a Python name that is none of these: {', '.join(sorted(names))}"
        refuse(row.name in names or not row.name.isidentifier(), f"{where} is named {row.name!r}", expected=expected)
        refuse(row.processes < 1, f"{where} has {row.processes} processes", expected="1 or more")
        twice = sorted(taken.intersection(row.fields))
        refuse(twice, f"{where} adds {twice}, as another role does", "name the field otherwise")
        taken.update(row.fields)
        found[row.name] = (reference, row)
    return found


def process_counts(args: Args, own: Mapping[str, tuple[str, Role]]) -> dict[str, int]:
    """Processes of each role that has some; the user's ``own`` come after the others, and ``--resource`` counts them
    before their rows do."""
    counts = {name: count for name, count in worker_counts(args).items() if count and name in DEDICATED}
    replicas = replicas_of(args)
    return counts | {name: replicas.get(name, (row.processes, 0))[0] for name, (_, row) in own.items()}


def fused_roles(args: Args, counts: Mapping[str, int]) -> list[list[str]]:
    """The roles that share processes, and each other one alone, in the order of ``counts``, of their processes.

    Raises ConfigError for a role that has no processes, stands twice, or has not as many as those that it is fused
    with."""
    groups = [text.split("+") for text in args.fuse_roles]
    names = [name for group in groups for name in group]
    for name in names:
        what = "stands twice" if name in counts else "has no processes of its own"
        expected = f"each of these at most once: {', '.join(counts) or 'there are none'}"
        wrong = name not in counts or names.count(name) > 1
        refuse(wrong, f"--fuse-roles: the role {name!r} {what}", expected=expected)
    for group in groups:
        what = f"--fuse-roles: their processes are {', '.join(f'{name} {counts[name]}' for name in group)}"
        refuse(len({counts[name] for name in group}) > 1, what, expected="as many for each of them")
    return [*groups, *([name] for name in counts if name not in names)]
