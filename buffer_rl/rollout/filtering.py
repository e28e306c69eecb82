"""Applies the user's dynamic sampling filter to one scored group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from buffer_rl.contract_check import check_filter_decision
from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.rollout.calling import call_user
from buffer_rl.rollout.failures import traceback_tail
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
    where = f"dynamic sampling filter {reference!r}, group {group.uid}"
    try:
        answer = await call_user(function, partial(function, args, group))
    except BufferRLError:
        raise
    except Exception as error:  # fault boundary: the user's code
        raise RolloutError(
            f"the filter raised {type(error).__name__}: {error}\n{traceback_tail(error)}", where=where
        ) from error
    decision = check_filter_decision(answer, where=where)
    if not decision.keep and not decision.reason:
        return FilterDecision(keep=False, reason=DEFAULT_REASON)
    return decision


async def apply_sample_filter(
    function: Callable[..., Any], reference: str | None, args: Any, groups: list[SampleGroup], task: str
) -> None:
    """Let the user's filter mark samples of a whole rollout with ``remove_sample``.

    Raises RolloutError, naming the filter, if it raises.
    """
    try:
        await call_user(function, partial(function, args, groups))
    except BufferRLError:
        raise
    except Exception as error:  # fault boundary: the user's code
        raise RolloutError(
            f"the filter raised {type(error).__name__}: {error}\n{traceback_tail(error)}",
            where=f"sample filter {reference!r}, {task}",
        ) from error


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
    where = f"buffer filter {reference!r}, rollout {rollout_id}"
    try:
        answer = list(function(args, rollout_id, list(headers), num_samples))
    except BufferRLError:
        raise
    except Exception as error:  # fault boundary: the user's code
        text = f"the filter raised {type(error).__name__}: {error}\n{traceback_tail(error)}"
        raise RolloutError(text, where=where) from error
    known = {header.uid for header in headers}
    strangers = [header for header in answer if getattr(header, "uid", None) not in known]
    if strangers:
        raise RolloutError(
            f"it returned {strangers[0]!r}", where=where, expected="headers of the list that it received"
        )
    return [header.uid for header in answer]
