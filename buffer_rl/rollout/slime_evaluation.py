"""What evaluation functions written for slime return, read as a ``RolloutOutput``.

Their answer maps each data set to ``rewards``, ``truncated`` and ``samples``, one entry a sample; it may stand in the
field ``data`` of a record that has ``metrics`` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from buffer_rl.contract_check import as_leased_group, check_reward, check_statuses
from buffer_rl.errors import RewardError, RolloutError
from buffer_rl.resolution.calls import short_repr
from buffer_rl.types import GroupUid, RolloutOutput, Sample, SampleGroup, sample_means

EXPECTED = "{data set: {'rewards': [a number a sample], 'truncated': [a boolean a sample], 'samples': [...]}}"


def read_evaluation(answer: Any, args: Any, leased: Mapping[GroupUid, SampleGroup], *, where: str) -> Any:
    """``answer`` as a ``RolloutOutput``, if it is such a mapping; anything else as it is.

    The metrics are ``eval/{name}``, the mean reward, and where they are there ``eval/{name}/truncated`` and
    ``eval/{name}/response_len``; parts of one sample, which have its uid and ``sample_index``, count as one. Samples of
    leased groups become finished groups where all of a group are there.
    Raises RolloutError, naming ``where``, for a mapping of another form.
    """
    if isinstance(answer, RolloutOutput | Sequence):
        return answer
    data = answer if isinstance(answer, Mapping) else getattr(answer, "data", None)
    if not isinstance(data, Mapping):
        return answer
    extra = None if isinstance(answer, Mapping) else getattr(answer, "metrics", None)
    metrics: dict[str, Any] = {}
    samples: list[Sample] = []
    for name, result in data.items():
        at = f"{where}, data set {name!r}"
        if not isinstance(result, Mapping) or "rewards" not in result:
            raise RolloutError(f"it returned {short_repr(result)}", where=at, expected=EXPECTED)
        metrics |= _metrics_of(str(name), result, args, at)
        own = [sample for sample in _entries(result, "samples", at) if isinstance(sample, Sample)]
        check_statuses(own, where=at)
        samples += own
    return RolloutOutput(groups=_whole_groups(samples, leased), metrics=metrics | dict(extra or {}))


def _metrics_of(name: str, result: Mapping[str, Any], args: Any, where: str) -> dict[str, float]:
    rewards = [_reward(value, args, where) for value in _entries(result, "rewards", where)]
    if not rewards:
        raise RolloutError("there are no rewards", where=where, expected=EXPECTED)
    samples = _entries(result, "samples", where)

    def mean(values: Sequence[float]) -> float:
        """Over samples, where each of ``values`` has its sample; else over the values."""
        keys = [_sample_of(samples[i], i) if len(samples) == len(values) else i for i in range(len(values))]
        means = sample_means(keys, values)
        return sum(means) / len(means)

    metrics = {f"eval/{name}": mean(rewards)}
    if truncated := _entries(result, "truncated", where):
        metrics[f"eval/{name}/truncated"] = mean([float(bool(value)) for value in truncated])
    if samples and all(isinstance(sample, Sample) for sample in samples):
        metrics[f"eval/{name}/response_len"] = mean([sample.response_length for sample in samples])
    return metrics


def _sample_of(sample: object, place: int) -> object:
    """What the parts of one sample share; one that was never leased is a sample by itself."""
    if isinstance(sample, Sample) and sample.uid is not None:
        return sample.uid, sample.sample_index
    return place


def _entries(result: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    values = result.get(name)
    if values is None:
        return ()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RolloutError(f"{name} is {short_repr(values)}", where=where, expected=EXPECTED)
    return values


def _reward(value: object, args: Any, where: str) -> float:
    try:
        checked = check_reward(value, where=where)
        return Sample(reward=checked).get_reward_value(args) if isinstance(checked, dict) else checked
    except (RewardError, ValueError) as error:
        what = error.what if isinstance(error, RewardError) else "--reward-key names none of a reward's numbers"
        raise RolloutError(what, where=where, expected=EXPECTED) from error


def _whole_groups(samples: Sequence[Sample], leased: Mapping[GroupUid, SampleGroup]) -> list[SampleGroup]:
    """The leased groups of which all samples are there; the Buffer counts the others as unreported."""
    by_uid: dict[GroupUid, dict[int, Sample]] = {}
    for sample in samples:
        if sample.uid is not None and sample.uid in leased:
            by_uid.setdefault(sample.uid, {})[id(sample)] = sample  # it may be in several data sets
    groups = [as_leased_group(list(found.values()), leased) for found in by_uid.values()]
    return [group for group in groups if group and _indices(group) == _indices(leased[group.uid])]


def _indices(group: SampleGroup) -> set[int]:
    return {sample.sample_index for sample in group}
