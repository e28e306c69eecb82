"""Applies the user's filters: to one scored group, to a whole rollout, to the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from buffer_rl.contract_check import check_filter_decision
from buffer_rl.contracts import RolloutBuffer
from buffer_rl.errors import RolloutError
from buffer_rl.resolution.calls import call, place, returned, short_repr
from buffer_rl.resolution.signature import takes
from buffer_rl.rollout.calling import call_plugin
from buffer_rl.types import FilterDecision, GroupUid, QueueHeader, SampleGroup

DEFAULT_REASON = "filtered"


async def apply_filter(
    function: Callable[..., Any] | None, reference: str | None, args: Any, group: SampleGroup
) -> FilterDecision:
    """The filter's decision; a group is kept where there is no filter.

    The function may be sync or async and may return a bool. A drop without a reason is counted as
    ``filtered``. Raises RolloutError, naming the filter and the group, if it raises or returns something else.
    """
    if function is None:
        return FilterDecision(keep=True)
    at = f"group {group.uid}"
    answer = await call_plugin("filter", reference, function, args, group, at=at)
    decision = check_filter_decision(answer, where=place("filter", reference, at))
    if not decision.keep and not decision.reason:
        return FilterDecision(keep=False, reason=DEFAULT_REASON)
    return decision


async def apply_sample_filter(
    function: Callable[..., Any], reference: str | None, args: Any, groups: list[SampleGroup], task: str
) -> None:
    """Let the user's filter mark samples of a whole rollout with ``remove_sample``.

    Raises RolloutError, naming the filter, if it raises, or returns something: what it keeps, perhaps, which would
    be lost.
    """
    kind = "sample_filter"
    answer = await call_plugin(kind, reference, function, args, groups, at=task)
    if answer is not None:
        expected = "None: it marks samples with sample.remove_sample = True"
        raise returned(kind, reference, answer, expected, at=task, error_class=RolloutError)


async def process_all_samples(
    function: Callable[..., Any],
    reference: str | None,
    args: Any,
    groups: list[SampleGroup],
    buffer: RolloutBuffer,
    *,
    at: str,
) -> None:
    """Show the user's function all generated groups of a rollout. One that takes three arguments, as slime's do, gets
    the buffer as its data source.

    Raises RolloutError, naming the function, if it raises, or returns something, which would be lost."""
    kind, arguments = "all_samples_process", (args, groups, buffer) if takes(function, 3) else (args, groups)
    answer = await call_plugin(kind, reference, function, *arguments, at=at)
    if answer is not None:
        raise returned(kind, reference, answer, "None: it changes samples in place", at=at, error_class=RolloutError)


def choose_queued(
    function: Callable[..., Any],
    reference: str | None,
    args: Any,
    rollout_id: int,
    headers: list[QueueHeader],
    num_samples: int,
) -> list[GroupUid]:
    """The uids of the queued groups that the user's buffer filter chooses, in its order.

    Raises RolloutError, naming the filter, if it raises, or returns something that it was not given.
    """
    kind, at = "buffer_filter", f"rollout {rollout_id}"
    expected = "a list of some of the headers (buffer_rl.types.QueueHeader) in the list that it received"
    try:
        answer = call(
            kind, reference, function, args, rollout_id, list(headers), num_samples, at=at, error_class=RolloutError
        )
    except RolloutError as error:
        if isinstance(error.__cause__, AttributeError | TypeError):
            error.expected, error.hint = expected, "buffer holds headers of the queued groups, not their samples"
        raise
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise returned(kind, reference, answer, expected, at=at, error_class=RolloutError)
    known = {header.uid for header in headers}
    strangers = [entry for entry in answer if not isinstance(entry, QueueHeader) or entry.uid not in known]
    if strangers:
        hint = f"one of its entries is {short_repr(strangers[0])}"
        raise returned(kind, reference, answer, expected, at=at, hint=hint, error_class=RolloutError)
    return [header.uid for header in answer]
