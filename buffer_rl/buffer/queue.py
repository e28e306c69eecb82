"""The queue: groups that were admitted and wait to be leased again, in the order of their admission.

A requeued group keeps its prompts alone, or the tokens that were generated so far. With tokens kept, the next lease
continues where the last one ended: finished samples stay as they are, aborted ones are continued. Tokens of weights
older than those at the lease may have to be context alone (``mask_older``).
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from buffer_rl.buffer.codec import group_to_json
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import (
    GroupUid,
    QueueHeader,
    Sample,
    SampleGroup,
    Status,
    Ticket,
    VersionSpan,
    sample_means,
    tile,
)

if TYPE_CHECKING:
    from buffer_rl.args import Args


DONE = (Status.COMPLETED, Status.TRUNCATED)


def json_text(value: Any) -> bytes:
    """JSON of ``value``, also where integers have more than 64 bits, which orjson refuses. Raises TypeError for what is
    no JSON. ``json.loads`` reads it: orjson makes such integers floats."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueRule:
    """How groups go back to the queue and come from it.

    keep_tokens: with their responses so far; else as prompts. mask_older: on the next lease, tokens of weights before
    those at the lease get a loss mask of 0, so that every trained token is of exactly that version. reward_key: which
    entry of a mapping is the reward that buffer filters see. replays: the run replays kept tokens; replays_experts:
    routed experts.
    """

    keep_tokens: bool = False
    mask_older: bool = False
    reward_key: str | None = None
    replays: bool = False
    replays_experts: bool = False

    @classmethod
    def from_args(cls, args: Args) -> RequeueRule:
        """From ``--partial-rollout``, ``--mask-offpolicy-in-partial-rollout``, ``--reward-key``,
        ``--replay-kept-tokens`` and ``--replay-routed-experts``."""
        return cls(
            keep_tokens=args.partial_rollout,
            mask_older=args.mask_offpolicy_in_partial_rollout,
            reward_key=args.reward_key,
            replays=args.replay_kept_tokens,
            replays_experts=args.replay_routed_experts,
        )

    def on_requeue(self, group: SampleGroup | None, prompts: SampleGroup) -> SampleGroup:
        """What is queued of ``group``, which a lease of ``prompts`` gave back; the caller's samples are copied.

        A sample whose tokens, log-probabilities and version spans do not belong together starts again. So does a
        whole group that could not be saved, and under ``mask_older`` one that is complete: it would be trained on
        with no unmasked token."""
        fresh = prompts.as_prompts()
        if group is None or not self.keep_tokens:
            return fresh
        samples: list[Sample] = []
        for prompt in fresh:
            parts = [sample for sample in group if sample.sample_index == prompt.sample_index]
            sound = _can_go_on(parts) and not (self.replays_experts and any(map(_lacks_experts, parts)))
            samples += [_copy(part) for part in parts] if sound else [prompt]
        if self.mask_older and is_complete(samples):
            return fresh
        kept = replace(fresh, samples=samples)
        try:
            json_text(group_to_json(kept))
        except TypeError:  # user code left a value in it that no checkpoint can hold
            return fresh
        return kept

    def on_lease(self, group: SampleGroup, version: int) -> SampleGroup:
        """The queued ``group`` as it is leased while ``version`` is published."""
        if self.mask_older:
            for sample in group:
                mask_older(sample, version)
        return group

    def on_restore(self, group: SampleGroup, version: int) -> SampleGroup:
        """The saved ``group`` in a run that continues from ``version``: later version numbers will be used again,
        for other weights, so tokens with one are dropped; and so are those of a run that replayed kept tokens in one
        that does not, or the other way round, whose log-probabilities are of another distribution. In a run that
        replays experts, so are tokens without them."""
        newer = any(span.version > version for sample in group for span in sample.weight_versions)
        other = any(s.response_length and (s.rollout_kept_tokens is not None) != self.replays for s in group)
        lacks = self.replays_experts and any(s.response_length and _lacks_experts(s) for s in group)
        return group.as_prompts() if newer or other or lacks or not self.keep_tokens else group

    def reward(self, group: SampleGroup) -> float | None:
        """Mean reward of the samples that have one; a sample of several parts counts once."""
        indices, values = [], []
        for sample in group:
            reward = sample.reward
            if isinstance(reward, dict):
                reward = reward.get(self.reward_key or "")
            if isinstance(reward, int | float):
                indices.append(sample.sample_index)
                values.append(float(reward))
        means = sample_means(indices, values)
        return math.fsum(means) / len(means) if means else None


