"""Checks of what plugins return: a reward, a filter's decision, a rollout's output.

The checkers of plugin objects themselves are in ``buffer_rl.resolution.signature``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence

from buffer_rl.errors import RewardError, RolloutError
from buffer_rl.resolution.errors import short_repr
from buffer_rl.types import FilterDecision, RolloutOutput, SampleGroup


def check_reward(value: object, *, where: str) -> float | dict[str, float]:
    """The reward as a float, or as floats by name.

    Finite numbers are accepted, booleans as 0 and 1, numpy scalars and arrays of no dimensions too. None, NaN,
    infinity, text and lists raise RewardError: a reward that could not be computed is never a silent 0.
    """
    if not isinstance(value, Mapping):
        return _finite_number(value, where)
    if not value:
        raise RewardError("the reward is an empty mapping", where=where, expected="at least one name with a number")
    rewards: dict[str, float] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            raise RewardError(f"the reward has the key {key!r}", where=where, expected="text keys")
        rewards[key] = _finite_number(entry, f"{where}, entry {key!r}" if where else f"entry {key!r}")
    return rewards


def check_filter_decision(value: object, *, where: str) -> FilterDecision:
    """The decision of a dynamic sampling filter; a bare boolean is accepted. Raises RolloutError otherwise."""
    if isinstance(value, FilterDecision):
        keep = _as_bool(value.keep)
        if keep is not None and isinstance(value.reason, str):
            return FilterDecision(keep=keep, reason=value.reason)
    else:
        keep = _as_bool(value)
        if keep is not None:
            return FilterDecision(keep=keep)
    raise RolloutError(
        f"the filter returned {short_repr(value)}",
        where=where,
        expected="FilterDecision(keep=True or False, reason=text), or True or False",
        hint="a filter without a return statement returns None" if value is None else "",
    )


def check_rollout_output(value: object, *, where: str) -> RolloutOutput:
    """The output of a rollout function; a bare list of groups is accepted. Raises RolloutError otherwise."""
    if isinstance(value, RolloutOutput):
        groups, metrics = value.groups, value.metrics
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | SampleGroup):
        groups, metrics = list(value), {}
    else:
        raise RolloutError(
            f"the rollout function returned {short_repr(value)}",
            where=where,
            expected="RolloutOutput(groups=[...], metrics={...}), or a list of SampleGroup",
            hint="return RolloutOutput() if every group was reported with buffer.finish" if value is None else "",
        )
    seen: set[object] = set()
    for position, group in enumerate(groups):
        if not isinstance(group, SampleGroup):
            raise RolloutError(
                f"entry {position} of the returned groups is {short_repr(group)}",
                where=where,
                expected="SampleGroup, as buffer.get_samples handed it out",
            )
        if group.uid in seen:
            raise RolloutError(f"the group {group.uid} was returned twice", where=where, expected="each group once")
        seen.add(group.uid)
    return RolloutOutput(groups=list(groups), metrics=_check_metrics(metrics, where))


def _check_metrics(metrics: object, where: str) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise RolloutError(f"the metrics are {short_repr(metrics)}", where=where, expected="numbers by name")
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        number = _unwrap_scalar(value)
        if not isinstance(name, str) or not isinstance(number, numbers.Real):
            raise RolloutError(f"the metric {name!r} is {short_repr(value)}", where=where, expected="a number")
        checked[name] = float(number)
    return checked


def _finite_number(value: object, where: str) -> float:
    number = _unwrap_scalar(value)
    if not isinstance(number, numbers.Real):
        raise RewardError(
            f"the reward is {short_repr(value)}",
            where=where,
            expected="a finite number, or a mapping of names to finite numbers",
            hint="a reward function without a return statement returns None" if value is None else "",
        )
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RewardError(f"the reward is {short_repr(value)}, not finite", where=where, expected="a finite number")
    return result


def _unwrap_scalar(value: object) -> object:
    """A Python number for a scalar or array of no dimensions of numpy or torch (neither is imported here)."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()  # type: ignore[attr-defined]
    return value


def _as_bool(value: object) -> bool | None:
    scalar = _unwrap_scalar(value)
    return scalar if isinstance(scalar, bool) else None
