"""What a run does, as data: its schedule, its roles, its end."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError
from buffer_rl.kinds.marks import Scope
from buffer_rl.options.checks import refuse
from buffer_rl.plan.algorithm import (
    estimator_scope,
    frozen_models_of_trainer,
    is_supervised,
    old_log_probs_pass,
    uses_critic,
)
from buffer_rl.plan.roles import (
    ACTOR,
    ADVANTAGE_FIELDS,
    CRITIC,
    DEDICATED,
    FIELD_OF_MODEL,
    Restart,
    Role,
    worker_counts,
)


class Mode(StrEnum):
    """The modes that ``--schedule`` takes."""

    LOCKSTEP = "lockstep"
    PIPELINED = "pipelined"
    ONE_STEP_OFF = "one-step-off"
    ASYNC = "async"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How far generation runs ahead of training, and what overlaps with it.

    target (S): ticket r opens once the weights of version ``r - S`` are published. max_staleness (M): step v trains on
    tokens of version ``v - M`` or later. Both are 0, or neither. streams: roles work on finished groups while others
    are still generated; else they start after the last group. drains: running requests end before a publication, which
    otherwise retracts them; they go on with the new weights.

    Example:
        schedule = Schedule(mode=Mode.ASYNC, target=1, max_staleness=2)
        assert schedule.window(groups_per_step=8) == 9  # 8 younger groups may be trained on before an older one
    """

    mode: Mode
    target: int = 0
    max_staleness: int = 0
    streams: bool = False
    drains: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.target <= self.max_staleness or (self.target == 0) != (self.max_staleness == 0):
            raise ValueError(f"a target staleness of {self.target} does not go with a bound of {self.max_staleness}")
        if self.max_staleness and self.mode in (Mode.LOCKSTEP, Mode.PIPELINED):
            raise ValueError(f"{self.mode} trains on samples of exactly the current version: max_staleness is 0")

    @classmethod
    def of(cls, args: Args) -> Schedule:
        """The schedule that ``--schedule``, ``--max-staleness``, ``--target-staleness`` and ``--publication`` mean.
        Raises ConfigError if they do not fit together."""
        mode, hint = Mode(args.schedule), "--schedule async, or take it out"
        default, fixed = {Mode.ONE_STEP_OFF: 1, Mode.ASYNC: 2}.get(mode, 0), mode is not Mode.ASYNC
        bound = default if args.max_staleness is None else args.max_staleness
        what = f"--max-staleness: --schedule {mode} has a staleness of exactly {default}"
        refuse(fixed and bound != default, what, hint)
        target = (bound + 1) // 2 if args.target_staleness is None else args.target_staleness
        what = f"--target-staleness: {target} does not go with --schedule {mode} and a bound of {bound}"
        expected = "from 1 to --max-staleness with --schedule async" if bound else "0"
        misfits = not 0 <= target <= bound or (target == 0) != (bound == 0) or (fixed and target != bound)
        refuse(misfits, what, expected=expected)
        retracts = mode is Mode.ONE_STEP_OFF and args.publication == "retract"
        refuse(retracts, "--publication: --schedule one-step-off publishes when no request runs", expected="drain")
        drains = mode is Mode.ONE_STEP_OFF or args.publication == "drain"
        streams = mode is Mode.PIPELINED or (mode is Mode.ASYNC and args.stream_gradients)
        return cls(mode=mode, target=target, max_staleness=bound, streams=streams, drains=drains)

    @property
    def by_window(self) -> bool:
        """Whether a step takes the oldest finished groups within the window; else those of its own ticket."""
        return self.mode is Mode.ASYNC

    @property
    def mixes_versions(self) -> bool:
        """Whether weights may be published between a group's lease and the end of its requests."""
        return self.by_window and self.max_staleness > 0

    def window(self, groups_per_step: int) -> int:
        """W: a group is trained on before W - 1 younger ones have passed it."""
        return 1 + (self.max_staleness - self.target) * groups_per_step

    def ticket_limit_s(self, timeout_s: float) -> float:
        """``--rollout-timeout-s`` for a ticket whose requests queue behind those of S other tickets."""
        return (self.target + 1) * timeout_s

    def may_start(self, rollout_id: int, published_version: int) -> bool:
        """Whether ticket ``rollout_id`` may open while ``published_version`` is the newest published one."""
        return rollout_id <= published_version + self.target

    def num_admitted(self, rollout_id: int, published_version: int, num_unreleased: int, groups_per_step: int) -> int:
        """How many groups ticket ``rollout_id`` opens with, none if it may not open: P, with the window as many as
        bring ``num_unreleased`` (leased, or finished and not released) to ``(rollout_id + 1 - v) P``, where v is the
        published version. So the ticket after one that ended short makes up for it."""
        if not self.may_start(rollout_id, published_version):
            return 0
        room = (rollout_id + 1 - published_version) * groups_per_step - num_unreleased
        return max(0, room) if self.by_window else groups_per_step


