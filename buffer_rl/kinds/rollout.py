"""What rollout functions, generate functions and log functions receive and return."""

from __future__ import annotations

import logging
import numbers
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from buffer_rl.errors import RolloutError, short_repr
from buffer_rl.kinds.kind import PluginKind
from buffer_rl.kinds.reward import unwrap_scalar
from buffer_rl.records.groups import (
    NO_UID,
    GroupUid,
    RolloutOutput,
    Sample,
    SampleGroup,
    Status,
    Ticket,
)

_log = logging.getLogger(__name__)
_OF_A_SAMPLE = frozenset({"tokens", "response", "response_length", "reward", "status", "metadata"})


class RolloutBuffer(Protocol):
    """What a rollout function receives as ``buffer``. The methods that lease and report groups have
    an ``a``-prefixed asynchronous twin.

    A group that ``get_samples`` leased ends in one of five ways: ``finish`` (it will be trained on or
    evaluated), ``reject`` (it is dropped, with a reason), ``quarantine`` (it failed by itself, and is dropped for
    good), ``add_samples`` (it goes back to the queue), or it is never mentioned again, and is then rejected as
    ``unreported``. ``finish`` also takes foreign groups, which the rollout function made, with a uid of their own (any
    ``GroupUid`` of another source) or without one; each uid is trained on at most once."""

    @property
    def ticket(self) -> Ticket:
        """The rollout that this buffer works for. ``num_groups`` is how many groups it still needs."""

    @property
    def progressed_at(self) -> float:
        """When a group was last leased, finished, rejected or quarantined, by the event loop's clock; 0 before that.
        With a staleness of 1 or more, the rollout's deadline counts from there."""

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease up to ``num_samples`` **groups**: first from the queue, then from the data source.

        Training never runs out (the next epoch follows); an evaluation returns fewer, then none."""

    def add_samples(self, groups: Sequence[SampleGroup]) -> None:
        """Give leased groups back to the queue, each to its old place: as prompts, or, where ``ticket.keeps_tokens``
        says so, with what was generated of them so far."""

    def encode(self, group: SampleGroup) -> Any:
        """What ``finish`` would store of a group, for it to take. Reports nothing and does not block: there is no
        asynchronous twin. Raises RolloutError for a group that cannot be trained on."""

    def finish(self, group: SampleGroup, encoded: Any = None) -> None:
        """Report a finished group; its rewards must be set and finite. Raises RolloutError for one that cannot be
        trained on. encoded: what ``encode`` gave for it, where it was asked and the group is as it was then."""

    def reject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group, or a foreign one; the reason is counted and shown."""

    def quarantine(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group that fails by itself, for good; the ledger keeps the reason."""

    def count_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        """Count a failed attempt at a group as ``infra`` or ``data``. Returns how many of its kind the run had, and
        how many of them this group had."""

    def get_pending(self, uids: Sequence[GroupUid]) -> list[GroupUid]:
        """Those of these foreign groups that may be reported: the run has not trained on them, dropped them, or chosen
        or stored them for a step. After a loss, groups that were stored are pending again."""

    def get_version(self) -> int:
        """The version of the weights that are published."""

    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""

    def get_metadata(self) -> dict[str, Any]:
        """The user's notes that are saved with the Buffer."""

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge ``metadata`` (JSON values) into the notes."""

    async def aget_samples(self, num_samples: int) -> list[SampleGroup]: ...
    async def aadd_samples(self, groups: Sequence[SampleGroup]) -> None: ...
    async def afinish(self, group: SampleGroup, encoded: Any = None) -> None: ...
    async def areject(self, group: SampleGroup, reason: str) -> None: ...
    async def aquarantine(self, group: SampleGroup, reason: str) -> None: ...
    async def acount_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]: ...
    async def aget_pending(self, uids: Sequence[GroupUid]) -> list[GroupUid]: ...
    async def aget_version(self) -> int: ...


class RolloutFunction(Protocol):
    """Produces one rollout: leases groups, generates, scores, reports. May be async.

    A class is accepted too: it is constructed once a worker as ``cls(args)``, and the instance is called.
    Set ``uses_engine = False`` on it if it never asks the engine (supervised fine-tuning): the weights are
    then published only where an evaluation needs them. Set ``concurrent = True`` if its calls may run at once: in one
    worker for several rollouts, and in several workers for parts of one, of ``buffer.ticket.num_groups`` groups each.
    It keeps nothing from call to call but what such calls may share.
    """

    def __call__(
        self, args: Any, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
    ) -> RolloutOutput | list[SampleGroup] | Awaitable[RolloutOutput | list[SampleGroup]]: ...


class GenerateFunction(Protocol):
    """Fills one sample's response; may return several samples (parts) of one prompt. May be sync.
    One that has a parameter ``evaluation`` also receives ``evaluation=True`` or ``False``.
    A sample that it gives up, with status ``aborted`` or ``failed`` and ``remove_sample = True``, is not trained on,
    and its group stays; any other sample of these statuses costs its group.
    With the attribute ``continues_partial = True`` and ``--partial-rollout`` it also receives samples of status
    ``aborted`` with the tokens they have, to go on with; without it such a sample comes as a prompt.
    """

    def __call__(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample | list[Sample] | Awaitable[Sample | list[Sample]]: ...


class AllSamplesProcess(Protocol):
    """Receives all groups that a rollout generated, at its end, sorted by uid: kept ones and dropped ones, not those
    that went back to the queue. What it changes on kept groups is trained on.
    ``data_source`` may be left out; it is the rollout's ``RolloutBuffer``.
    """

    def __call__(
        self, args: Any, groups: list[SampleGroup], data_source: RolloutBuffer, /
    ) -> Awaitable[None] | None: ...


class BufferFilter(Protocol):
    """Chooses which queued groups to lease next; ``buffer`` is the list of the queue's headers."""

    def __call__(self, args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]: ...


class RolloutLogFunction(Protocol):
    """Sees a finished training rollout; may be async. Called in the rollout worker.

    samples: those of the finished groups, ordered by uid, rewards set. rollout_extra_metrics: the rollout's flat
    numbers under the names that are logged; what the function adds or changes is logged. rollout_time: seconds.
    True says that the function did the logging: of the rollout's metrics only ``rollout/raw_reward`` and
    ``rollout/raw_reward_all`` are kept.
    """

    def __call__(
        self,
        rollout_id: int,
        args: Any,
        samples: list[Sample],
        rollout_extra_metrics: dict[str, float],
        rollout_time: float,
    ) -> bool | Awaitable[bool | None] | None: ...


class EvalRolloutLogFunction(Protocol):
    """Sees a finished evaluation; may be async. Called in the rollout worker.

    data: for each evaluation set ``rewards``, ``truncated`` (booleans) and ``samples``, lists of equal length.
    extra_metrics: as ``rollout_extra_metrics`` of a training rollout. True keeps, of the metrics, only the mean
    reward ``eval/NAME`` of each set and what ``--early-stop`` looks at.
    """

    def __call__(
        self, rollout_id: int, args: Any, data: dict[str, dict[str, list[Any]]], extra_metrics: dict[str, float]
    ) -> bool | Awaitable[bool | None] | None: ...


class MetricLogger(Protocol):
    """Receives flat metrics. Constructed as ``cls(args, run_dir)``."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


def check_statuses(samples: Iterable[Sample], *, where: str) -> None:
    """Make the status of each sample a ``Status``, in place: a function of the user's may set it as text.

    Raises RolloutError, naming ``where`` and the sample, for anything that is no status."""
    for sample in samples:
        if type(sample.status) is Status:
            continue
        try:
            sample.status = Status(sample.status)
        except ValueError:
            row = f"sample {sample.index}" if sample.uid is None else f"row {sample.row_id}"
            what, expected = f"sample.status is {short_repr(sample.status)}", ", ".join(Status)
            raise RolloutError(what, where=where if row in where else f"{where}, {row}", expected=expected) from None


def check_rollout_output(
    value: object, *, where: str, leased: Mapping[GroupUid, SampleGroup] | None = None, group_size: int = 0
) -> RolloutOutput:
    """The output of a rollout function; a bare list of groups is accepted, and an object with ``samples`` and
    ``metrics``.

    A group may be a plain list of its samples if ``leased`` has its lease, or if none of them has a uid: it is then a
    foreign group. In place of groups there may be their samples in one list: those with a uid belong to its group,
    and of the others each ``group_size`` in turn are a foreign group. Raises RolloutError otherwise.
    """
    entries, metrics = _groups_and_metrics(value, where)
    groups = [_with_own_samples(entry) for entry in entries]
    if groups and all(isinstance(entry, Sample) for entry in groups):
        groups = _grouped(cast("list[Sample]", groups), group_size, where)
    checked: list[SampleGroup] = []
    seen: set[object] = set()
    for position, entry in enumerate(groups):
        group = as_leased_group(entry, leased or {}) or _as_foreign_group(entry)
        if group is None:
            what = f"entry {position} of the returned groups is {short_repr(entry)}"
            expected = "SampleGroup, as buffer.get_samples returned it, or the list of its samples"
            raise RolloutError(what, where=where, expected=expected)
        if group.uid in seen and group.uid != NO_UID:
            raise RolloutError(f"the group {group.uid} was returned twice", where=where, expected="each group once")
        seen.add(group.uid)
        check_statuses(group, where=where)
        checked.append(group)
    return RolloutOutput(groups=checked, metrics=check_metrics(metrics, where=where))


def as_sample(value: object) -> object:
    """A sample of another program's class, such as that of an installed slime, as a ``Sample`` with all it holds; any
    other value as it is."""
    as_dict = getattr(value, "to_dict", None)
    held = getattr(value, "__dict__", {})
    if isinstance(value, Sample | type) or not callable(as_dict) or not held.keys() >= _OF_A_SAMPLE:
        return value
    return Sample.from_dict(as_dict())


def _with_own_samples(entry: object) -> object:
    return [_with_own_samples(each) for each in entry] if isinstance(entry, list) else as_sample(entry)


def as_leased_group(value: object, leased: Mapping[GroupUid, SampleGroup]) -> SampleGroup | None:
    """A group as it is; a list of samples of one leased group as that lease with these samples; else None.

    Several samples with one ``sample_index`` become its parts, numbered in order. In place of a sample the list may
    hold the list of its parts.
    """
    if isinstance(value, SampleGroup):
        return value
    if not isinstance(value, MutableSequence):  # a list, or what a leased group holds before its samples are read
        return None
    samples = [part for entry in value for part in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(sample, Sample) for sample in samples):
        return None
    uids = {sample.uid for sample in samples}
    lease = leased.get(uid) if len(uids) == 1 and (uid := uids.pop()) is not None else None
    if lease is None:
        return None
    parts: Counter[int] = Counter()
    for sample in samples:
        sample.part = parts[sample.sample_index]
        parts[sample.sample_index] += 1
    return replace(lease, samples=samples)


def _as_foreign_group(value: object) -> SampleGroup | None:
    """A list of samples without uids, which no lease gave, as a group without one; else None."""
    if isinstance(value, MutableSequence) and value and all(isinstance(s, Sample) and s.uid is None for s in value):
        return SampleGroup(samples=[*value])
    return None


def _grouped(samples: Sequence[Sample], size: int, where: str) -> list[object]:
    """The samples as lists by uid, in the order of their first, and after them those without a uid by ``size``."""
    by_uid: dict[GroupUid, list[Sample]] = {}
    others = [sample for sample in samples if sample.uid is None]
    for sample in samples:
        if sample.uid is not None:
            by_uid.setdefault(sample.uid, []).append(sample)
    if others and (size < 1 or len(others) % size):
        raise RolloutError(
            f"the rollout function returned {len(others)} samples without a uid in one list",
            where=where,
            expected="a list of groups, each the list of its samples"
            + (f", or a multiple of --n-samples-per-prompt, which is {size}" if size else ""),
        )
    return [*by_uid.values(), *(others[at : at + size] for at in range(0, len(others), size or 1))]


def _groups_and_metrics(value: object, where: str) -> tuple[list[object], object]:
    if isinstance(value, RolloutOutput):
        return list(value.groups), value.metrics
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | SampleGroup):
        return list(value), {}
    samples = getattr(value, "samples", None)
    if isinstance(samples, list) and not isinstance(value, SampleGroup):
        metrics = getattr(value, "metrics", None)
        return samples, {} if metrics is None else metrics
    expected = "RolloutOutput(groups=[...], metrics={...}), or a list of SampleGroup"
    hint = "return RolloutOutput() if every group was reported with buffer.finish" if value is None else ""
    raise RolloutError(f"the rollout function returned {short_repr(value)}", where=where, expected=expected, hint=hint)


def check_metrics(metrics: object, *, where: str) -> dict[str, float]:
    """Metrics as floats by name. Texts are written to the log. Raises RolloutError naming the first that is neither."""
    if not isinstance(metrics, Mapping):
        raise RolloutError(f"the metrics are {short_repr(metrics)}", where=where, expected="numbers by name")
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        number = unwrap_scalar(value)
        if isinstance(name, str) and isinstance(number, str):
            _log.warning("%s: %s = %s", where, name, number)
            continue
        if not isinstance(name, str) or not isinstance(number, numbers.Real):
            raise RolloutError(f"the metric {name!r} is {short_repr(value)}", where=where, expected="a number")
        checked[name] = float(number)
    return checked


KINDS = (
    PluginKind(
        name="rollout",
        flags=("--rollout-function-path", "--eval-function-path"),
        protocol=RolloutFunction,
        signature="(args, rollout_id, buffer, evaluation=False) -> RolloutOutput | list[SampleGroup]",
        may_be_async=True,
    ),
    PluginKind(
        name="generate",
        flags=("--custom-generate-function-path",),
        protocol=GenerateFunction,
        signature="async (args, sample, sampling_params[, evaluation]) -> Sample | list[Sample]",
        may_be_async=True,
    ),
    PluginKind(
        name="all_samples_process",
        flags=("--rollout-all-samples-process-path",),
        protocol=AllSamplesProcess,
        signature="(args, groups[, data_source]) -> None",
        optional=1,
        may_be_async=True,
    ),
    PluginKind(
        name="buffer_filter",
        flags=("--buffer-filter-path",),
        protocol=BufferFilter,
        signature="(args, rollout_id, buffer, num_samples) -> chosen headers",
    ),
    PluginKind(
        name="rollout_log",
        flags=("--custom-rollout-log-function-path",),
        protocol=RolloutLogFunction,
        signature="(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool | None",
        may_be_async=True,
    ),
    PluginKind(
        name="eval_rollout_log",
        flags=("--custom-eval-rollout-log-function-path",),
        protocol=EvalRolloutLogFunction,
        signature="(rollout_id, args, data, extra_metrics) -> bool | None",
        may_be_async=True,
    ),
    PluginKind(
        name="logger",
        flags=("--logger",),
        protocol=MetricLogger,
        signature="class (args, run_dir) with log, close",
        constructed=("args", "run_dir"),
    ),
)
