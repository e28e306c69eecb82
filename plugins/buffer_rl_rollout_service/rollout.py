"""The rollout function that trains on the service's groups, as foreign groups of the run's Buffer.

Who waits for whom: a rollout reads as many groups as its ticket still needs, and waits for agents, within
``--rollout-timeout-s``. Each group becomes samples, passes ``--dynamic-sampling-filter-path``, is finished in the
Buffer and then acknowledged; one that cannot be trained on is dropped at the service, with its reason.

Nothing is trained on twice or lost: a group's uid is (store, number of the group), and the Buffer takes a uid once; the
service gives a rollout that is made again the groups that it got before. After a resume from a checkpoint these
are the groups of the rollouts that the checkpoint does not have, so the service keeps what the last two may need.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.data.json_text import with_arguments
from buffer_rl.errors import DataError, DeadlineError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.observe.metrics import drop_metrics
from buffer_rl.records.groups import GroupUid, RolloutOutput, Sample, SampleGroup, Status
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.deadlines import ticket_limit_s
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.sft import encode_conversation
from buffer_rl.rollout.user_functions import apply_filter
from buffer_rl_rollout_service.client import ServiceClient
from buffer_rl_rollout_service.server import Trajectory

if TYPE_CHECKING:
    from buffer_rl.args import Args
    from buffer_rl_rollout_service.options import ServiceArgs

NOTE = "rollout_service_reader"
UNUSABLE = "unusable"
_LOG = logging.getLogger(__name__)


class ServiceRollout:
    """Finishes ``buffer.ticket.num_groups`` groups of the service at ``--rollout-service-url``. An evaluation generates
    with the run's engines, as usual.

    Metrics: ``service_wait_s``, seconds in which no group was ready; ``service_partial``, groups that were not
    complete; ``service_drop_REASON``, groups that were not trained on."""

    uses_engine = True

    def __init__(self, args: ServiceArgs) -> None:
        self._args = args

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
            run = _Run(context, buffer, service, _reader_of(buffer))
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
    """The first rollout whose groups may be asked for again: that which follows the last checkpoint but one."""
    if args.save is None or args.save_interval is None:
        return rollout_id
    return int(max(0, rollout_id // args.save_interval - 1) * args.save_interval)


@dataclass(slots=True)
class _Run:
    """One rollout in progress. have: numbers of the groups that it got."""

    context: RolloutContext
    buffer: RolloutBuffer
    service: ServiceClient
    reader: str
    have: list[int] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    num_finished: int = 0
    num_partial: int = 0
    waited_s: float = 0.0
    deadline: float = 0.0

    async def produce_all(self) -> None:
        wanted, rollout_id = self.buffer.ticket.num_groups, self.buffer.ticket.rollout_id
        self.deadline = time.monotonic() + ticket_limit_s(self.context.args)
        while (missing := wanted - self.num_finished) > 0:
            began = time.monotonic()
            if began >= self.deadline:
                raise await self._too_few(wanted)
            answer = await self.service.read(
                self.reader,
                missing,
                position=rollout_id,
                keep_from=kept_from(self.context.args, rollout_id),
                have=self.have,
                timeout_s=self.deadline - began,
            )
            self.waited_s += time.monotonic() - began
            for entry in answer["groups"]:
                await self._produce(str(answer["store"]), entry)

    async def _produce(self, store: str, entry: dict[str, Any]) -> None:
        """One group: finished and acknowledged, or dropped."""
        number = int(entry["group"])
        self.have.append(number)
        uid = GroupUid(f"service-{store}", number, 0)
        left = max(1.0, self.deadline - time.monotonic())
        reason = await self._finish(uid, entry)
        if reason:
            self.drops[reason] += 1
            await self.service.acknowledge(self.reader, dropped={number: reason}, timeout_s=left)
            return
        self.num_finished += 1
        self.num_partial += bool(entry["partial"])
        await self.service.acknowledge(self.reader, delivered=[number], timeout_s=left)

    async def _finish(self, uid: GroupUid, entry: dict[str, Any]) -> str:
        """Finish a group in the Buffer; or the reason for which it is dropped."""
        args = self.context.args
        try:
            members = [Trajectory.model_validate(item) for item in entry["items"]]
            samples = [to_sample(member, uid, index, self.context) for index, member in enumerate(members)]
        except DataError as error:
            if self.drops[UNUSABLE] >= self.buffer.ticket.num_groups:
                raise  # the fault is not that of a few trajectories, and the rest stays at the service
            _LOG.warning("the group of problem %r is dropped: %s", entry["instance_id"], error)
            return UNUSABLE
        group = SampleGroup(uid=uid, samples=samples)
        decision = await apply_filter(self.context.dynamic_filter, args.dynamic_sampling_filter_path, args, group)
        if not decision.keep:
            return decision.reason
        await self.buffer.afinish(group)
        return ""

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


def to_sample(trajectory: Trajectory, uid: GroupUid, index: int, context: RolloutContext) -> Sample:
    """Sample number ``index`` of group ``uid``. A conversation is rendered by the chat template, and masked as
    ``--loss-mask-type`` says. Raises DataError for one that the run's model cannot be trained on."""
    given = trajectory.finish_reason or trajectory.extra_info.get("finish_reason")
    sample = Sample(
        uid=uid,
        sample_index=index,
        reward=trajectory.reward,
        status=Status.TRUNCATED if given == "length" else Status.COMPLETED,
        metadata={**trajectory.extra_info, "instance_id": trajectory.instance_id},
    )
    if trajectory.messages is not None:
        _fill_from_messages(sample, trajectory, context)
    else:
        _fill_from_tokens(sample, trajectory, context)
    longest = context.args.rollout_max_context_len
    if longest is not None and len(sample.tokens) > longest:
        raise DataError(
            f"the trajectory has {len(sample.tokens)} tokens",
            where=f"row {sample.row_id}",
            expected=f"at most --rollout-max-context-len {longest}",
        )
    return sample


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
    size = len(context.tokenizer)
    if (largest := max(trajectory.tokens)) >= size:
        raise DataError(f"the token {largest} is unknown", where=f"row {sample.row_id}", expected=f"0 to {size - 1}")
    sample.tokens = trajectory.tokens
    sample.response_length = trajectory.response_length
    sample.response = trajectory.response or context.tokenizer.decode(trajectory.tokens[-sample.response_length :])
    sample.loss_mask = trajectory.loss_mask
    sample.rollout_log_probs = trajectory.rollout_log_probs
