"""Roles in the driver's own process: checkpoints, files with the rows of rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl import __version__
from buffer_rl.args import Args
from buffer_rl.buffer.actor import BufferActor
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.readers import Share
from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.driver.folders import retain
from buffer_rl.errors import BufferRLError, DataError, DeadlineError
from buffer_rl.files.checkpoint import new_checkpoint
from buffer_rl.files.row_file import read_rollout, rollout_path, write_rollout
from buffer_rl.observe.run_folder import changed_options
from buffer_rl.options.redaction import mask_secrets
from buffer_rl.options.section import required
from buffer_rl.plan.algorithm import REFERENCE_FOLDER, checkpoint_folder
from buffer_rl.plan.roles import ACTOR
from buffer_rl.records.groups import Ticket, sample_means
from buffer_rl.trainer.rank import TrainRank
from buffer_rl.trainer.stream import longest_wait
from buffer_rl.weights.role_weights import FolderUpdates

OWES_EVALUATION = "owes_evaluation"
"""The fact in a checkpoint that the evaluation of its step was interrupted."""
SAVE_POLL_S = 0.5
"""How often ranks are asked whether they have written: each time is a call between their others."""


@dataclass(eq=False)
class RunCheckpoints:
    """Writes ``args.save/step_NNNNNN`` (see ``buffer_rl.files.checkpoint``); for a URL by way of ``args.run_dir``.

    ``trainer/`` holds each rank's weights, optimizer and random state (another trained role has a folder of its name),
    ``hf/`` the actor's weights for everybody else, ``ref/`` those of a reference model that was updated,
    ``buffer.json`` the queue, ``ledger.sqlite`` the ledger and the position in the data. The manifest's facts are the
    options, without secrets, and ``provenance``: what code and data the run is made of.
    """

    args: Args
    buffer: BufferClient
    trained: Mapping[str, ActorGroup]
    reference: FolderUpdates | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    _deadline: float = 0.0
    _writing: Iterator[None] = field(default_factory=lambda: iter(()))

    def save(self, step: int, owes_evaluation: bool = False) -> None:
        """Begin a checkpoint after ``step`` optimizer steps, with the part of the first trained role; ``save_next``
        writes those of others. When all have returned, nothing that the next step changes is read any more; ``seal``
        ends it. owes_evaluation: the evaluation of the step is left to the run that resumes.

        Raises CheckpointError, or what a rank or the Buffer raised, with the folder that it was to write to;
        DeadlineError after ``args.save_timeout_s`` for all ranks' parts."""
        self._deadline = time.monotonic() + self.args.save_timeout_s
        self._writing = self._written(step, {OWES_EVALUATION: True} if owes_evaluation else {})
        next(self._writing)

    def save_next(self) -> None:
        """Write the part of the next trained role. Raises as ``save``."""
        next(self._writing)

    def seal(self) -> None:
        """Wait for what ranks still write under ``--async-save``; the checkpoint is whole then, and has its name.
        Earlier ones are removed, as ``--keep-last`` says. Raises as ``save``."""
        for _ in self._writing:
            pass
        retain(self.args)

    def _written(self, step: int, more: Mapping[str, Any]) -> Iterator[None]:
        options = mask_secrets(self.args.model_dump(mode="json"))
        facts = {"buffer_rl": __version__, "options": options, **self.provenance, **more}
        facts |= {"saved": datetime.now(UTC).isoformat(timespec="seconds"), "changed": changed_options(self.args)}
        with new_checkpoint(required(self.args.save, "save"), step, facts, self.args.run_dir) as folder:
            try:
                for role in self.trained:
                    self._fill(folder, role)
                    yield
                for group in self.trained.values():
                    self._wait_for(group)
            except BufferRLError as error:  # a rank does not say which disk is full
                if not isinstance(error, DeadlineError) and str(folder.parent) not in str(error):
                    error.where = f"{error.where}, which writes to {folder.parent}"
                raise

    def _wait_for(self, group: ActorGroup) -> None:
        """Return once the ranks of ``group`` have written; they answer between their calls."""
        busy_s = max(self.args.train_timeout_s, longest_wait(self.args))
        while not group.call(TrainRank.is_saved, timeout_s=self.time_left() + busy_s):
            if not self.time_left():
                what = f"the ranks did not write their part within {self.args.save_timeout_s:g} s"
                raise DeadlineError(what, where=f"{group.role}.is_saved", hint="raise --save-timeout-s")
            time.sleep(SAVE_POLL_S)

    def _fill(self, folder: Path, role: str) -> None:
        ranks = (folder / checkpoint_folder(role)).absolute()
        ranks.mkdir()
        self.trained[role].call(TrainRank.save, str(ranks), timeout_s=self.time_left())
        if role != ACTOR:
            return
        self.trained[ACTOR].call(TrainRank.save_hf, str((folder / "hf").absolute()), timeout_s=self.time_left())
        if self.reference is not None:
            self.reference.save(folder / REFERENCE_FOLDER)
        self.buffer.call(BufferActor.save, str(folder.absolute()))

    def time_left(self) -> float:
        """Seconds of ``--save-timeout-s`` that are left for the checkpoint that is being written."""
        return max(0.0, self._deadline - time.monotonic())


class RolloutRecorder:
    """Writes the rows of a closed rollout that the trainer will read, without the fields that it adds."""

    def __init__(self, template: str, buffer: BufferClient) -> None:
        self._template = template
        self._buffer = buffer

    def save(self, rollout_id: int) -> None:
        """Write the rollout's file, without what roles have added while it ran. Raises DataError or OSError."""
        write_rollout(rollout_path(self._template, rollout_id), self._buffer.get_data(rollout_id, Share(given=True)))


class RecordedRollouts:
    """The rollout role of a run that only trains: each rollout's rows come from its file, with the columns that options
    read."""

    def __init__(self, args: Args, buffer: BufferClient) -> None:
        self._template = required(args.load_debug_rollout_data, "load_debug_rollout_data")
        self._buffer = buffer
        self._replays = {
            ("--replay-kept-tokens", "kept_counts"): args.replay_kept_tokens,
            ("--replay-routed-experts", "routed_experts"): args.replay_routed_experts,
        }

    def run(self, ticket: Ticket) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Fill the ticket's rollout. Raises DataError, or BufferStateError if its groups do not fit."""
        path = rollout_path(self._template, ticket.rollout_id)
        batch = read_rollout(path)
        if batch.rollout_id != ticket.rollout_id:
            raise DataError(f"these are the rows of rollout {batch.rollout_id}", where=str(path), expected=ticket.task)
        for (flag, column), is_read in self._replays.items():
            if is_read and column not in batch.columns:
                what = f"{flag}: these rows were recorded without it, and have no {column}"
                raise DataError(what, where=str(path), hint="take it out")
        self._buffer.import_groups(ticket, batch.row_ids, batch.columns)
        metrics = {}
        if "raw_reward" in batch.columns and len(batch):
            samples = [(row_id.uid, row_id.sample_index) for row_id in batch.row_ids]
            rewards = sample_means(samples, np.asarray(batch.columns["raw_reward"]).tolist())
            metrics["rollout/raw_reward"] = float(np.mean(rewards))
        return metrics, []
