"""Who computes reference and old log-probabilities, advantages and gradients, and when: from options to a plan.

lockstep     after the last group: the trainer, or roles with processes of their own
pipelined    each finished group at once: the same, while the rest of the rollout is still generated
"""

from __future__ import annotations

from typing import Any

from buffer_rl.cluster.resources import role_gpus
from buffer_rl.driver.role_calls import RolePlan
from buffer_rl.driver.role_checks import needs_old_log_probs
from buffer_rl.train.worker import RoleGroup, start_role

FIELDS_OF_ROLE = {
    "ref": ("ref_log_probs",),
    "actor_fwd": ("old_log_probs",),
    "advantages": ("advantages", "returns"),
}
"""What each role with processes of its own adds; the role's name is that of its reading task."""


def role_plan(args: Any, rollouts_use_engine: bool) -> RolePlan:
    """The plan that the options mean."""
    own = tuple(role for role, count in _worker_counts(args).items() if count)
    models = []
    if args.use_kl_loss and "ref" not in own:
        models.append("ref")
    if needs_old_log_probs(args, rollouts_use_engine) and "actor_fwd" not in own:
        models.append("actor")
    return RolePlan(
        own=own,
        trainer_models=tuple(models),
        given=tuple(name for role in own for name in FIELDS_OF_ROLE[role]),
        stream_gradients=args.stream_gradients,
        max_restarts=args.role_max_restarts,
    )


def start_roles(args: Any, plan: RolePlan, args_text: str, buffer: Any, log_dir: str) -> dict[str, RoleGroup]:
    """Start the roles with processes of their own."""
    counts = _worker_counts(args)
    gpus = role_gpus(args)
    return {
        role: start_role(role, counts[role], args, args_text, buffer, log_dir, 0.0 if role == "advantages" else gpus)
        for role in plan.own
    }


def _worker_counts(args: Any) -> dict[str, int]:
    return {
        "ref": args.num_ref_workers,
        "actor_fwd": args.num_actor_fwd_workers,
        "advantages": args.num_advantage_workers,
    }