LOCKSTEP = Schedule(mode=Mode.LOCKSTEP)


def workers_per_ticket(args: Args, *, concurrent: bool) -> int:
    """How many of ``--num-rollout-workers`` share a ticket: all, or one if something must see all of its groups.
    concurrent: the rollout function declares that several of its calls may run at once."""
    sees_all = (
        args.rollout_sample_filter_path,
        args.rollout_all_samples_process_path,
        args.custom_rollout_log_function_path,
        args.buffer_filter_path,
    )
    chooses_fastest = (args.over_sampling_batch_size or 0) > args.rollout_batch_size
    shares = concurrent and not chooses_fastest and not any(sees_all)
    return args.num_rollout_workers if shares else 1


def idle_workers_text(args: Args, num_sharing: int) -> str:
    """Says how many rollout workers have nothing to do, and why; empty if all have. num_sharing: how many share a
    ticket."""
    schedule = Schedule.of(args)
    busy = num_sharing * (schedule.target + 1 if schedule.by_window else 1)
    if busy >= args.num_rollout_workers:
        return ""
    return (
        f"--num-rollout-workers {args.num_rollout_workers}: {args.num_rollout_workers - busy} of them stay idle. They "
        "share a ticket if the rollout function declares concurrent = True, and no sample filter, buffer filter, log "
        "function or over-sampling must see all of its groups"
    )


