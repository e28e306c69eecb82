"""What rewards and filters of groups receive and return."""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from buffer_rl.errors import DataError, RewardError, RolloutError, short_repr
from buffer_rl.kinds.kind import PluginKind
from buffer_rl.records.groups import FilterDecision, Sample, SampleGroup

FLOAT32_MAX = float(np.finfo(np.float32).max)


class Abstain(Exception):
    """A reward raises it if a sample cannot be judged, and that is nobody's failure: another reward of the row's
    ``rewards`` counts in its place, and a sample that nothing else scores is masked. ``reason``: a few words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RewardModel(Protocol):
    """Scores one sample: a finite number, or a mapping of which ``--reward-key`` names the one to train on. It raises
    ``Abstain`` for a sample that it does not judge; among several rewards of a row, None says the same."""

    def __call__(
        self, args: Any, sample: Sample
    ) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]: ...


class GroupRewardModel(Protocol):
    """Scores all samples of a prompt together: one finite number a sample, in order."""

    def __call__(self, args: Any, group: SampleGroup) -> Sequence[float] | Awaitable[Sequence[float]]: ...


class DynamicSamplingFilter(Protocol):
    """Decides whether a finished, scored group is trained on."""

    def __call__(self, args: Any, group: SampleGroup) -> FilterDecision | bool: ...


class SampleFilter(Protocol):
    """Marks samples of a whole rollout with ``sample.remove_sample = True``."""

    def __call__(self, args: Any, groups: list[SampleGroup]) -> None: ...


class RewardPostProcess(Protocol):
    """Turns the rewards of one group's samples into ``(raw_rewards, rewards)``, one number a sample each."""

    def __call__(self, args: Any, samples: list[Sample]) -> tuple[Sequence[float], Sequence[float]]: ...


def check_reward(value: object, *, where: str) -> float | dict[str, Any]:
    """The reward as a float, or by name as floats, texts and Nones, of which ``--reward-key`` names a number.

    Finite numbers are accepted, booleans as 0 and 1, numpy scalars and arrays of no dimensions too. None, NaN,
    infinity, text and lists raise RewardError: a reward that could not be computed is never a silent 0.
    """
    if type(value) is float and abs(value) <= FLOAT32_MAX:  # nearly all of them
        return value
    if not isinstance(value, Mapping):
        return _finite_number(value, where)
    if not value:
        raise RewardError("the reward is an empty mapping", where=where, expected="at least one name with a number")
    rewards: dict[str, Any] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            raise RewardError(f"the reward has the key {key!r}", where=where, expected="text keys")
        number = None
        if entry is not None and not isinstance(entry, str):
            number = _finite_number(entry, f"{where}, entry {key!r}" if where else f"entry {key!r}")
        rewards[key] = entry if number is None else number
    if all(isinstance(entry, str | None) for entry in rewards.values()):
        raise RewardError("the reward is a mapping without a number", where=where, expected="one under --reward-key")
    return rewards


