"""Checks of what plugins return: a reward, a filter's decision, a rollout's output.

The checkers of plugin objects themselves are in ``buffer_rl.plugin.signature``.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from buffer_rl.errors import RewardError, RolloutError, short_repr
from buffer_rl.records.groups import NO_UID, FilterDecision, GroupUid, RolloutOutput, Sample, SampleGroup, Status

_log = logging.getLogger(__name__)
FLOAT32_MAX = float(np.finfo(np.float32).max)


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


def check_group_rewards(value: object, count: int, *, where: str) -> list[float]:
    """The rewards of a group's ``count`` samples, in order: finite numbers. Raises RewardError otherwise."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes) or len(value) != count:
        raise RewardError(f"the reward is {short_repr(value)}", where=where, expected=f"a list of {count} numbers")
    return [_finite_number(entry, f"{where}, entry {i}") for i, entry in enumerate(value)]


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
    raise RolloutError(
        f"the filter returned {short_repr(value)}",
        where=where,
        expected="FilterDecision(keep=True or False, reason=text), or True or False",
        hint="a filter without a return statement returns None" if value is None else "",
    )


def check_statuses(samples: Iterable[Sample], *, where: str) -> None:
    """Make the status of each sample a ``Status``, in place: a function of the user's may set it as text.

    Raises RolloutError, naming ``where`` and the sample, for anything that is no status."""
    for sample in samples:
        try:
            sample.status = Status(sample.status)
        except ValueError:
            row = f"sample {sample.index}" if sample.uid is None else f"row {sample.row_id}"
            raise RolloutError(
                f"sample.status is {short_repr(sample.status)}",
                where=where if row in where else f"{where}, {row}",
                expected=", ".join(Status),
            ) from None


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
            raise RolloutError(
                f"entry {position} of the returned groups is {short_repr(entry)}",
                where=where,
                expected="SampleGroup, as buffer.get_samples returned it, or the list of its samples",
            )
        if group.uid in seen and group.uid != NO_UID:
            raise RolloutError(f"the group {group.uid} was returned twice", where=where, expected="each group once")
        seen.add(group.uid)
        check_statuses(group, where=where)
        checked.append(group)
    return RolloutOutput(groups=checked, metrics=check_metrics(metrics, where=where))


_OF_A_SAMPLE = frozenset({"tokens", "response", "response_length", "reward", "status", "metadata"})


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
    raise RolloutError(
        f"the rollout function returned {short_repr(value)}",
        where=where,
        expected="RolloutOutput(groups=[...], metrics={...}), or a list of SampleGroup",
        hint="return RolloutOutput() if every group was reported with buffer.finish" if value is None else "",
    )


def check_metrics(metrics: object, *, where: str) -> dict[str, float]:
    """Metrics as floats by name. Texts are written to the log. Raises RolloutError naming the first that is neither."""
    if not isinstance(metrics, Mapping):
        raise RolloutError(f"the metrics are {short_repr(metrics)}", where=where, expected="numbers by name")
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        number = _unwrap_scalar(value)
        if isinstance(name, str) and isinstance(number, str):
            _log.warning("%s: %s = %s", where, name, number)
            continue
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
    if abs(result) > FLOAT32_MAX:
        what = f"the reward is {short_repr(value)}, too large to train on"
        raise RewardError(what, where=where, expected=f"a number of at most {FLOAT32_MAX:.3g}, which float32 holds")
    return result


def _unwrap_scalar(value: object) -> object:
    """A Python number for a scalar or array of no dimensions of numpy or torch (neither is imported here)."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()  # type: ignore[attr-defined]
    return value


def _as_bool(value: object) -> bool | None:
    scalar = _unwrap_scalar(value)
    return scalar if isinstance(scalar, bool) else None
