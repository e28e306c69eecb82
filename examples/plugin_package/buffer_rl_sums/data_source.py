"""A data source that makes its prompts up: ``12+30=``, with the sum as label."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from buffer_rl.records.groups import GroupUid, Sample, SampleGroup

NAME = "sums"
ROWS_PER_EPOCH = 10_000


class SumsSource:
    """Problem ``row`` of an epoch is a function of ``--rollout-seed``, the epoch and the row alone.

    So the whole state is one counter.
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        self._next = 0

    def __len__(self) -> int:
        return ROWS_PER_EPOCH

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """The next ``num_samples`` groups."""
        return [self._make(self._advance()) for _ in range(num_samples)]

    def save(self, path: str) -> None:
        """Write the state to the file ``path``."""
        Path(path).write_text(json.dumps({"next": self._next}), encoding="utf-8")

    def load(self, path: str) -> None:
        """The inverse of ``save``."""
        self._next = json.loads(Path(path).read_text(encoding="utf-8"))["next"]

    def _advance(self) -> GroupUid:
        epoch, row = divmod(self._next, ROWS_PER_EPOCH)
        self._next += 1
        return GroupUid(NAME, row, epoch)

    def _make(self, uid: GroupUid) -> SampleGroup:
        draw = random.Random(f"{self._args.rollout_seed}|{uid}")
        left, right = (draw.randint(0, self._args.sums_largest) for _ in range(2))
        samples = [
            Sample(uid=uid, sample_index=i, prompt=f"{left}+{right}=", label=str(left + right))
            for i in range(self._args.n_samples_per_prompt)
        ]
        return SampleGroup(uid=uid, samples=samples)