def reward_weights(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The rewards that a row's metadata choose, with their weights: those of ``rewards``, or ``rm_type`` alone; empty
    if they choose none. Raises DataError for another form; the caller says where."""
    single, several = metadata.get("rm_type"), metadata.get("rewards")
    if several is None:
        return {str(single): 1.0} if single else {}
    expected = 'rewards: {"NAME": weight, ...} with finite numbers, one of them not 0, and no rm_type beside it'
    weights = several if isinstance(several, Mapping) else {}
    numbers_only = all(
        isinstance(name, str) and type(weight) in (int, float) and abs(weight) <= FLOAT32_MAX
        for name, weight in weights.items()
    )
    if single or not numbers_only or not any(weights.values()):
        beside = f"rm_type {single!r:.80} and " if single else ""
        raise DataError(f"the metadata have {beside}rewards {short_repr(several)}", expected=expected)
    return {name: float(weight) for name, weight in weights.items()}


def weighted_reward(weights: Mapping[str, float], rewards: Mapping[str, float | None]) -> float | None:
    """The sum of the weighted ``rewards``; None if all that have a weight abstain.

    What abstains (None) is no 0: the sum of the others is scaled to the weights of all,
    ``sum(w r) * sum(|w|) / sum(|w| of those that answer)``, so that it has the scale of a sample that all score.
    """
    answered = [name for name in weights if rewards[name] is not None and weights[name]]
    if not answered:
        return None
    of_all, of_answered = (math.fsum(abs(weights[name]) for name in names) for names in (weights, answered))
    total = math.fsum(weights[name] * (rewards[name] or 0.0) for name in answered)
    return total if of_all == of_answered else total * (of_all / of_answered)


def check_group_rewards(value: object, count: int, *, where: str) -> list[float]:
    """The rewards of a group's ``count`` samples, in order: finite numbers. Raises RewardError otherwise."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes) or len(value) != count:
        raise RewardError(f"the reward is {short_repr(value)}", where=where, expected=f"a list of {count} numbers")
    return [_finite_number(entry, f"{where}, entry {i}") for i, entry in enumerate(value)]


def _finite_number(value: object, where: str) -> float:
    number = unwrap_scalar(value)
    if not isinstance(number, numbers.Real):
        expected = "a finite number, or a mapping of names to finite numbers"
        hint = "a reward function without a return statement returns None" if value is None else ""
        raise RewardError(f"the reward is {short_repr(value)}", where=where, expected=expected, hint=hint)
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RewardError(f"the reward is {short_repr(value)}, not finite", where=where, expected="a finite number")
    if abs(result) > FLOAT32_MAX:
        what = f"the reward is {short_repr(value)}, too large to train on"
        raise RewardError(what, where=where, expected=f"a number of at most {FLOAT32_MAX:.3g}, which float32 holds")
    return result


def unwrap_scalar(value: object) -> object:
    """A Python number for a scalar or array of no dimensions of numpy or torch (neither is imported here)."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()  # type: ignore[attr-defined]
    return value


def check_filter_decision(value: object, *, where: str) -> FilterDecision:
    """The decision of a dynamic sampling filter; a bare boolean and any object with ``keep`` and perhaps ``reason``
    are accepted. Raises RolloutError otherwise."""
    if isinstance(value, FilterDecision):
        keep = _as_bool(value.keep)
        if keep is not None and isinstance(value.reason, str):
            return value if keep is value.keep else replace(value, keep=keep)
    elif (keep := _as_bool(value)) is not None:
        return FilterDecision(keep=keep)
    elif (keep := _as_bool(getattr(value, "keep", None))) is not None:  # a record of slime's or of the user's own
        reason = getattr(value, "reason", None)
        if reason is None or isinstance(reason, str):
            fallback = bool(getattr(value, "keep_when_insufficient", False))
            return FilterDecision(keep=keep, reason=reason or "", keep_when_insufficient=fallback)
    expected = "FilterDecision(keep=True or False, reason=text), or True or False"
    hint = "a filter without a return statement returns None" if value is None else ""
    raise RolloutError(f"the filter returned {short_repr(value)}", where=where, expected=expected, hint=hint)


def _as_bool(value: object) -> bool | None:
    scalar = unwrap_scalar(value)
    return scalar if isinstance(scalar, bool) else None


KINDS = (
    PluginKind(
        name="reward",
        flags=("--rm-type", "--custom-rm-path"),
        protocol=RewardModel,
        signature="(args, sample) -> float | dict",
        may_be_async=True,
    ),
    PluginKind(
        name="group_reward",
        flags=("--custom-group-rm-path",),
        protocol=GroupRewardModel,
        signature="(args, group) -> list[float]",
        may_be_async=True,
    ),
    PluginKind(
        name="filter",
        flags=("--dynamic-sampling-filter-path",),
        protocol=DynamicSamplingFilter,
        signature="(args, group) -> FilterDecision | bool",
        may_be_async=True,
    ),
    PluginKind(
        name="sample_filter",
        flags=("--rollout-sample-filter-path",),
        protocol=SampleFilter,
        signature="(args, groups) -> None",
        may_be_async=True,
    ),
    PluginKind(
        name="reward_post_process",
        flags=("--custom-reward-post-process-path",),
        protocol=RewardPostProcess,
        signature="(args, samples) -> (raw_rewards, rewards)",
    ),
)
