"""The folders of a run that only one driver may write to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from buffer_rl.errors import ConfigError
from buffer_rl.files.checkpoint import make_folder, newest_step, remove_unfinished
from buffer_rl.files.remote import is_remote, local_path
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import required
from buffer_rl.plan.schedule import rollout_only

if TYPE_CHECKING:
    from buffer_rl.args import Args


LOCK_NAME = ".lock"


@contextmanager
def folder_lock(folder: Path, flag: str = "--run-dir") -> Iterator[None]:
    """Make ``folder``, which the option ``flag`` names, and keep other runs out of it for the length of the block.

    Two runs in one folder would read each other's weights, or remove each other's files. The lock ends with the
    process, however that ends. What runs that were killed left unfinished there is removed.
    Raises ConfigError if another run has it.
    """
    try:
        make_folder(folder)
        file = (folder / LOCK_NAME).open("w")
    except OSError as error:
        raise ConfigError(f"the folder cannot be made: {error}", where=flag) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is at work in {str(folder)!r}", where=flag, hint=f"add {flag} PATH"
            ) from None
        except OSError:  # a file system without locks: the files may be another run's
            pass
        else:
            remove_unfinished(folder)
        yield


def check_lineage(args: Args, first_step: int) -> None:
    """Raises ConfigError if ``--save`` holds a checkpoint of a later step than this run begins at, CheckpointError if
    that cannot be found out. A later ``--load`` of the folder takes the newest one, which would be another run's.

    first_step: 0, or the step of the checkpoint that the run continues from.
    """
    found = later_checkpoint(args, first_step)
    if found is None:
        return
    folder = mask_url(required(args.save, "save"))
    raise ConfigError(
        f"the folder holds a checkpoint of step {found}, and this run begins at step {first_step}",
        where=f"--save {folder}",
        expected=f"no checkpoint beyond step {first_step}: the newest one would be of another run",
        hint=f"another folder; or --load {folder} to go on from step {found}; or move the later checkpoints away",
    )


def later_checkpoint(args: Args, first_step: int) -> int | None:
    """The step of the newest checkpoint in ``--save``, if it is beyond ``first_step``; None for a run that writes none.
    After ``check_lineage`` it is of this run. Raises CheckpointError if it cannot be found out."""
    if not _saves(args) or (args.num_rollout is not None and args.num_rollout <= first_step):
        return None
    found = newest_step(required(args.save, "save"))
    return found if found > first_step else None


def with_start(args: Args) -> Args:
    """The options of a run that goes on where it was, ``--load`` and ``--save`` being one folder: without ``--load`` as
    long as the folder holds no checkpoint, which is the first start. ``args`` itself where it holds one.

    Raises CheckpointError if that cannot be found out."""
    if args.load is None or args.save is None or not _is_one_folder(args.load, args.save):
        return args
    if newest_step(args.save):
        return args
    return args.model_copy(update={"load": None})


def _is_one_folder(one: str, other: str) -> bool:
    if is_remote(local_path(one)) or is_remote(local_path(other)):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(local_path(one)) == os.path.realpath(local_path(other))


@contextmanager
def save_lock(args: Args) -> Iterator[None]:
    """``folder_lock`` of ``--save``, where the run saves and the folder is local: URLs cannot be locked. ``--run-dir``
    is locked already, and may be the same folder."""
    folder = local_path(args.save or args.run_dir)
    if not _saves(args) or is_remote(folder) or os.path.realpath(folder) == os.path.realpath(args.run_dir):
        yield
        return
    with folder_lock(Path(folder), "--save"):
        yield


def _saves(args: Args) -> bool:
    return args.save is not None and not rollout_only(args)
