"""Goes on with a response that was aborted: what it has so far is part of the prompt, and stays in the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.engine.text import stop_window, text_before_stop
from buffer_rl.types import Sample, SampleGroup, Status, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """What a sample has of its response: ``[num_tokens]`` each. Without tokens, everything is yet to be generated."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    loss_mask: list[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)


def so_far(args: Any, sample: Sample) -> SoFar:
    """What is to be kept of the sample's response: under ``--partial-rollout``, that of an aborted one."""
    length = sample.response_length
    if not args.partial_rollout or sample.status is not Status.ABORTED or length == 0:
        return SoFar()
    return SoFar(
        ids=list(sample.tokens[-length:]),
        log_probs=list(sample.rollout_log_probs or ()),
        spans=list(sample.weight_versions),
        loss_mask=None if sample.loss_mask is None else list(sample.loss_mask),
    )


def start_anew(sample: Sample) -> Sample:
    """The sample with its prompt alone."""
    return SampleGroup(uid=sample.row_id.uid, samples=[sample]).as_prompts()[0]


def stops_of(params: dict[str, Any]) -> list[str]:
    """The stop strings of sampling parameters."""
    stops = params.get("stop") or []
    return [stops] if isinstance(stops, str) else list(stops)


def end_of_straddling_stop(tokenizer: Any, ids: Sequence[int], start: int, stops: Sequence[str]) -> int | None:
    """How many of ``ids`` belong to a response in which a stop string begins before token ``start`` and ends after
    it: an engine that was asked to go on from ``start`` does not see such a one. None if there is none.
    """
    if not stops or start == 0:
        return None
    width = stop_window(stops)
    first = max(0, start - width)
    head = tokenizer.decode(ids[first:start], skip_special_tokens=False)
    for end in range(start + 1, min(len(ids), start + width) + 1):
        tail = tokenizer.decode(ids[first:end], skip_special_tokens=False)
        if any(stop in tail and stop not in head for stop in stops):
            return end
    return None


def response_text(tokenizer: Any, ids: Sequence[int], params: dict[str, Any], matched: object) -> str:
    """Text of a whole response as an engine would give it for these sampling parameters. matched: the token, or the
    string, that stopped it."""
    skip_special_tokens = bool(params.get("skip_special_tokens", True))

    def decode(chosen: Sequence[int], skip: bool) -> str:
        return str(tokenizer.decode(list(chosen), skip_special_tokens=skip))

    if params.get("no_stop_trim"):
        return decode(ids, skip_special_tokens)
    shown = ids[:-1] if isinstance(matched, int) and ids and ids[-1] == matched else ids
    return text_before_stop(decode, shown, stops_of(params), skip_special_tokens)
