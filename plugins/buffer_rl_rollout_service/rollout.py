"""The rollout function that trains on the service's groups, as foreign groups of the run's Buffer.

Who waits for whom: a rollout reads as many groups as its ticket still needs, and waits for agents, within
``--rollout-timeout-s``. Each group becomes samples, passes ``--dynamic-sampling-filter-path``, is finished in the
Buffer and then acknowledged; one that cannot be trained on is dropped at the service, with its reason.

Nothing is trained on twice or lost: a group's uid is (store, number of the group), and the Buffer takes a uid once; the
service gives a rollout that is made again the groups that it got before. After a resume from a checkpoint these
are the groups of the rollouts that the checkpoint does not have, so the service keeps what the last two may need.

Age. Foreign groups are taken in the order in which they were finished: with one rollout worker, a group of ticket r is
trained on in step r at the latest. A group with a token of weights older than r - M is dropped as ``too_old``, and
replaced; what several workers finish in another order, the Buffer may reject later. With a staleness of 1 or more, a
group may wait for later tickets than its own. If production starts again, these read it again: each read asks for what
the reader got for the last M tickets too, and the Buffer knows what it has.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.agents.turns import rows
from buffer_rl.buffer.rollouts import TOO_OLD
from buffer_rl.data.json_text import with_arguments
from buffer_rl.errors import BufferStateError, DataError, DeadlineError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.observe.metrics import drop_metrics
from buffer_rl.plan.schedule import Schedule
from buffer_rl.records.groups import GroupUid, RolloutOutput, Sample, SampleGroup, Status, Ticket
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.deadlines import ticket_limit_s
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.sft import encode_conversation
from buffer_rl.rollout.user_functions import apply_filter
from buffer_rl_rollout_service.client import ServiceClient
from buffer_rl_rollout_service.options import require_versions
from buffer_rl_rollout_service.trajectory import Trajectory

if TYPE_CHECKING:
    from buffer_rl.args import Args
    from buffer_rl_rollout_service.options import ServiceArgs

NOTE = "rollout_service_reader"
UNUSABLE = "unusable"
TOO_NEW = "too_new"
REPEATED = "repeated"
"""No drop: the run has the group already."""
_LOG = logging.getLogger(__name__)


class ServiceRollout:
    """Finishes ``buffer.ticket.num_groups`` groups of the service at ``--rollout-service-url``. An evaluation generates
    with the run's engines, as usual.

    Metrics: ``service_wait_s``, seconds in which no group was ready; ``service_partial``, groups that were not
    complete; ``service_drop_REASON``, groups that were not trained on. The Buffer counts ``too_old`` and ``too_new``
    too, and its ledger has them as rejected."""

    uses_engine = True

    def __init__(self, args: ServiceArgs) -> None:
        self._given = Given()

    async def __call__(
        self, args: ServiceArgs, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
    ) -> RolloutOutput:
        """Report every group through ``buffer``. Raises DeadlineError if too few groups come in
        ``--rollout-timeout-s``, DataError if most cannot be trained on, and what ``ServiceClient`` raises."""
        context = current_context()
        if evaluation:
            return await evaluate(context, buffer)
        options = cast("ServiceArgs", context.args)
        async with ServiceClient(options.rollout_service_url, options.rollout_service_token) as service:
            run = _Run(context, buffer, service, _reader_of(buffer), given=self._given)
            await run.produce_all()
        return RolloutOutput(metrics=run.metrics())


def _reader_of(buffer: RolloutBuffer) -> str:
    """The run's name at the service. It is among the Buffer's notes, so a resumed run has it again."""
    name = buffer.get_metadata().get(NOTE)
    if name is None:
        name = f"run-{secrets.token_hex(6)}"
        buffer.update_metadata({NOTE: name})
    return str(name)


def kept_from(args: Args, rollout_id: int) -> int:
    """The first rollout whose groups may be asked for again: that which follows the last checkpoint but one, and M
    before it, whose groups it may lack too."""
    first = rollout_id
    if args.save is not None and args.save_interval is not None:
        first = (rollout_id // args.save_interval - 1) * args.save_interval
    return int(max(0, first - Schedule.of(args).max_staleness))


@dataclass(slots=True)
class Given:
    """The groups that this process got from the service ``store``: number, and the rollout that got it."""

    store: str = ""
    groups: dict[int, int] = field(default_factory=dict)

    def uid(self, number: int) -> GroupUid:
        """The identity of a group in the Buffer."""
        return GroupUid(f"service-{self.store}", number, 0)


@dataclass(slots=True)
class _Run:
    """One rollout in progress. given: also of earlier rollouts, as far as the service may give them again."""

    context: RolloutContext
    buffer: RolloutBuffer
    service: ServiceClient
    reader: str
    given: Given
    drops: Counter[str] = field(default_factory=Counter)
    num_finished: int = 0
    num_partial: int = 0
    waited_s: float = 0.0
    deadline: float = 0.0

    async def produce_all(self) -> None:
        ticket = self.buffer.ticket
        self.deadline = time.monotonic() + ticket_limit_s(self.context.args)
        first = max(0, ticket.rollout_id - (ticket.max_staleness or 0))
        await self._forget(first)
        while (missing := ticket.num_groups - self.num_finished) > 0:
            began = time.monotonic()
            if began >= self.deadline:
                raise await self._too_few(ticket.num_groups)
            answer = await self.service.read(
                self.reader,
                missing,
                position=ticket.rollout_id,
                again_from=first,
                keep_from=kept_from(self.context.args, ticket.rollout_id),
                have=list(self.given.groups),
                weight_version=None if ticket.max_staleness is None else ticket.version,
                timeout_s=self.deadline - began,
            )
            self.waited_s += time.monotonic() - began
            self.given.store = str(answer["store"])
            for entry in await self._new_to_the_run(answer["groups"]):
                await self._produce(entry)

    async def _forget(self, first: int) -> None:
        """Forget the groups that are not given again, and in an asynchronous run those that the Buffer lost, so that
        the service gives them again. Else the service does so with all that an earlier try of the rollout got."""
        kept = [n for n, at in self.given.groups.items() if at >= first] if self.buffer.ticket.max_staleness else []
        lost = set(await self._pending(kept))
        self.given.groups = {number: self.given.groups[number] for number in kept if number not in lost}

    async def _new_to_the_run(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups of an answer, without those that the Buffer of an asynchronous run has or had."""
        numbers = [int(entry["group"]) for entry in entries]
        self.given.groups |= dict.fromkeys(numbers, self.buffer.ticket.rollout_id)
        if not self.buffer.ticket.max_staleness:
            return entries
        pending = set(await self._pending(numbers))
        if known := [number for number in numbers if number not in pending]:
            await self.service.acknowledge(self.reader, delivered=known, timeout_s=self._left)
        return [entry for entry, number in zip(entries, numbers, strict=True) if number in pending]

    async def _pending(self, numbers: list[int]) -> list[int]:
        """Those of the groups that may be reported."""
        uids = [self.given.uid(number) for number in numbers]
        return [uid.row for uid in (await self.buffer.aget_pending(uids) if uids else ())]

    @property
    def _left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    async def _produce(self, entry: dict[str, Any]) -> None:
        """One group: finished and acknowledged, or dropped."""
        number = int(entry["group"])
        reason = await self._finish(self.given.uid(number), entry)
        if reason and reason != REPEATED:
            self.drops[reason] += 1
            await self.service.acknowledge(self.reader, dropped={number: reason}, timeout_s=self._left)
            return
        if not reason:
            self.num_finished += 1
            self.num_partial += bool(entry["partial"])
        await self.service.acknowledge(self.reader, delivered=[number], timeout_s=self._left)

    async def _finish(self, uid: GroupUid, entry: dict[str, Any]) -> str:
        """Finish a group in the Buffer; or the reason for which it is not."""
        args, ticket = self.context.args, self.buffer.ticket
        if ticket.max_staleness:
            require_versions(entry, where=ticket.task)
        try:
            members = [Trajectory.model_validate(item) for item in entry["items"]]
            samples = [to_sample(member, uid, index, self.context) for index, member in enumerate(members)]
        except DataError as error:
            if self.drops[UNUSABLE] >= ticket.num_groups:
                raise  # the fault is not that of a few trajectories, and the rest stays at the service
            _LOG.warning("the group of problem %r is dropped: %s", entry["instance_id"], error)
            return UNUSABLE
        group = SampleGroup(uid=uid, samples=samples)
        reason = age_fault(ticket, group)
        if not reason:
            decision = await apply_filter(self.context.dynamic_filter, args, group)
            if not decision.keep:
                return decision.reason
        try:
            await (self.buffer.areject(group, reason) if reason else self.buffer.afinish(group))
        except BufferStateError:
            if await self.buffer.aget_pending([uid]):
                raise
            return REPEATED  # by another worker of this reader, or before an acknowledgement was lost
        return reason

    async def _too_few(self, wanted: int) -> DeadlineError:
        groups = (await self.service.statistics(timeout_s=5.0))["groups"]
        return DeadlineError(
            f"{self.num_finished} of {wanted} groups came within {ticket_limit_s(self.context.args):g} s, "
            f"{sum(self.drops.values())} were dropped {dict(self.drops)}; the service has {groups['open']} open and "
            f"{groups['ready']} ready groups",
            where=self.buffer.ticket.task,
            hint="look at the agents, or raise --rollout-timeout-s; for fewer members than a group has, the service's "
            "--min-group-size and --group-timeout-s",
        )

    def metrics(self) -> dict[str, float]:
        """Of the rollout so far."""
        values = {"service_wait_s": self.waited_s, "service_partial": float(self.num_partial)}
        return values | drop_metrics(self.drops, "service_drop_")


