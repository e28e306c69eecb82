"""reasoning-gym's curricula as a data source: tasks become harder once the model solves those that it has.

    buffer-rl train --rm-type reasoning_gym --data-source-path examples/environments/curriculum.py:Curriculum \\
        --rollout-all-samples-process-path examples/environments/curriculum.py:raise_level ...

``raise_level`` sees each rollout's rewards in the rollout worker. It keeps the level among the Buffer's notes, and in a
file of the run's folder, which ``Curriculum`` reads in its own process. The next batch that is made has the new level.
"""

from __future__ import annotations

import json
import os
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import reasoning_gym
from reasoning_gym.factory import create_curriculum

from buffer_rl.records.groups import Sample

TASK = "chain_sum"
RAISE_AT = 0.7  # the mean reward of the newest level
NOTE = "curriculum_level"


def settings_of(level: int) -> dict[str, Any]:
    """The task's settings: each level makes its next attribute harder, in turn. Raises ValueError beyond the last."""
    curriculum = create_curriculum(TASK)
    turns = [(turn, name) for name, its in curriculum.attributes.items() for turn in range(len(its.levels) - 1)]
    if level > len(turns):
        raise ValueError(f"{TASK} has {len(turns)} levels above the first")
    for _, name in sorted(turns, key=itemgetter(0))[:level]:
        curriculum.increment_attr_level(name)
    return dict(vars(curriculum.generate_configuration()))


class Curriculum:
    """Tasks of the level that the run has reached. Its state: how many batches it has made, and the newest level."""

    def __init__(self, args: Any) -> None:
        self._args, self._batches, self._level = args, 0, 0

    def __len__(self) -> int:
        return 1_000_000  # tasks are made, not read

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """So many groups; a batch's tasks depend on the run's seed, its number and the level."""
        self._level = max(self._level, _level_in(self._args.run_dir))
        seed = self._args.rollout_seed * 1_000_003 + self._batches
        self._batches += 1
        settings = settings_of(self._level) | {"seed": seed, "size": num_samples}
        return [self._group(entry) for entry in reasoning_gym.create_dataset(TASK, **settings)]

    def save(self, path: str) -> None:
        """Write the state, from which a resumed run goes on."""
        Path(path).write_text(json.dumps([self._batches, self._level]), encoding="utf-8")

    def load(self, path: str) -> None:
        """The inverse of save."""
        self._batches, self._level = json.loads(Path(path).read_text(encoding="utf-8"))

    def _group(self, entry: dict[str, Any]) -> list[Sample]:
        metadata = {"level": self._level, "source_dataset": TASK, "entry": entry}
        return [
            Sample(prompt=entry["question"], label=entry["answer"], metadata=metadata)
            for _ in range(self._args.n_samples_per_prompt)
        ]


def raise_level(args: Any, groups: list[Any], buffer: Any) -> None:
    """One level up if the newest one is solved often enough; levels end with the curriculum."""
    level = buffer.get_metadata().get(NOTE, 0)
    samples = [sample for group in groups for sample in group if sample.metadata.get("level") == level]
    rewards = [sample.get_reward_value(args) for sample in samples if sample.reward is not None]
    if not rewards or fmean(rewards) < RAISE_AT:
        return
    try:
        settings_of(level + 1)
    except ValueError:
        return
    buffer.update_metadata({NOTE: level + 1})
    file = Path(args.run_dir) / f"{NOTE}.json"
    file.with_suffix(".new").write_text(str(level + 1), encoding="utf-8")
    os.replace(file.with_suffix(".new"), file)


def _level_in(run_dir: str) -> int:
    try:
        return int((Path(run_dir) / f"{NOTE}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
