"""The samples of a report: by prompt, with rewards on the run's scale, and evaluation prompts over the steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from buffer_rl.observe.run_folder import cut_text

MAX_STEPS = 12  # rollouts of a kind whose samples are shown, spread evenly, the first and the last one among them
MAX_PER_STEP = 16
MAX_FOLLOWED = 3  # evaluation prompts of each set that are followed over the steps
MAX_ANSWERS = 4  # of a followed prompt at each step
MAX_CHARACTERS = 4000  # of one text; the file has the rest
MAX_TRANSCRIPTS = 2  # of a prompt's answers in one step
MAX_MESSAGE = 600  # characters of a message of a transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward as the page shows it. name: of one of several, else empty. share: its place in the run's range of that
    name, 0 to 1; None if it is no number, or if all of the run's are equal."""

    name: str
    text: str
    share: float | None = None

    @property
    def level(self) -> str:
        """For the filter: at which end of the range it is."""
        if self.share is None:
            return ""
        return "lowest" if self.share <= 0 else "highest" if self.share >= 1 else "between"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sample of a prompt. transcript: role and text of each message of an agent's conversation."""

    response: str
    rewards: Sequence[Reward]
    status: str
    versions: str = ""
    transcript: Sequence[tuple[str, str]] = ()

    @property
    def level(self) -> str:
        """That of the first reward."""
        return self.rewards[0].level if self.rewards else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """A prompt with its samples in one step. mean: of their first rewards; None without numbers."""

    step: int
    kind: str
    shown_kind: str
    prompt: str
    label: str
    answers: Sequence[Answer]
    mean: Reward | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedPrompt:
    """An evaluation prompt at each step at which it was recorded, ascending."""

    data_set: str
    steps: Sequence[PromptGroup]


Scale = Mapping[str, tuple[float, float]]
"""The range of each reward over a run's samples, by name; a reward without a name has the empty one."""


def scale_of(records: Iterable[Mapping[str, Any]]) -> Scale:
    """Of all samples, shown or not."""
    ranges: dict[str, tuple[float, float]] = {}
    for record in records:
        for name, value in _numbers(record.get("reward")).items():
            low, high = ranges.get(name, (value, value))
            ranges[name] = (min(low, value), max(high, value))
    return ranges


def shown_rewards(value: Any, scale: Scale, key: str = "") -> list[Reward]:
    """All numbers of a sample's reward, that under ``key`` first; what is no number as text."""
    if value is None:
        return []
    if not (numbers := _numbers(value)):
        return [Reward(name="", text=cell(value))]
    return [_on_scale(name, numbers[name], scale) for name in sorted(numbers, key=lambda name: name != key)]


def _on_scale(name: str, value: float, scale: Scale) -> Reward:
    low, high = scale.get(name, (value, value))
    share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else None
    return Reward(name=name, text=f"{value:.4g}", share=share)