def age_fault(ticket: Ticket, group: SampleGroup) -> str:
    """``too_old`` if a trained token is older than the bound allows for the step of the ticket's number, ``too_new`` if
    the run cannot have published its weights yet, as after a resume from an earlier checkpoint; else empty. What does
    not tell its versions is neither."""
    if ticket.max_staleness is None:
        return ""
    versions = [
        span.version
        for sample in group.rows
        for span in sample.weight_versions
        if sample.loss_mask is None or any(sample.loss_mask[span.start : span.end])
    ]
    if versions and min(versions) < ticket.rollout_id - ticket.max_staleness:
        return TOO_OLD
    # While a ticket is open, other workers' tickets may let up to S steps be taken; a version is served, and then told.
    newest = ticket.rollout_id + ticket.max_staleness + 1 if ticket.mixes_versions else ticket.version
    return TOO_NEW if versions and max(versions) > newest else ""


def to_sample(trajectory: Trajectory, uid: GroupUid, index: int, context: RolloutContext) -> Sample:
    """Sample number ``index`` of group ``uid``. A conversation is rendered by the chat template, and masked as
    ``--loss-mask-type`` says. Raises DataError for one that the run's model cannot be trained on."""
    given = trajectory.finish_reason or trajectory.extra_info.get("finish_reason")
    status = Status.TRUNCATED if given == "length" else Status.COMPLETED
    metadata = {**trajectory.extra_info, "instance_id": trajectory.instance_id}
    sample = Sample(uid=uid, sample_index=index, reward=trajectory.reward, status=status, metadata=metadata)
    if trajectory.turns is not None:
        return _sample_of_turns(sample, trajectory, context)
    if trajectory.messages is not None:
        _fill_from_messages(sample, trajectory, context)
    else:
        _fill_from_tokens(sample, trajectory, context)
    sample.weight_versions = trajectory.spans(sample.response_length)
    _check_tokens(sample, context)
    return sample


