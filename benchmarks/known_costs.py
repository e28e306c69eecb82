"""What steps of known cost are made of: the settings, and a trainer that computes nothing in known time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.torch import load_file

from buffer_rl.kinds.token_loss import Sums
from buffer_rl.records.groups import Topology, TrainBatch

SAMPLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A rollout and what it costs, in seconds.

    slots: responses that the engine generates at a time; None: all. decoded: for each token of a response. forward,
    trained: for each token of one forward pass, and of forward and backward. by_formula: whether a step is held against
    the formula, or else against the critical path: where all groups finish late and close together, no schedule can
    reach the formula.
    """

    groups: int
    slots: int | None
    decoded: float
    forward: float
    trained: float
    optimizer: float
    publish: float
    by_formula: bool
    trainer: str


SETTINGS = {
    "queued": Setting(
        groups=64,
        slots=16,
        decoded=2e-3,
        forward=15e-6,
        trained=45e-6,
        optimizer=0.1,
        publish=0.2,
        by_formula=True,
        trainer="QueuedTrainer",
    ),
    "at once": Setting(
        groups=16,
        slots=None,
        decoded=2.5e-3,
        forward=60e-6,
        trained=180e-6,
        optimizer=0.2,
        publish=0.4,
        by_formula=False,
        trainer="AtOnceTrainer",
    ),
}


class SleepingTrainer:
    """A trainer that sleeps, and publishes the weights that it began with. See
    ``buffer_rl.kinds.trainer.Trainer``."""

    setting: ClassVar[Setting]

    def __init__(self, args: Any, rank: int, world_size: int, objective: Any) -> None:
        self.topology = Topology(dp_rank=rank, dp_size=world_size)
        self._weights = load_file(Path(args.hf_checkpoint) / "model.safetensors")

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray]:
        """One forward pass."""
        time.sleep(self.setting.forward * sum(batch.lengths))
        return [np.zeros(int(length), dtype=np.float32) for length in batch.columns["response_length"]]

    def accumulate(self, batch: TrainBatch) -> Sums:
        """Forward and backward of some rows."""
        time.sleep(self.setting.trained * sum(batch.lengths))
        return Sums(divisor=float(len(batch)))

    def zero_grad(self) -> None:
        """There are no sums to forget."""

    def optimizer_step(self, scale: float) -> dict[str, float]:
        """One step."""
        time.sleep(self.setting.optimizer)
        return {"grad_norm": 0.0, "lr": 0.0}

    def export(self) -> Iterator[dict[str, Any]]:
        """All weights in one bucket."""
        yield self._weights

    def save_hf(self, path: str) -> None:
        """An empty folder."""
        Path(path).mkdir(parents=True, exist_ok=True)

    def save(self, path: str) -> None:
        """Not needed."""

    def load(self, path: str) -> None:
        """Not needed."""


class QueuedTrainer(SleepingTrainer):
    """The trainer of the setting ``queued``."""

    setting = SETTINGS["queued"]


class AtOnceTrainer(SleepingTrainer):
    """The trainer of the setting ``at once``."""

    setting = SETTINGS["at once"]
