"""Recorded groups scored by another reward, as a run scores, filters and normalises them, and compared with before."""

from __future__ import annotations

import copy
import json
from collections import ChainMap, Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError
from buffer_rl.observe.run_folder import SURROGATES
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Column, RowId, Sample, SampleGroup, Status, TrainBatch
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.failures import CONVERSION_FAILED
from buffer_rl.rollout.scoring import Scorer
from buffer_rl.rollout.user_functions import UserFunction, apply_filter
from buffer_rl.trainer.objective import Objective
from buffer_rl.verbs.rescore.recorded_groups import RecordedStep

FILTER_FAILED = "filter_failed"
_WRITTEN = ("sample_index", "part", "prompt", "response", "label", "status")
"""What the lines of ``write_rows`` have of a sample as it is."""


@dataclass(slots=True, kw_only=True)
class ScoredGroup:
    """One group with both rewards. group: its samples have the new one. old, new: the rewards of ``samples``. drop: the
    reason of the filter, empty if it keeps the group. rows: the ids of the rows of both columns, in which ``reward`` is
    what advantages are made of."""

    group: SampleGroup
    old: list[float]
    new: list[float]
    rows: list[RowId]
    old_columns: dict[str, Column]
    new_columns: dict[str, Column]
    drop: str = ""

    @property
    def samples(self) -> list[Sample]:
        """The samples with a reward: one that a filter removed may have none."""
        return [sample for sample in self.group if sample.reward is not None]