def _sample_of_turns(sample: Sample, trajectory: Trajectory, context: RolloutContext) -> Sample:
    """The row of the last turn that has tokens, with the other rows as parts; all have the sample's reward."""
    turns = trajectory.made_turns()
    made, last = rows(turns), next(turn for turn in reversed(turns) if turn.output_ids)
    first = next(row for row in made if last in row.turns)
    found = [row.sample(sample, part) for part, row in enumerate([first, *(row for row in made if row is not first)])]
    for row in found:
        row.status = sample.status if sample.status is Status.TRUNCATED else row.status
        row.status = Status.TRUNCATED if row.status is Status.ABORTED else row.status
        _check_tokens(row, context)  # before they are decoded
        row.response = context.tokenizer.decode(row.tokens[-row.response_length :])
    found[0].response = trajectory.response or found[0].response
    found[0].parts = found[1:]
    return found[0]


def _check_tokens(row: Sample, context: RolloutContext) -> None:
    """Raises DataError if the run's model has no such tokens, or not as many."""
    size, longest = len(context.tokenizer), context.args.rollout_max_context_len
    if (largest := max(row.tokens)) >= size:
        raise DataError(f"the token {largest} is unknown", where=f"row {row.row_id}", expected=f"0 to {size - 1}")
    if longest is not None and len(row.tokens) > longest:
        what, expected = f"the trajectory has {len(row.tokens)} tokens", f"at most --rollout-max-context-len {longest}"
        raise DataError(what, where=f"row {row.row_id}", expected=expected)


def _fill_from_messages(sample: Sample, trajectory: Trajectory, context: RolloutContext) -> None:
    assert trajectory.messages is not None
    messages = [message.model_dump(exclude_unset=True) for message in trajectory.messages]
    sample.prompt = with_arguments(messages) if context.args.decode_json else messages
    if trajectory.tools:
        sample.metadata["tools"] = trajectory.tools
    tokens, mask = encode_conversation(context.prompts, sample, context.args.loss_mask_type)
    start = mask.index(1)
    sample.tokens, sample.loss_mask = tokens, mask[start:]
    sample.response_length = len(tokens) - start
    sample.response = context.tokenizer.decode(tokens[start:])


def _fill_from_tokens(sample: Sample, trajectory: Trajectory, context: RolloutContext) -> None:
    assert trajectory.tokens is not None
    assert trajectory.response_length is not None
    sample.tokens = trajectory.tokens
    _check_tokens(sample, context)  # before they are decoded
    sample.response_length = trajectory.response_length
    sample.response = trajectory.response or context.tokenizer.decode(trajectory.tokens[-sample.response_length :])
    sample.loss_mask = trajectory.loss_mask
    sample.rollout_log_probs = trajectory.rollout_log_probs
