"""What went wrong in a run that went on: groups in quarantine, steps that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Incidents:
    """Counts them, and says each where it happens and all of them at the end."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._quarantined = 0
        self._left_out = 0

    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> list[str]:
        """What to say of a training rollout."""
        count = int(metrics.get("rollout/drop_quarantined", 0))
        self._quarantined += count
        return [f"rollout {rollout_id}: {_groups(count)} put into quarantine"] if count else []

    def step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What to say of a training step."""
        total = int(metrics.get("train/non_finite_steps", 0))
        fresh, self._left_out = total - self._left_out, max(total, self._left_out)
        return [f"step {step}: loss or gradient not finite; the weights stay as they were"] if fresh > 0 else []

    def summary(self) -> list[str]:
        """What to say at the end of the run."""
        lines = []
        if self._quarantined:
            where = self._run_dir / "quarantine.jsonl"
            lines.append(f"{_groups(self._quarantined)} of this run in quarantine: {where}")
        if self._left_out:
            where = self._run_dir / "non_finite"
            lines.append(f"{self._left_out} optimizer steps were not finite and were left out; their rows: {where}")
        return lines


def _groups(count: int) -> str:
    return "1 prompt group" if count == 1 else f"{count} prompt groups"
