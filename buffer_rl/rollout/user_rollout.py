"""Calls a user's rollout function and reads its answer as a ``RolloutOutput``.

Evaluation functions written for slime return, for each data set, ``rewards``, ``truncated`` and ``samples``, one entry
a sample; this mapping may stand in the field ``data`` of a record that has ``metrics`` too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from buffer_rl.args import Args
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.errors import BufferRLError, DataError, RewardError, RolloutError, short_repr
from buffer_rl.kinds.reward import check_reward
from buffer_rl.kinds.rollout import as_leased_group, as_sample, check_rollout_output, check_statuses
from buffer_rl.options.user_args import user_args
from buffer_rl.plan.algorithm import is_supervised
from buffer_rl.plugin.calls import error_text
from buffer_rl.plugin.signature import call_rollout
from buffer_rl.records.groups import GroupUid, RolloutOutput, Sample, SampleGroup, sample_means
from buffer_rl.rollout.deadlines import overdue, ticket_deadline
from buffer_rl.rollout.evaluate import eval_metrics
from buffer_rl.rollout.prompts import PromptEncoder
from buffer_rl.rollout.stats import OF_KEPT, RolloutStats, rewards_of
from buffer_rl.rollout.user_functions import call_user

EXPECTED_EVALUATION = (
    "{data set: {'rewards': [a number a sample], 'truncated': [a boolean a sample], 'samples': [...]}}"
)
GRACE_S = 30.0
"""Added to the deadline: the built-in functions keep it themselves and report their progress; others end here."""


def render(prompts: PromptEncoder, group: SampleGroup) -> None:
    """Make the prompts of the group's samples text, in place. One that cannot be rendered stays as it is: the error
    comes where it is encoded, and is that of its group."""
    first = group[0].prompt
    with contextlib.suppress(DataError):
        text = prompts.rendered(group[0])
        for sample in group:
            sample.prompt = text if sample.prompt == first else prompts.rendered(sample)


async def run_user_rollout(
    function: Callable[..., Any], args: Args, buffer: RolloutClient, *, where: str
) -> RolloutOutput:
    """The checked output of ``function`` for ``buffer.ticket``, with the metrics of ``finished_metrics``.

    Raises RolloutError, naming ``where``, if the function raises, returns something else, or exceeds its deadline
    (``ticket_deadline``) by ``GRACE_S``.
    """
    ticket = buffer.ticket
    call = partial(call_rollout, function, user_args(args), ticket.rollout_id, buffer, ticket.evaluation)
    deadline = None
    try:
        async with ticket_deadline(args, buffer, GRACE_S) as deadline:
            answer = await call_user(function, call)
        if ticket.evaluation:
            answer = read_evaluation(answer, args, buffer.groups, where=where)
        size = 0 if ticket.evaluation else args.n_samples_per_prompt
        output = check_rollout_output(answer, where=where, leased=buffer.groups, group_size=size)
        finished = {buffer.marked(group).uid: group for group in output.groups} | buffer.finished
        output.metrics |= finished_metrics(args, ticket.evaluation, finished.values(), output.metrics)
        return output
    except BufferRLError:
        raise
    except Exception as error:  # the boundary to user code: name it, and keep its traceback
        if isinstance(error, TimeoutError) and deadline is not None and deadline.expired():
            raise RolloutError(f"the rollout function {overdue(args)}", where=where) from error
        raise RolloutError(f"the rollout function raised {error_text(error)}", where=where) from error


def finished_metrics(
    args: Args, evaluation: bool, groups: Iterable[SampleGroup], given: Mapping[str, float]
) -> dict[str, float]:
    """Reward, lengths and truncation of finished groups under the built-in rollout's names, as far as the ``given``
    metrics of the rollout function lack them. For ``sft_loss``, whose rewards mean nothing, lengths alone."""
    names = {name.removeprefix("rollout/") for name in given}
    if not evaluation and names >= OF_KEPT:  # as the built-in functions give them
        return {}
    ordered = sorted(groups, key=lambda group: group.uid)
    stats = RolloutStats()
    try:
        if evaluation:  # under names of its own where the function gives scores
            return {} if any(name.startswith("eval/") for name in given) else eval_metrics(args, ordered)
        for group in ordered:
            stats.count_kept(group, rewards_of(args, group))
    except (TypeError, ValueError):  # lengths that are no numbers: what finishes the groups says which
        return {}
    return {
        name: value
        for name, value in stats.metrics_of_kept().items()
        if name not in names and (not is_supervised(args) or name.startswith("response_len/"))
    }


def read_evaluation(answer: Any, args: Args, leased: Mapping[GroupUid, SampleGroup], *, where: str) -> Any:
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
            raise RolloutError(f"it returned {short_repr(result)}", where=at, expected=EXPECTED_EVALUATION)
        metrics |= _metrics_of(str(name), result, args, at)
        entries = map(as_sample, _entries(result, "samples", at))
        own = [sample for sample in entries if isinstance(sample, Sample)]
        check_statuses(own, where=at)
        samples += own
    return RolloutOutput(groups=_whole_groups(samples, leased), metrics=metrics | dict(extra or {}))


def _metrics_of(name: str, result: Mapping[str, Any], args: Args, where: str) -> dict[str, float]:
    rewards = [_reward(value, args, where) for value in _entries(result, "rewards", where)]
    if not rewards:
        raise RolloutError("there are no rewards", where=where, expected=EXPECTED_EVALUATION)
    samples: Any = [*map(as_sample, _entries(result, "samples", where))]

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
    """A key that is equal for the parts of one sample; a sample that was never leased has a key of its own."""
    if isinstance(sample, Sample) and sample.uid is not None:
        return sample.uid, sample.sample_index
    return place


def _entries(result: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    values = result.get(name)
    if values is None:
        return ()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RolloutError(f"{name} is {short_repr(values)}", where=where, expected=EXPECTED_EVALUATION)
    return values


def _reward(value: object, args: Args, where: str) -> float:
    try:
        checked = check_reward(value, where=where)
        return Sample(reward=checked).get_reward_value(args) if isinstance(checked, dict) else checked
    except (RewardError, ValueError) as error:
        what = error.what if isinstance(error, RewardError) else "--reward-key names none of a reward's numbers"
        raise RolloutError(what, where=where, expected=EXPECTED_EVALUATION) from error


def _whole_groups(samples: Sequence[Sample], leased: Mapping[GroupUid, SampleGroup]) -> list[SampleGroup]:
    """The leased groups whose samples are all in ``samples``; the Buffer counts the others as unreported."""
    by_uid: dict[GroupUid, dict[int, Sample]] = {}
    for sample in samples:
        if sample.uid is not None and sample.uid in leased:
            by_uid.setdefault(sample.uid, {})[id(sample)] = sample  # a sample may be in several data sets
    groups = [as_leased_group(list(found.values()), leased) for found in by_uid.values()]
    return [group for group in groups if group and _indices(group) == _indices(leased[group.uid])]


def _indices(group: SampleGroup) -> set[int]:
    return {sample.sample_index for sample in group}
