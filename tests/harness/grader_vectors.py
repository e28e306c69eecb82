"""Responses with their rewards, of graders that slime has, too: ``tests/unit/rm_hub/grader_vectors.jsonl``.

A line has ``rm_type`` (slime's names, in one text), ``response`` (with ``before`` or ``after`` it ``times``), ``label``
and perhaps ``metadata``; ``reward`` is what is decided here, "error" where there is none. Where slime decides
otherwise, ``slime`` has its reward and ``why`` the name of the difference, as rm_hub/README.md explains it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, Status
from buffer_rl_slime.scripts.flags import REWARD_NAMES

FILE = Path(__file__).parents[1] / "unit" / "rm_hub" / "grader_vectors.jsonl"
Reward = float | str


@dataclass(frozen=True, kw_only=True)
class Vector:
    """reward, slime: a number, or "error". why: names the difference between them; empty without one."""

    rm_type: str
    response: str
    label: Any
    metadata: dict[str, Any]
    reward: Reward
    slime: Reward
    why: str

    def sample(self) -> Sample:
        metadata = dict(self.metadata)
        return Sample(response=self.response, label=self.label, metadata=metadata, status=Status.COMPLETED)


def vectors() -> Iterator[Vector]:
    """All of them, one for each rm_type of a line."""
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        times = row.get("times", 0)
        response = row.get("before", "") * times + row["response"] + row.get("after", "") * times
        for rm_type in row["rm_type"].split():
            yield Vector(
                rm_type=rm_type,
                response=response,
                label=row["label"],
                metadata=row.get("metadata", {}),
                reward=row["reward"],
                slime=row.get("slime", row["reward"]),
                why=row.get("why", ""),
            )


def our_name(rm_type: str) -> str:
    """The registered reward that decides as slime's ``rm_type``."""
    return REWARD_NAMES.get(rm_type, rm_type)


def our_grader(rm_type: str) -> Callable[[Vector], Reward]:
    """Grades as a run does whose file ``buffer-rl import slime`` wrote: end tokens are in the response."""
    score = PluginRegistry.from_flags([]).resolve("reward", our_name(rm_type))
    args = SimpleNamespace(rollout_skip_special_tokens=False, rollout_stop=[])

    def graded(vector: Vector) -> Reward:
        try:
            return round(float(score(args, vector.sample())), 6)
        except RewardError:
            return "error"

    return graded