def is_complete(samples: Sequence[Sample]) -> bool:
    """Whether nothing is left to generate."""
    return all(sample.status in DONE for sample in samples)


def oldest_version(group: SampleGroup) -> int | None:
    """The oldest weights that a token of the group was sampled from; None without tokens."""
    if group.is_fresh:
        return None
    return min((v for sample in group if (v := sample.oldest_version) is not None), default=None)


def mask_older(sample: Sample, version: int) -> None:
    """Set the loss mask to 0 where weights before ``version`` sampled the token."""
    older = [span for span in sample.weight_versions if span.version < version]
    if older:
        mask = list(sample.loss_mask) if sample.loss_mask is not None else [1] * sample.response_length
        for span in older:
            mask[span.start : span.end] = [0] * len(mask[span.start : span.end])
        sample.loss_mask = mask


def check_spans(group: SampleGroup) -> None:
    """The version spans of a sample that has any must cover its generated tokens. Raises RolloutError naming the row.

    They are in order, none is empty, and none overlaps another or ends behind the response. What lies between them is
    no output of the engine, such as a tool's answer, so its loss mask must be 0.
    """
    for sample in group.rows:
        if sample.weight_versions and not sample.remove_sample and (fault := _span_fault(sample)):
            expected = "VersionSpan(version, start, end) in order, over every response token whose loss_mask is 1"
            hint = "buffer_rl.rollout.generate sets them; an empty list is not checked"
            raise RolloutError(fault, where=f"row {sample.row_id}", expected=expected, hint=hint)


def _span_fault(sample: Sample) -> str:
    spans, mask, length = sample.weight_versions, sample.loss_mask, sample.response_length
    if (
        type(spans) is list
        and len(spans) == 1
        and type(spans[0]) is VersionSpan
        and spans[0].start == 0 < spans[0].end == length
    ):
        return ""
    if not all(isinstance(span, VersionSpan) for span in spans):
        return f"its weight_versions are {spans!r:.200}"
    shown = f"its version spans {[(span.start, span.end) for span in spans]} do not fit its {length} response tokens"
    gaps = list(zip([0, *(s.end for s in spans)], [*(s.start for s in spans), length], strict=True))
    if any(end > start for end, start in gaps) or any(span.start >= span.end for span in spans):
        return shown
    for end, start in gaps:
        if end < start and (mask is None or any(mask[end:start])):
            return f"{shown}: tokens {end} to {start} are trained on and have no version"
    return ""


def check_versions(ticket: Ticket, group: SampleGroup, version: int | None) -> None:
    """Every token that is trained on must be of the weights that were published at the group's lease, or of later ones
    if the ticket mixes versions. Raises RolloutError naming the row.

    version: the one at the lease; None without a lease. Such a group is of the ticket's version, or of any if the
    ticket mixes versions: its age is then looked at when a step takes it.
    A sample without version spans, which a generate function of the user's may leave out, cannot be checked; those of
    one that has some must pass ``check_spans``.
    """
    if ticket.evaluation or ticket.max_staleness is None:
        return
    check_spans(group)
    if version is None:
        if ticket.mixes_versions:
            return
        version = ticket.version
    for sample in group.rows:
        for span in sample.weight_versions if not sample.remove_sample else ():
            if span.version == version or (ticket.mixes_versions and span.version > version):
                continue
            mask = sample.loss_mask
            trained = span.end > span.start if mask is None else any(mask[span.start : span.end])
            if trained:
                raise RolloutError(
                    f"response tokens {span.start} to {span.end} are of weight version {span.version}",
                    where=f"row {sample.row_id}, {ticket.task}",
                    expected=f"version {version}, which was published when the group was leased"
                    + (", or a later one" if ticket.mixes_versions else ""),
                    hint="an engine has other weights, or the rollout function unmasked an older response",
                )


