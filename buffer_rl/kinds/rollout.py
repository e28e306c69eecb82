"""What rollout functions, generate functions, filters and log functions receive and return."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from buffer_rl.records.groups import (
    FilterDecision,
    RolloutOutput,
    Sample,
    SampleGroup,
    Ticket,
)

if TYPE_CHECKING:
    from buffer_rl.args import Args


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
        """Drop a leased group; the reason is counted and shown."""

    def quarantine(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group that fails by itself, for good; the ledger keeps the reason."""

    def count_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        """Count a failed attempt at a group as ``infra`` or ``data``. Returns how many of its kind the run had, and
        how many of them this group had."""

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


class RolloutFunction(Protocol):
    """Produces one rollout: leases groups, generates, scores, reports. May be async.

    A class is accepted too: it is constructed once a worker as ``cls(args)``, and the instance is called.
    Set ``uses_engine = False`` on it if it never asks the engine (supervised fine-tuning): the weights are
    then published only where an evaluation needs them.
    """

    def __call__(
        self, args: Args, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
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
        self, args: Args, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample | list[Sample] | Awaitable[Sample | list[Sample]]: ...


class DynamicSamplingFilter(Protocol):
    """Decides whether a finished, scored group is trained on."""

    def __call__(self, args: Args, group: SampleGroup) -> FilterDecision | bool: ...


class SampleFilter(Protocol):
    """Marks samples of a whole rollout with ``sample.remove_sample = True``."""

    def __call__(self, args: Args, groups: list[SampleGroup]) -> None: ...


class AllSamplesProcess(Protocol):
    """Receives all groups that a rollout generated, at its end, sorted by uid: kept ones and dropped ones, not those
    that went back to the queue. What it changes on kept groups is trained on.
    ``data_source`` may be left out; it is the rollout's ``RolloutBuffer``.
    """

    def __call__(
        self, args: Args, groups: list[SampleGroup], data_source: RolloutBuffer, /
    ) -> Awaitable[None] | None: ...


class BufferFilter(Protocol):
    """Chooses which queued groups to lease next; ``buffer`` is the list of the queue's headers."""

    def __call__(self, args: Args, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]: ...


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
        args: Args,
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
        self, rollout_id: int, args: Args, data: dict[str, dict[str, list[Any]]], extra_metrics: dict[str, float]
    ) -> bool | Awaitable[bool | None] | None: ...


class MetricLogger(Protocol):
    """Receives flat metrics. Constructed as ``cls(args, run_dir)``."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...
