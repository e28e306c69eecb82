"""What evaluation functions written for slime return, read as a ``RolloutOutput``.

Their answer maps each data set to ``rewards``, ``truncated`` and ``samples``, one entry a sample; it may stand in the
field ``data`` of a record that has ``metrics`` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from buffer_rl.contract_check import check_reward
from buffer_rl.errors import RewardError, RolloutError
from buffer_rl.resolution.errors import short_repr
from buffer_rl.types import GroupUid, RolloutOutput, Sample, SampleGroup

EXPECTED = "{data set: {'rewards': [a number a sample], 'truncated': [a boolean a sample], 'samples': [...]}}"


def read_evaluation(answer: Any, args: Any, leased: Mapping[GroupUid, SampleGroup], *, where: str) -> Any:
    """``answer`` as a ``RolloutOutput``, if it is such a mapping; anything else as it is.

    The metrics are ``eval/{name}``, the mean reward, and where they are told ``eval/{name}/truncated`` and
    ``eval/{name}/response_len``. Samples of leased groups become finished groups where all of a group are there.
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
        samples += [sample for sample in result.get("samples") or () if isinstance(sample, Sample)]
    return RolloutOutput(groups=_whole_groups(samples, leased), metrics=metrics | dict(extra or {}))


def _metrics_of(name: str, result: Mapping[str, Any], args: Any, where: str) -> dict[str, float]:
    rewards = [_reward(value, args, where) for value in _entries(result, "rewards", where)]
    if not rewards:
        raise RolloutError("there are no rewards", where=where, expected=EXPECTED)
    metrics = {f"eval/{name}": sum(rewards) / len(rewards)}
    if truncated := _entries(result, "truncated", where):
        metrics[f"eval/{name}/truncated"] = sum(map(bool, truncated)) / len(truncated)
    lengths = [sample.response_length for sample in _entries(result, "samples", where) if isinstance(sample, Sample)]
    if lengths:
        metrics[f"eval/{name}/response_len"] = sum(lengths) / len(lengths)
    return metrics


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
    by_uid: dict[GroupUid, list[Sample]] = {}
    for sample in samples:
        if sample.uid is not None and sample.uid in leased:
            by_uid.setdefault(sample.uid, []).append(sample)
    return [
        SampleGroup(
            uid=uid,
            samples=found,
            attempt=leased[uid].attempt,
            incarnation=leased[uid].incarnation,
            data_set=leased[uid].data_set,
        )
        for uid, found in by_uid.items()
        if len(found) == len(leased[uid])
    ]
