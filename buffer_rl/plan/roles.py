"""The roles of a run, one row each: what a role computes, with which model, in how many processes, and how it is shown.

Pure data, without Ray and torch: the options, their checks, the plan, the Buffer's fields and the timeline derive from
it. A role that adds a field to the rows of a rollout is a row and a class (``FieldRole``), which ``--role-path`` names;
the built-in ones are rows here and stages of ``buffer_rl.trainer.role_worker``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from buffer_rl.args import Args

ACTOR = "train"
"""The trained role whose weights are published, by the name that the driver calls it with."""

CRITIC = "critic"
"""The trained role that has the value model, of that name too."""


class Restart(StrEnum):
    """What follows the death of one of a role's processes: they are replaced in place, or all processes of the run are
    started again from the newest checkpoint."""

    IN_PLACE = "in_place"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """name: also that of its reading task. title, colour: of its work on the timeline; colours are those of the page's
    style. model: whose forward pass it makes. fields: that it adds to rows; of a model, the one that holds its
    log-probabilities or values. needs: fields that it waits for, beside ``SAMPLED_FIELDS``. workers: the option that
    counts its processes; without them, or where it has none, the trainer does its work. asked_by: the option without
    which there are none, whatever their count. called_by: the role whose processes call it; the others read rows from
    the Buffer. processes: their number where the role is the user's own. restart: after the death of one; in place as
    often as ``--role-max-restarts`` says, and global from then on."""

    name: str
    title: str = ""
    colour: int = 7
    model: str = ""
    fields: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    workers: str = ""
    asked_by: str = ""
    called_by: str = ""
    processes: int = 1
    restart: Restart = Restart.IN_PLACE


ROLES = {
    role.name: role
    for role in (
        Role(name="rollout", title="generation", colour=0),
        Role(name="reward", title="scores of the reward model", colour=11, model="reward", called_by="rollout",
             workers="num_reward_workers", asked_by="rm_model"),
        Role(name="ref", title="reference log-probabilities", colour=1, model="ref", fields=("ref_log_probs",),
             workers="num_ref_workers"),
        Role(name="teacher", title="teacher's log-probabilities", colour=8, model="teacher",
             fields=("teacher_log_probs",), workers="num_teacher_workers"),
        Role(name="actor_fwd", title="old log-probabilities", colour=2, model="actor", fields=("old_log_probs",),
             workers="num_actor_fwd_workers"),
        Role(name="advantages", title="advantages", colour=6, fields=("advantages", "returns"),
             workers="num_advantage_workers"),
        Role(name=CRITIC, title="forward and backward of finished groups by the critic", colour=9, model="critic",
             fields=("values",), restart=Restart.GLOBAL),
        Role(name=ACTOR, title="forward and backward of finished groups", colour=4, restart=Restart.GLOBAL),
        Role(name="publish", title="publish", colour=5),
        Role(name="save", title="checkpoint", colour=7),
    )
}  # fmt: skip
"""In the order in which the timeline shows them."""

PLACED = {name: role for name, role in ROLES.items() if role.workers}
"""The roles that may have processes of their own beside the trainer."""

DEDICATED = {name: role for name, role in PLACED.items() if not role.called_by}
"""Those of them that add fields to the rows of the Buffer."""

FIELD_OF_MODEL = {role.model: role.fields[0] for role in ROLES.values() if role.model and role.fields}
"""The field that holds the log-probabilities under the model of that name, or a critic's values."""

MODEL_FIELDS = tuple(FIELD_OF_MODEL.values())
"""Fields that others than the rollout compute and that an estimator may need (see ``buffer_rl.kinds.marks.scoped``)."""

MODEL_OF_ROLE = {name: role.model for name, role in DEDICATED.items() if role.model}
"""The model of each of these roles that has one."""

SAMPLED_FIELDS = frozenset({"tokens", "response_length", "loss_mask", "reward"})
"""Fields that every finished group has."""

ADVANTAGE_FIELDS = frozenset(ROLES["advantages"].fields)
"""Fields that an advantage estimator sets."""

DERIVED_FIELDS = frozenset({field for role in DEDICATED.values() for field in role.fields} | {"prox_log_probs"})
"""Fields that roles fill in, not the rollout; its functions may give them too."""


def worker_counts(args: Args) -> dict[str, int]:
    """Processes of each role; 0 where the trainer does its work, or where nothing asks for it."""
    return {
        name: getattr(args, role.workers) if not role.asked_by or getattr(args, role.asked_by) else 0
        for name, role in PLACED.items()
    }
