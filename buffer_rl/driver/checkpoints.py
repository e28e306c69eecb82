"""One checkpoint of a run: trainer ranks, Buffer and options under one manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from buffer_rl import __version__
from buffer_rl.buffer.client import BufferClient
from buffer_rl.checkpoint import write_checkpoint
from buffer_rl.cluster.worker_group import WorkerGroup

if TYPE_CHECKING:
    from buffer_rl.options import Args


class RunCheckpoints:
    """Writes ``args.save/step_NNNNNN`` (see ``buffer_rl.checkpoint``).

    ``trainer/`` holds each rank's weights, optimizer and random state, ``hf/`` the weights for everybody else,
    ``buffer.json`` the queue, the ledger and the position in the data.
    """

    def __init__(self, args: Args, *, buffer: BufferClient, train: WorkerGroup) -> None:
        self._args = args
        self._buffer = buffer
        self._train = train

    def save(self, step: int) -> None:
        """Save after ``step`` optimizer steps. Raises CheckpointError, or what a rank or the Buffer raised."""
        facts = {"buffer_rl": __version__, "options": self._args.model_dump(mode="json")}
        assert self._args.save is not None  # there would be no RunCheckpoints otherwise
        write_checkpoint(self._args.save, step, self._fill, facts)

    def _fill(self, folder: Path) -> None:
        (folder / "trainer").mkdir()
        limit = self._args.train_timeout_s
        self._train.call("save", str((folder / "trainer").absolute()), timeout_s=limit)
        self._train.call("save_hf", str((folder / "hf").absolute()), timeout_s=limit)
        self._buffer.save(str(folder.absolute()))