_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_EXPRESSION = re.compile(r"\s*([\w./-]+)\s*(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """``metric op value``, for example ``eval/dev >= 0.25``; ``op`` is one of ``>= <= > <``."""

    metric: str
    op: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric}{self.op}{self.value:g}"

    def met(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric is there and fulfils the condition (NaN never does)."""
        found = metrics.get(self.metric)
        return found is not None and bool(_OPERATORS[self.op](found, self.value))


def parse_early_stop(text: str) -> EarlyStop:
    """Read the expression. Raises ConfigError."""
    match = _EXPRESSION.fullmatch(text)
    expected = "METRIC, one of >= <= > <, and a number, for example 'eval/dev>=0.25'"
    if match is None:
        raise ConfigError(f"{text!r} is no condition on a metric", where="--early-stop", expected=expected)
    metric, op, value = match.groups()
    return EarlyStop(metric=metric, op=op, value=float(value))


def train_only(args: Args) -> bool:
    """Whether the run trains on recorded rollouts, without engines and rollout workers."""
    return bool(args.debug_train_only or args.load_debug_rollout_data is not None)


def rollout_only(args: Args) -> bool:
    """Whether the run generates without a trainer."""
    return bool(args.debug_rollout_only)


def reads_data_source(args: Args) -> bool:
    """Whether the run takes groups from ``--data-source-path``. An evaluation (no rollout) does not."""
    return args.data_source_path is not None and args.num_rollout != 0 and not train_only(args)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Which role computes which field of each rollout, and which are trained on it.

    trained: roles that take optimizer steps, the actor first; none where the run only generates. passes: forward passes
    of trained roles before the optimizer step, each a role and the model whose field it computes (``FIELD_OF_MODEL``).
    dedicated_roles: roles with processes of their own, each the name of its reading task. external_fields: fields that
    they add. estimates: the actor's advantage estimator is called once, with all rows of the rollout.
    critic_only_steps: rollouts at the start of the run that only the critic takes an optimizer step on.
    stream_gradients: trained roles go on to forward and backward while the rollout still runs.
    max_restarts: how often the dead processes of each role, and rollout workers, are replaced in place.
    restarted_globally: the dedicated roles that are not.
    """

    trained: tuple[str, ...] = (ACTOR,)
    passes: tuple[tuple[str, str], ...] = ()
    dedicated_roles: tuple[str, ...] = ()
    external_fields: tuple[str, ...] = ()
    estimates: bool = False
    critic_only_steps: int = 0
    stream_gradients: bool = False
    max_restarts: int = 0
    restarted_globally: tuple[str, ...] = ()

    def awaited_by(self, role: str) -> list[str]:
        """Fields of other roles that a trained role waits for, group by group, before its forward and backward."""
        given = set(self.external_fields)
        if role == CRITIC:  # which computes advantages itself, from its values
            given -= ADVANTAGE_FIELDS
        elif CRITIC in self.trained:
            given |= {*ADVANTAGE_FIELDS, FIELD_OF_MODEL[CRITIC]}
        return sorted(given)

    def steps_on(self, rollout_id: int) -> list[str]:
        """The trained roles that take an optimizer step on a rollout."""
        return [role for role in self.trained if role == CRITIC or rollout_id >= self.critic_only_steps]

    def num_updates(self, role: str, num_rollouts: int) -> int:
        """On how many of the run's rollouts a trained role takes optimizer steps."""
        return num_rollouts if role == CRITIC else max(0, num_rollouts - self.critic_only_steps)

    def models_of(self, role: str) -> list[str]:
        """The models whose fields a trained role computes."""
        return [model for owner, model in self.passes if owner == role]


def critic_only_steps(args: Args) -> int:
    """On how many rollouts the critic alone is trained, at the beginning of a run."""
    return max(args.num_critic_only_steps, args.num_freeze_actor_steps) if uses_critic(args) else 0


def role_plan(args: Args, estimator: object, own: Sequence[Role] = (), backend: object = None) -> RolePlan:
    """The roles that the options ask for, and what is left to the trainer. estimator: of advantages. own: the roles of
    ``--role-path``. backend: a trainer backend that is not the default one."""
    counts = worker_counts(args)
    rows = [*(row for role, row in DEDICATED.items() if counts[role]), *own]
    dedicated = tuple(row.name for row in rows)
    models = frozen_models_of_trainer(args)
    if old_log_probs_pass(args, estimator, backend) and "actor_fwd" not in dedicated:
        models.append("actor")
    critic = (CRITIC,) if uses_critic(args) else ()
    return RolePlan(
        trained=(ACTOR, *critic),
        passes=(*((ACTOR, model) for model in models), *((role, role) for role in critic)),
        dedicated_roles=dedicated,
        external_fields=tuple(name for row in rows for name in row.fields),
        restarted_globally=tuple(row.name for row in rows if row.restart is Restart.GLOBAL),
        # An estimator of scope row is called by each rank on its own rows, unless it reads those of another role.
        estimates=not (is_supervised(args) or "advantages" in dedicated or args.stream_gradients)
        and (estimator_scope(args, estimator) is not Scope.ROW or bool(critic)),
        critic_only_steps=critic_only_steps(args),
        stream_gradients=args.stream_gradients,
        max_restarts=args.role_max_restarts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run does, as data.

    first_rollout: 0, or the step of the checkpoint that the run continues from.
    publish_each_step: false where rollouts never ask the engine; weights are then published for evaluations only.
    compare_log_probs: whether engine and trainer are compared before the first optimizer step.
    ref_update_interval: the reference model takes the actor's weights after every so many rollouts.
    roles: the roles that add fields to each rollout's groups, and those that are trained. Without the latter nothing is
    published, and every rollout comes from the initial weights.
    evaluated: the newest version that the run has evaluated, which is not done again; -1 for none. A death or an error
    may have come between a checkpoint and its evaluation.
    offload_train, offload_rollout: trained roles, or the engines, free their memory while the other side works.
    saves: whether checkpoints are written. async_save: while the run goes on. save_on_exit_s: seconds from a signal
    with a deadline, such as SIGTERM, for the end of the step and its checkpoint.
    records: whether each rollout's rows are kept, for debugging.
    max_rollout_retries: how often, over the whole run, a rollout that was lost is produced again.
    passes_on_tickets: whether a rollout worker can go on where another died; not where functions see the whole rollout,
    which is then produced again. workers_per_ticket: how many rollout workers share a ticket.
    """

    num_rollouts: int
    schedule: Schedule
    first_rollout: int = 0
    publish_at_start: bool = False
    publish_each_step: bool = True
    compare_log_probs: bool = False
    ref_update_interval: int | None = None
    roles: RolePlan = field(default_factory=RolePlan)
    evaluate: bool = False
    eval_interval: int | None = None
    eval_before_train: bool = True
    evaluated: int = -1
    offload_train: bool = False
    offload_rollout: bool = False
    saves: bool = False
    save_interval: int | None = None
    async_save: bool = False
    save_on_exit_s: float = 30.0
    records: bool = False
    early_stop: EarlyStop | None = None
    max_rollout_retries: int = 0
    passes_on_tickets: bool = True
    workers_per_ticket: int = 1
    rollout_timeout_s: float
    train_timeout_s: float
    publish_timeout_s: float
    save_timeout_s: float
    buffer_timeout_s: float

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation follows ``step`` optimizer steps."""
        if not self.evaluate or step <= self.evaluated:
            return False
        is_due = self.eval_interval is not None and step % self.eval_interval == 0
        if step == 0 < self.num_rollouts:
            return self.eval_before_train
        return step >= self.num_rollouts or is_due

    def saves_at(self, step: int, *, stopped_early: bool) -> bool:
        """Whether a checkpoint follows ``step`` optimizer steps."""
        if not self.saves:
            return False
        is_last = step == self.num_rollouts or stopped_early
        return is_last or (self.save_interval is not None and step % self.save_interval == 0)


@dataclass(slots=True, kw_only=True)
class RunResult:
    """How a run ended: trained steps, the newest evaluation, whether ``--early-stop`` or a lack of prompts ended it,
    and why; the number of the signal that did."""

    steps: int
    evaluation: dict[str, float] = field(default_factory=dict)
    stopped_early: bool = False
    why: str = ""
    signal: int | None = None


def num_adapters(args: Args) -> int:
    """The most adapters that an engine has at the same time, under ``--lora-publish adapter``."""
    return Schedule.of(args).max_staleness + 3