def _numbers(reward: Any) -> dict[str, float]:
    """The finite numbers of a reward by name."""
    given = reward if isinstance(reward, Mapping) else {"": reward}
    return {
        str(name): float(value)
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def prompt_groups(
    records: Sequence[Mapping[str, Any]], *, reward_key: str = "", supervised: bool = False
) -> list[PromptGroup]:
    """The chosen samples by step and prompt, newest step first. reward_key: the reward that is trained on, of several.
    supervised: training rows have their target as response, and no reward."""
    scale = scale_of(record for record in records if not (supervised and record.get("kind") != "eval"))
    members: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for number, record in enumerate(chosen_samples(records)):
        known = record.get("uid") if record.get("uid") is not None else f"row {number}"
        members.setdefault((_step(record), record.get("kind"), record.get("data_set"), known), []).append(record)
    return [_group(group, scale, reward_key, supervised=supervised) for group in members.values()]


def followed_prompts(records: Sequence[Mapping[str, Any]], *, reward_key: str = "") -> list[FollowedPrompt]:
    """Of each evaluation set prompts that were recorded at two steps or more, with at most ``MAX_STEPS`` of these,
    spread evenly: the first such prompt, and those whose mean reward changed most between the first step and the last.
    """
    scale = scale_of(records)
    by_prompt: dict[tuple[str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for record in records:
        if record.get("kind") == "eval" and record.get("uid") is not None:
            key = str(record.get("data_set", "")), str(record["uid"])
            by_prompt.setdefault(key, {}).setdefault(_step(record), []).append(record)
    of_set: dict[str, list[dict[int, list[Mapping[str, Any]]]]] = {}
    for (data_set, _), steps in by_prompt.items():
        if len(steps) > 1:
            of_set.setdefault(data_set, []).append(steps)
    found = []
    for data_set, (first, *others) in of_set.items():
        others.sort(key=lambda steps: -abs(_mean(steps[max(steps)], reward_key) - _mean(steps[min(steps)], reward_key)))
        for steps in (first, *others[: MAX_FOLLOWED - 1]):
            chosen = spread(sorted(steps), MAX_STEPS)
            groups = [_group(steps[step], scale, reward_key, most=MAX_ANSWERS) for step in chosen]
            found.append(FollowedPrompt(data_set=data_set, steps=groups))
    return found


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    """The mean of the rewards under ``key``, or of those without a name; 0 without any."""
    numbers = [_numbers(record.get("reward")) for record in records]
    values = [each[name] for each in numbers for name in dict.fromkeys((key, "")) if name in each]
    return fmean(values) if values else 0.0


def _group(
    records: Sequence[Mapping[str, Any]], scale: Scale, key: str, *, supervised: bool = False, most: int = MAX_PER_STEP
) -> PromptGroup:
    """The samples of one prompt in one step, of which at most ``most`` are shown; the mean is over all."""
    first, kind = records[0], str(records[0].get("kind", ""))
    is_target = supervised and kind != "eval"
    prompt, label = first.get("prompt"), "" if is_target else cell(first.get("label"))
    if is_target and isinstance(prompt, list):  # a conversation: its answers are the target
        prompt = list(takewhile(lambda item: not isinstance(item, Mapping) or item.get("role") != "assistant", prompt))
    answers = []
    for number, record in enumerate(records[:most]):
        spans = record.get("versions")  # whose form ``checks`` judges
        versions = sorted({span[0] for span in _lists(spans) if span and isinstance(span[0], int)})
        answers.append(
            Answer(
                response=cell(record.get("response")),
                rewards=() if is_target else shown_rewards(record.get("reward"), scale, key),
                status="target" if is_target else cell(record.get("status")),
                versions=", ".join(map(str, versions)) if len(versions) > 1 else "",
                transcript=_transcript(record) if number < MAX_TRANSCRIPTS else (),
            )
        )
    numbers = [_numbers(record.get("reward")) for record in records] if not is_target else []
    name = key if any(key in each for each in numbers) else ""
    values = [each[name] for each in numbers if name in each]
    return PromptGroup(
        step=_step(first),
        kind=kind,
        shown_kind=f"{kind}: {first['data_set']}" if first.get("data_set") else kind,
        prompt=cell(prompt),
        label=label,
        answers=answers,
        mean=_on_scale(name, fmean(values), scale) if len(values) > 1 else None,
    )


def _transcript(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [item for item in _lists(record.get("transcript")) if len(item) == 2]
    return [(str(role), cut_text(plain_text(text), MAX_MESSAGE)) for role, text in pairs]


def _lists(value: Any) -> list[list[Any]]:
    return [item for item in value if isinstance(item, list)] if isinstance(value, list) else []


def chosen_samples(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most ``MAX_STEPS`` rollouts of each kind, and of each the first ``MAX_PER_STEP`` samples, newest first."""
    by_kind: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for record in records:
        by_kind.setdefault(str(record.get("kind", "")), {}).setdefault(_step(record), []).append(record)
    chosen = [(-step, kind) for kind, rollouts in by_kind.items() for step in spread(sorted(rollouts), MAX_STEPS)]
    return [sample for step, kind in sorted(chosen) for sample in by_kind[kind][-step][:MAX_PER_STEP]]


def _step(record: Mapping[str, Any]) -> int:
    return int(record.get("rollout_id") or 0)


def spread(values: Sequence[int], count: int) -> list[int]:
    """``count`` of the values, evenly spaced, both ends among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def plain_text(value: Any) -> str:
    """What a cell says: text as it is, chat messages one ``role: content`` a line, other values as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "role" in item for item in value):
        return "\n".join(f"{item['role']}: {plain_text(item.get('content'))}" for item in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def cell(value: Any) -> str:
    """A value as text of at most ``MAX_CHARACTERS`` characters."""
    return cut_text(plain_text(value), MAX_CHARACTERS)
