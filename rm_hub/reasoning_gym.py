"""Scores of reasoning-gym's tasks, by the grader that each task ships.

Source: Stojanovski et al. 2025, Reasoning Gym, arXiv:2505.24760; ``reasoning_gym.get_score_answer_fn``. Many of its
graders give partial credit, the default one for any text that contains the answer (length of the answer over
length of the text); a policy learns to exploit that, so ``score`` gives credit for full marks only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.types import Sample, Status
from rm_hub.answers import response_of

FULL_MARKS = 1.0


def score(args: Any, sample: Sample) -> float:
    """1.0 if the task's grader gives full marks and the sample ended by itself, else 0.0.

    ``sample.metadata`` holds ``source_dataset`` (or ``dataset``), the task's name, and ``entry``, the task as
    reasoning-gym made it; without ``entry``, it is put together from the prompt, the label and the metadata.
    Raises RewardError if reasoning-gym is not installed, or knows no such task, or its grader fails.
    """
    return float(score_partial(args, sample) >= FULL_MARKS)


def score_partial(args: Any, sample: Sample) -> float:
    """The grader's own score, from 0 to 1, with its partial credit; 0.0 for a sample that did not end by itself."""
    entry = _entry(sample)
    name = _dataset(sample, entry)
    try:
        grade = _grader(name)
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no data set {name!r}", where=_where(sample)) from error
    if sample.status is not Status.COMPLETED:
        return 0.0
    try:
        return float(grade(response_of(args, sample).strip(), entry))
    except Exception as error:  # the fault boundary around graders of others
        raise RewardError(
            f"the grader of {name!r} failed: {type(error).__name__}: {error}", where=_where(sample)
        ) from error


@functools.lru_cache(maxsize=256)  # a grader is an object that may read word lists when it is made
def _grader(name: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise RewardError(
            "reasoning-gym is not installed", where="rm_hub.reasoning_gym", hint="pip install 'buffer-rl[examples]'"
        ) from error
    grader: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(name)
    return grader


def _entry(sample: Sample) -> dict[str, Any]:
    entry = sample.metadata.get("entry")
    if entry is None:
        entry = {"question": sample.prompt, "answer": sample.label, "metadata": sample.metadata}
    if not isinstance(entry, dict) or entry.get("answer") is None:
        raise RewardError(
            "there is no answer to compare with",
            where=_where(sample),
            expected='metadata {"source_dataset": NAME, "entry": {"question", "answer", "metadata"}}, or a label',
        )
    return entry


def _dataset(sample: Sample, entry: dict[str, Any]) -> str:
    inner = entry.get("metadata") or {}
    name = sample.metadata.get("source_dataset") or sample.metadata.get("dataset") or inner.get("source_dataset")
    if not isinstance(name, str):
        raise RewardError(
            "the row does not say which data set it is of",
            where=_where(sample),
            expected='"source_dataset" or "dataset" in its metadata',
        )
    return name


def _where(sample: Sample) -> str:
    return str(sample.uid or "rm_hub.reasoning_gym")