def _can_go_on(parts: list[Sample]) -> bool:
    """Whether the parts of one sample are all done, or are one that was aborted, and are sound."""
    if len(parts) == 1 and parts[0].status is Status.ABORTED:
        return not parts[0].remove_sample and _is_sound(parts[0])  # a sample that the rollout gave up is tried again
    return bool(parts) and is_complete(parts) and all(_is_sound(part) for part in parts)


def _is_sound(sample: Sample) -> bool:
    length = sample.response_length
    if not 0 < length < len(sample.tokens) or len(sample.rollout_log_probs or ()) != length:
        return False
    if any(values is not None and len(values) != length for values in (sample.loss_mask, sample.rollout_kept_tokens)):
        return False
    return tile(sample.weight_versions, length) and all(math.isfinite(v) for v in sample.rollout_log_probs or ())


def _lacks_experts(sample: Sample) -> bool:
    """Whether it has no experts that the next request can add to."""
    experts = sample.rollout_routed_experts
    return not isinstance(experts, np.ndarray) or len(experts) >= len(sample.tokens)


def _copy(sample: Sample) -> Sample:
    """A copy with lists of plain numbers of its own."""
    return sample.changed(
        tokens=[int(token) for token in sample.tokens],
        rollout_log_probs=[float(value) for value in sample.rollout_log_probs or ()],
        loss_mask=None if sample.loss_mask is None else [int(value) for value in sample.loss_mask],
        weight_versions=list(sample.weight_versions),
        metadata=dict(sample.metadata),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A group with its running number."""

    group: SampleGroup
    number: int


class GroupQueue:
    """Groups in the order of their numbers. What is leased from it and put back costs the same however many wait."""

    def __init__(self, groups: Iterable[SampleGroup] = ()) -> None:
        self._entries = {group.uid: Admitted(group=group, number=number) for number, group in enumerate(groups)}
        # May also hold groups that were taken out: those are passed over where they come first.
        self._order = [(entry.number, uid) for uid, entry in self._entries.items()]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Admitted]:
        """All groups with their numbers, the next one first."""
        return sorted(self._entries.values(), key=lambda entry: entry.number)

    def first(self, num_groups: int, chosen: Sequence[GroupUid] | None = None) -> list[Admitted]:
        """The next groups, or those of ``chosen`` that are here, in its order; at most ``num_groups``. They stay."""
        if chosen is not None:
            return [self._entries[uid] for uid in dict.fromkeys(chosen) if uid in self._entries][:num_groups]
        found: dict[GroupUid, Admitted] = {}
        while self._order and len(found) < num_groups:
            number, uid = heapq.heappop(self._order)
            if (entry := self._entries.get(uid)) is not None and entry.number == number:
                found[uid] = entry
        for uid, entry in found.items():
            heapq.heappush(self._order, (entry.number, uid))
        return list(found.values())

    def remove(self, uids: Iterable[GroupUid]) -> None:
        """Take groups out; those that are not here are passed over."""
        for uid in uids:
            self._entries.pop(uid, None)
        if len(self._order) > 2 * len(self._entries) + 64:  # mostly groups that were taken out
            self._order = [(entry.number, entry.group.uid) for entry in self.entries]  # sorted, which is a heap

    def put(self, entry: Admitted) -> None:
        """Put a group at the place of its number."""
        self._entries[entry.group.uid] = entry
        heapq.heappush(self._order, (entry.number, entry.group.uid))

    def headers(self, rule: RequeueRule) -> list[QueueHeader]:
        """What a buffer filter sees of all groups, the next one first. rule: knows their rewards."""
        return [_header(entry.group, rule) for entry in self.entries]


def _header(group: SampleGroup, rule: RequeueRule) -> QueueHeader:
    prompt = group[0].prompt
    text = prompt if isinstance(prompt, str) else "".join(str(turn) for turn in prompt)
    return QueueHeader(
        uid=group.uid,
        admitted=group[0].group_index or 0,
        prompt_length=len(text),
        attempts=group.attempt,
        reward=rule.reward(group),
        version=oldest_version(group),
    )
