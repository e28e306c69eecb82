"""Rewards and dynamic sampling filters under slime's names: ``async_rm`` scores as the run does, the graders
are those of ``rm_hub``.

A sample may not choose code: ``sample.custom_rm_path`` is refused, and ``rm_type`` in its metadata goes through
``--row-rm-types``, as everywhere. How the graders differ from slime's is in ``rm_hub/README.md``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status, equal_rewards
from buffer_rl.rollout.context import current_context
from rm_hub import dapo, deepscaler, f1, gpqa
from rm_hub.answers import END_TOKEN, last_boxed

STRICT_CHARACTERS = 100
"""How much of the end of a response ``compute_score(strict_box_verify=True)`` reads."""
BY_HAND = GroupUid("made-by-the-rollout-function", 0, 0)


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample, which stays as it is: a number, or numbers by name. Raises RewardError."""
    return (await batched_async_rm(args, [sample], **kwargs))[0]


async def batched_async_rm(args: Any, samples: Sequence[Any], **kwargs: Any) -> list[Any]:
    """The rewards of several samples, in order; in place of a sample there may be the list of its parts, which gets a
    list. With ``--custom-group-rm-path`` all are scored together. Raises RewardError for the first that has none."""
    leaves = [part for entry in samples for part in (entry if isinstance(entry, list) else [entry])]
    for part in leaves:
        if part.custom_rm_path is not None:
            what = f"a sample names the code that is to score it: {part.custom_rm_path!r:.80}"
            expected, hint = "None: the run's options choose the reward", "--custom-rm-path, or --rm-type"
            raise ConfigError(what, where="sample.custom_rm_path", expected=expected, hint=hint)
    copies = [part.changed(reward=None, uid=part.uid or BY_HAND) for part in leaves]
    if failures := await current_context().scorer.score(copies):
        raise failures[0].error
    rewards = iter([copy.reward for copy in copies])
    return [[next(rewards) for _ in entry] if isinstance(entry, list) else next(rewards) for entry in samples]


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """What the reward server of ``--rm-url`` answers for the sample."""
    from rm_hub import remote

    return await remote.score(args, sample)


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """``score`` 1.0 or -1.0, ``acc``, and ``pred``, the answer found or None: by ``rm_hub.dapo``, or, strictly, where
    the last box in the last ``STRICT_CHARACTERS`` holds the label's text."""
    label = str(ground_truth)
    if strict_box_verify:
        found = last_boxed(solution_str[-STRICT_CHARACTERS:])
        right = found is not None and found == label.strip()
    else:
        line = dapo.answer_line(END_TOKEN.sub("", solution_str))
        found = None if line is None else dapo.normalize(line)
        right = found is not None and found in dapo.accepted(label)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": found}


def _graded(score: Callable[[Any, Sample], float], response: str, label: Any, **metadata: Any) -> float:
    given = {name: value for name, value in metadata.items() if value is not None}
    args = SimpleNamespace(rollout_skip_special_tokens=False)  # slime's default: end tokens are in the text
    return score(args, Sample(response=response, label=label, metadata=given, status=Status.COMPLETED))


def get_deepscaler_rule_based_reward(response: str, label: Any) -> float:
    """1.0 or 0.0 by ``rm_hub.deepscaler``."""
    return _graded(deepscaler.score, response, label)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last box of the response equals the label, by ``rm_hub.deepscaler:score_boxed`` (``math_boxed``)."""
    return _graded(deepscaler.score_boxed, solution_str, ground_truth) == 1.0


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of the bags of tokens (``rm_hub.f1``)."""
    answer, label = f1.tokens(prediction), f1.tokens(ground_truth)
    same = len(answer) + len(label)
    shared = f1.f1(answer, label) * same / 2
    return f1.f1(answer, label), shared / max(1, len(answer)), shared / max(1, len(label))


def compute_gpqa_reward(response: str, label: Any, metadata: Any = None) -> float:
    """1.0 or 0.0 by ``rm_hub.gpqa:score_lenient``."""
    return _graded(gpqa.score_lenient, response, label, **(metadata or {}))


def extract_answer(passage: str) -> str | None:
    """What the last box of a text holds; None without one."""
    return last_boxed(passage)


@dataclass
class DynamicFilterOutput:
    """A filter's answer. keep_when_insufficient: keep a group that is not wanted where another would have to be
    generated in its place."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """The filter's answer as a record; a group is kept where there is no filter."""
    answer: Any = DynamicFilterOutput(keep=True) if fn is None else fn(*args, **kwargs)
    return answer if hasattr(answer, "keep") else DynamicFilterOutput(keep=answer)


def should_drop_dynamic_filter_output(output: Any, *, remaining_batch_size: int, target_data_size: int) -> bool:
    """Whether to drop the group: not where it may stay and only ``target_data_size`` groups or fewer remain."""
    may_stay = getattr(output, "keep_when_insufficient", False) and remaining_batch_size <= target_data_size
    return not output.keep and not may_stay


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one group; those without a reason are not counted."""
        if reason:
            self._drops[reason] += 1

    def collect(self) -> dict[str, int]:
        """The counts, as metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample | list[Sample]], **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ (``buffer_rl.records.groups.equal_rewards``). The reason of a drop is slime's.

    In place of a sample there may be the list of its parts, which counts once, with the mean of their rewards."""
    entries = samples.by_sample() if isinstance(samples, SampleGroup) else samples
    parts = [entry if isinstance(entry, list) else [entry] for entry in entries]
    rewards = [statistics.fmean(part.get_reward_value(args) for part in own) for own in parts]
    keep = not equal_rewards(rewards)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Sample | list[Sample]], **kwargs: Any
) -> DynamicFilterOutput:
    """The same, where a group that is not wanted may stay before others are generated."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
