"""The folder of a run's checkpoints: one lineage, and one run at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buffer_rl.checkpoint import newest_step
from buffer_rl.driver.modes import rollout_only
from buffer_rl.driver.process import sole_user
from buffer_rl.errors import ConfigError
from buffer_rl.redaction import mask_url
from buffer_rl.remote import is_remote, local_path


def check_lineage(args: Any, first_step: int) -> None:
    """Raises ConfigError if ``--save`` holds a checkpoint of a later step than this run begins at, CheckpointError if
    that cannot be found out. A later ``--load`` of the folder takes the newest one, which would be another run's.

    first_step: 0, or the step of the checkpoint that the run continues from.
    """
    if not _saves(args) or (args.num_rollout is not None and args.num_rollout <= first_step):
        return
    found = newest_step(args.save)
    if found <= first_step:
        return
    folder = mask_url(args.save)
    raise ConfigError(
        f"the folder holds a checkpoint of step {found}, and this run begins at step {first_step}",
        where=f"--save {folder}",
        expected=f"no checkpoint beyond step {first_step}: the newest one would be of another run",
        hint=f"another folder; or --load {folder} to go on from step {found}; or move the later checkpoints away",
    )


@contextmanager
def sole_saver(args: Any) -> Iterator[None]:
    """``sole_user`` of ``--save``, where the run saves and the folder is local: URLs cannot be locked. ``--run-dir`` is
    locked already, and may be the same folder."""
    folder = local_path(args.save or args.run_dir)
    if not _saves(args) or is_remote(folder) or os.path.realpath(folder) == os.path.realpath(args.run_dir):
        yield
        return
    with sole_user(Path(folder), "--save"):
        yield


def _saves(args: Any) -> bool:
    return args.save is not None and not rollout_only(args)
