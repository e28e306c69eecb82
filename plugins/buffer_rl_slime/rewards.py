"""Rewards under slime's names: ``async_rm`` scores as the run does, the graders are those of ``rm_hub``.

A sample may not choose code: ``sample.custom_rm_path`` is refused, and ``rm_type`` in its metadata goes through
``--row-rm-types``, as everywhere. How the graders differ from slime's is in ``docs/hubs.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import GroupUid, Sample, Status
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
            raise ConfigError(
                f"a sample names the code that is to score it: {part.custom_rm_path!r:.80}",
                where="sample.custom_rm_path",
                expected="None: the run's options choose the reward",
                hint="--custom-rm-path, or --rm-type",
            )
    copies = [part.changed(reward=None, uid=part.uid or BY_HAND) for part in leaves]
    failures = await current_context().scorer.score(copies)
    if failures:
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