@dataclass(slots=True, kw_only=True)
class Rescored:
    """A step. of: groups that the rollout had, None if not known. failed: groups that could not be scored, by reason.
    errors: the first of each reason. advantages: by row, of the tokens that are trained on, by the old and the new
    rewards."""

    rollout_id: int
    of: int | None
    failed: Counter[str]
    groups: list[ScoredGroup] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    advantages: dict[RowId, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


async def rescore(args: Args, steps: Iterable[RecordedStep], old_key: str | None) -> list[Rescored]:
    """Score all groups again. args: the run's options, with the other reward. old_key: the ``--reward-key`` of the
    recorded rewards. Raises ConfigError, PluginError and DataError for a reward that cannot be used at all; what it
    raises for a sample is counted."""
    registry = PluginRegistry.from_flags(args.plugin)
    scorer, converter = Scorer(args, registry), GroupConverter.from_args(args, registry)
    before = replace(converter, args=args.model_copy(update={"reward_key": old_key}))
    dynamic_filter = UserFunction.named(registry, "filter", args.dynamic_sampling_filter_path)
    objective = Objective(args, registry)
    done = []
    try:
        for step in steps:
            rescored = Rescored(rollout_id=step.rollout_id, of=step.total, failed=Counter(step.skipped))
            for group in step.groups:
                result = await _score(scorer, before, converter, group, step)
                if isinstance(result, ScoredGroup):
                    await _filter(args, dynamic_filter, result, rescored.errors)
                    rescored.groups.append(result)
                else:
                    rescored.failed[result[0]] += 1
                    rescored.errors.setdefault(*result)
            _advantages(objective, rescored)
            done.append(rescored)
    finally:
        await scorer.aclose()
    return done


async def _score(
    scorer: Scorer, before: GroupConverter, converter: GroupConverter, group: SampleGroup, step: RecordedStep
) -> ScoredGroup | tuple[str, str]:
    """The group with both rewards, or the reason why there are none and the error. before: with the ``--reward-key`` of
    the recorded rewards, which may be mappings."""
    new = replace(group, samples=[copy.deepcopy(sample) for sample in group])
    to_score = [sample for sample in new if sample.status not in (Status.ABORTED, Status.FAILED)]
    for sample in new:
        sample.reward = None
    failures = await scorer.score(to_score)
    if failures:
        return failures[0].reason, str(failures[0].error)
    try:
        new_rows, new_columns = converter.encode(new, False)
        old_rows, old_columns = before.encode(group, False)
        if all(row in step.trained_on for row in old_rows):
            old_columns["reward"] = np.asarray([step.trained_on[row] for row in old_rows], dtype=np.float32)
        old = [s.get_reward_value(before.args) for s in group if s.reward is not None]
        rewards = [s.get_reward_value(converter.args) for s in new if s.reward is not None]
        if len(old) != len(rewards) or new_rows != old_rows:
            return CONVERSION_FAILED, f"group {group.uid}: other samples have a reward than before"
    except (BufferRLError, ValueError) as error:
        return CONVERSION_FAILED, str(error)
    return ScoredGroup(group=new, rows=new_rows, old=old, new=rewards, old_columns=old_columns, new_columns=new_columns)


async def _filter(args: Args, chosen: UserFunction | None, scored: ScoredGroup, errors: dict[str, str]) -> None:
    judged = replace(scored.group, samples=[copy.deepcopy(sample) for sample in scored.samples])
    try:
        decision = await apply_filter(chosen, args, judged)
        scored.drop = "" if decision.keep else decision.reason
    except BufferRLError as error:
        scored.drop = FILTER_FAILED
        errors.setdefault(FILTER_FAILED, str(error))


def _advantages(objective: Objective, step: Rescored) -> None:
    """Have the run's estimator compute the advantages of all groups, before and after. If it needs what is not
    recorded, such as log-probabilities, there are none."""
    found: list[dict[RowId, np.ndarray]] = []
    for side in ("old_columns", "new_columns"):
        parts = [getattr(group, side) for group in step.groups]
        rows = [row for group in step.groups for row in group.rows]
        columns: dict[str, Any] = {}
        for name in set.intersection(*map(set, parts)) if parts else ():
            values = [value for of_group in parts for value in of_group[name]]
            columns[name] = np.asarray(values) if isinstance(parts[0][name], np.ndarray) else values
        batch = TrainBatch(rollout_id=step.rollout_id, task=f"train_{step.rollout_id}", row_ids=rows, columns=columns)
        try:
            objective.compute_advantages(batch)
        except (BufferRLError, KeyError) as error:
            step.errors["no_advantages"] = str(error)
            return
        if "advantages" not in batch.columns:
            return
        trained = zip(rows, batch.columns["advantages"], batch.columns.get("loss_mask", []), strict=True)
        found.append({row: np.asarray(values)[np.asarray(mask) != 0] for row, values, mask in trained})
    step.advantages = {row: (found[0][row], found[1][row]) for row in found[0]}


def compared(steps: Sequence[Rescored]) -> dict[str, Any]:
    """What another reward changes, of one step or of all, as JSON values. ``old``, ``new``: mean rewards.
    ``correlation``: Spearman's, of the rewards of all rows, None if one side is constant. ``equal_rewards``: share of
    rows; ``equal_best``: share of groups whose samples with the highest reward are the same. ``dropped``: groups that
    the run's filter would drop, by reason. ``signs``: rows whose advantage has another sign (of its sum over the tokens
    that are trained on), None if there are no advantages. ``of``, ``failed``: as ``Rescored`` has them."""
    groups = [group for step in steps for group in step.groups]
    old = [value for group in groups for value in group.old]
    new = [value for group in groups for value in group.new]
    equal = [bool(np.float32(a) == np.float32(b)) for a, b in zip(old, new, strict=True)]
    best = [_best(group.old) == _best(group.new) for group in groups]
    advantages = [pair for step in steps for pair in step.advantages.values()]
    changed = [bool(np.sign(np.sum(a)) != np.sign(np.sum(b))) for a, b in advantages]
    known = [step.of for step in steps if step.of is not None]
    return {
        "groups": len(groups),
        "rows": len(old),
        "of": sum(known) if len(known) == len(steps) else None,
        "old": _mean(old),
        "new": _mean(new),
        "correlation": rank_correlation(old, new) if old else None,
        "equal_rewards": _mean(equal),
        "equal_best": _mean(best),
        "dropped": dict(Counter(group.drop for group in groups if group.drop)),
        "signs": sum(changed) if advantages else None,
        "failed": dict(sum((step.failed for step in steps), Counter[str]())),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _best(rewards: Sequence[float]) -> list[int]:
    best = max(rewards, default=None)
    return [place for place, reward in enumerate(rewards) if reward == best]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with the mean rank for equal values; None if one side is constant."""
    ranks = _ranks(left), _ranks(right)
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(each) > 0 for each in ranks) else None


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, places, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts - 1) / 2)[places]
    return ranks


def write_rows(path: Path, steps: Sequence[Rescored]) -> int:
    """Write one line of JSON a sample, with both rewards and both advantages (means over the tokens that are trained
    on). Returns how many. Raises OSError."""
    count = 0
    with path.open("w", encoding="utf-8", errors=SURROGATES) as file:
        for step in steps:
            for scored in step.groups:
                for sample, old, new in zip(scored.samples, scored.old, scored.new, strict=True):
                    row = sample.row_id
                    line = {"rollout_id": step.rollout_id, "uid": str(row.uid)}
                    line |= {name: getattr(sample, name) for name in _WRITTEN}
                    line |= {"old_reward": old, "new_reward": new, "reward": sample.reward, "dropped": scored.drop}
                    for name, values in zip(("old", "new"), step.advantages.get(row, ()), strict=False):
                        line[f"{name}_advantage"] = float(values.mean(dtype=np.float64)) if len(values) else 0.0
                    file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
                    count += 1
    return count


def facts_of(steps: Sequence[Rescored]) -> dict[str, Any]:
    """The comparisons as JSON values."""
    return {
        "steps": [{"rollout_id": step.rollout_id, **compared([step])} for step in steps],
        "all": compared(steps),
        "errors": dict(ChainMap(*(step.errors for step in steps))),  # of several the first
    }
