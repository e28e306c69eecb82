"""A rollout's rows in a file, and a rollout role that reads them in place of generating.

One file a rollout (see ``buffer_rl.buffer.row_file``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.pool import DERIVED_FIELDS
from buffer_rl.buffer.row_file import read_rollout, write_rollout
from buffer_rl.errors import DataError
from buffer_rl.types import RolloutReport, Ticket, sample_means


def rollout_path(template: str, rollout_id: int) -> Path:
    """``template`` with its ``{rollout_id}`` filled in."""
    return Path(template.replace("{rollout_id}", str(rollout_id)))


class RolloutRecorder:
    """Writes the rows of a closed rollout: those that the trainer will see, before it adds to them."""

    def __init__(self, template: str, buffer: BufferClient) -> None:
        self._template = template
        self._buffer = buffer

    def save(self, rollout_id: int) -> None:
        """Write the rollout's file, without what roles have added while it ran. Raises DataError or OSError."""
        batch = self._buffer.get_data(rollout_id)
        batch.columns = {name: column for name, column in batch.columns.items() if name not in DERIVED_FIELDS}
        write_rollout(rollout_path(self._template, rollout_id), batch)


class RecordedRollouts:
    """The rollout role of a run that only trains: each rollout's rows come from its file."""

    def __init__(self, template: str, buffer: BufferClient) -> None:
        self._template = template
        self._buffer = buffer

    def run(self, ticket: Ticket) -> tuple[RolloutReport, dict[str, float], list[dict[str, Any]]]:
        """Fill the ticket's rollout. Raises DataError, or BufferStateError if its groups do not fit."""
        path = rollout_path(self._template, ticket.rollout_id)
        batch = read_rollout(path)
        if batch.rollout_id != ticket.rollout_id:
            raise DataError(f"these are the rows of rollout {batch.rollout_id}", where=str(path), expected=ticket.task)
        self._buffer.import_groups(ticket, batch.row_ids, batch.columns)
        metrics = {}
        if "raw_reward" in batch.columns and len(batch):
            samples = [(row_id.uid, row_id.sample_index) for row_id in batch.row_ids]
            rewards = sample_means(samples, np.asarray(batch.columns["raw_reward"]).tolist())
            metrics["rollout/raw_reward"] = float(np.mean(rewards))
        return self._buffer.close_rollout(ticket), metrics, []
