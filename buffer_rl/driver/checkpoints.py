"""One checkpoint of a run: trainer ranks, Buffer and options under one manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_rl import __version__
from buffer_rl.buffer.client import BufferClient
from buffer_rl.checkpoint import upload_checkpoint, write_checkpoint
from buffer_rl.cluster.worker_group import WorkerGroup
from buffer_rl.errors import BufferRLError, DeadlineError
from buffer_rl.redaction import mask_secrets
from buffer_rl.remote import is_remote, local_path

if TYPE_CHECKING:
    from buffer_rl.options import Args


class RunCheckpoints:
    """Writes ``args.save/step_NNNNNN`` (see ``buffer_rl.checkpoint``); for a URL by way of ``args.run_dir``.

    ``trainer/`` holds each rank's weights, optimizer and random state, ``hf/`` the weights for everybody else,
    ``buffer.json`` the queue, ``ledger.sqlite`` the ledger and the position in the data. The manifest's facts are the
    options, without secrets, and ``provenance``: what code and data the run is made of.
    """

    def __init__(
        self, args: Args, *, buffer: BufferClient, train: WorkerGroup, provenance: Mapping[str, Any] | None = None
    ) -> None:
        self._args = args
        self._provenance = dict(provenance or {})
        self._buffer = buffer
        self._train = train
        self._deadline = 0.0

    def save(self, step: int) -> None:
        """Save after ``step`` optimizer steps. Raises CheckpointError, or what a rank or the Buffer raised, with
        the folder that it was to write to; DeadlineError after ``args.save_timeout_s`` for all ranks' parts."""
        options = mask_secrets(self._args.model_dump(mode="json"))
        facts = {"buffer_rl": __version__, "options": options, **self._provenance}
        root = self._args.save
        self._deadline = time.monotonic() + self._args.save_timeout_s
        assert root is not None  # there would be no RunCheckpoints otherwise
        if is_remote(local_path(root)):
            upload_checkpoint(root, step, self._fill, facts, scratch=self._args.run_dir)
        else:
            write_checkpoint(root, step, self._fill, facts)

    def _fill(self, folder: Path) -> None:
        (folder / "trainer").mkdir()
        try:
            self._train.call("save", str((folder / "trainer").absolute()), timeout_s=self._left())
            self._train.call("save_hf", str((folder / "hf").absolute()), timeout_s=self._left())
            self._buffer.save(str(folder.absolute()))
        except DeadlineError:
            raise
        except BufferRLError as error:  # a rank does not say which disk is full
            if str(folder.parent) not in str(error):
                error.where = f"{error.where}, which writes to {folder.parent}"
            raise

    def _left(self) -> float:
        """Seconds of ``--save-timeout-s`` that are left for the checkpoint that is being written."""
        return max(0.0, self._deadline - time.monotonic())
