"""The folders of a run that only one driver may write to."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import orjson

from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, ConfigError, raised_as
from buffer_rl.files.checkpoint import (
    EVALUATION,
    STEP_NAME,
    folder_at,
    held_checkpoints,
    kept_steps,
    lock_file,
    make_folder,
    newest_step,
    remove_unfinished,
)
from buffer_rl.files.remote import MANIFEST, is_remote, local_path
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import required
from buffer_rl.plan.schedule import rollout_only

LOCK_NAME = ".lock"
AUTO = "auto"
"""``--load auto``: the newest checkpoint in ``--save``, or the start."""
LINEAGE = "lineage"
"""In a checkpoint's facts: the name of the run that began it and of all that went on from it."""
START = "start"
"""In a checkpoint's facts: the name of the start of processes that wrote it (``RunStart``)."""
_log = logging.getLogger(__name__)


@contextmanager
def folder_lock(folder: Path, flag: str = "--run-dir") -> Iterator[None]:
    """Make ``folder``, which the option ``flag`` names, and keep other runs out of it for the length of the block.

    Two runs in one folder would read each other's weights, or remove each other's files. The lock ends with the
    process, however that ends. What runs that were killed left unfinished there is removed.
    Raises ConfigError if another run has it.
    """
    with raised_as(ConfigError, "the folder cannot be made", OSError, where=flag):
        make_folder(folder)
        file = (folder / LOCK_NAME).open("w")
    with file:
        locked = lock_file(file, fcntl.LOCK_EX)
        if locked is False:
            raise ConfigError(f"another run is at work in {str(folder)!r}", where=flag, hint=f"add {flag} PATH")
        if locked:  # without locks the files may be another run's
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
    folder, see = mask_url(required(args.save, "save")), "docs/troubleshooting.md#resuming-is-refused"
    what = f"the folder holds a checkpoint of step {found}, and this run begins at step {first_step}"
    expected = f"no checkpoint beyond step {first_step}: the newest one would be of another run"
    others = "or another folder; or move the later checkpoints away"
    hint = f"--load auto (or --load {folder}) to go on from step {found}; {others}"
    raise ConfigError(what, where=f"--save {folder}", expected=expected, hint=hint, see=see)


def later_checkpoint(args: Args, first_step: int) -> int | None:
    """The step of the newest checkpoint in ``--save``, if it is beyond ``first_step``; None for a run that writes none.
    After ``check_lineage`` it is of this run. Raises CheckpointError if it cannot be found out."""
    if not _saves(args) or (args.num_rollout is not None and args.num_rollout <= first_step):
        return None
    found = newest_step(required(args.save, "save"))
    return found if found > first_step else None


def with_start(args: Args) -> Args:
    """The options with the start that ``--load`` leaves open: ``auto``, or the folder of ``--save``. It is the newest
    checkpoint there; without one there is no ``--load``, and the run starts.

    Raises ConfigError for ``auto`` without ``--save``, CheckpointError if checkpoints cannot be looked for."""
    if args.load == AUTO and args.save is None:
        raise ConfigError("there is no folder to look for checkpoints in", where="--load auto", hint="add --save PATH")
    if args.load is None or args.save is None or not (args.load == AUTO or _is_one_folder(args.load, args.save)):
        return args
    if newest_step(args.save):
        return args.model_copy(update={"load": args.save}) if args.load == AUTO else args
    return args.model_copy(update={"load": None})


def retain(args: Args, before: int = 0) -> None:
    """After a checkpoint, and at the end of a run that wrote one beyond the step ``before``: note how the newest two in
    ``--save`` were evaluated, and remove those of the lineage that ``--keep-last`` and ``--keep-best`` do not keep.

    What fails is logged, and ends no run: the checkpoint is there."""
    save = required(args.save, "save")
    try:
        folder = folder_at(save)
        found = held_checkpoints(folder, newest=0 if args.keep_last else 2)
        if (newest := max(found, default=0)) <= before:
            return
        evaluations = {line["step"]: line for line in read_metrics(args.run_dir) if line["kind"] == "eval"}
        scores = {}
        for step, held in found.items():
            if held.manifest.facts.get(LINEAGE) == found[newest].manifest.facts.get(LINEAGE):
                noted = {name: value for name, value in evaluations.get(step, {}).items() if name.startswith("eval/")}
                scores[step] = {**held.scores, **noted}
        for step in [*scores][-2:]:
            folder.put(found[step].name, EVALUATION, orjson.dumps(scores[step]))
        for step in scores.keys() - kept_steps(scores, args.keep_last or len(scores), args.keep_best):
            folder.remove(found[step].name)
        for name in folder.names() if args.keep_last else ():
            if STEP_NAME.fullmatch(name) and folder.content(name, MANIFEST) == b"":  # at a URL: a removal was cut off
                folder.remove(name)
    except (BufferRLError, OSError) as error:
        _log.warning("earlier checkpoints in %s stay: %s", mask_url(save), error)


def _is_one_folder(one: str, other: str) -> bool:
    if is_remote(local_path(one)) or is_remote(local_path(other)):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(local_path(one)) == os.path.realpath(local_path(other))


@contextmanager
def save_lock(args: Args) -> Iterator[None]:
    """``folder_lock`` of ``--save``, where the run saves and the folder is local: URLs cannot be locked. ``--run-dir``
    is locked already, and may be the same folder. After a block that wrote checkpoints, ``retain``."""
    if not _saves(args):
        yield
        return
    folder = local_path(required(args.save, "save"))
    apart = not is_remote(folder) and os.path.realpath(folder) != os.path.realpath(args.run_dir)
    with folder_lock(Path(folder), "--save") if apart else nullcontext():
        before = newest_step(folder)
        yield
        retain(args, before)


def _saves(args: Args) -> bool:
    return args.save is not None and not rollout_only(args)


def check_writable(flag: str, folder: Path) -> None:
    """Raises ConfigError if ``folder`` cannot be made or written to. It is really made, a file is written in it, and
    both are removed again: permissions alone do not tell of a full disk, or of folders that the system makes."""
    nearest = nearest_folder(folder)
    if not nearest.is_dir():
        raise ConfigError(f"{str(nearest)!r} is a file, not a folder", where=flag)
    new = [path for path in (folder, *folder.absolute().parents) if not os.path.exists(path)]
    hint = f"{flag} PATH names another folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".buffer-rl-", dir=folder) as file:
            file.write(b"?")
            file.flush()
    except PermissionError as error:
        raise ConfigError(f"no permission to write to {str(nearest)!r}", where=flag, hint=hint) from error
    except OSError as error:
        what = f"the folder {str(folder)!r} cannot be written to: {error.strerror}"
        raise ConfigError(what, where=flag, hint=hint) from error
    finally:
        for path in new:
            with suppress(OSError):  # of one that was not made, or that another process has filled meanwhile
                path.rmdir()


def nearest_folder(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    exists = os.path.exists  # unlike that of Path, it takes a name that is too long for the system
    return next(path for path in (folder, *folder.absolute().parents) if exists(path))


def make_folders(args: Args) -> None:
    """Make ``--run-dir`` and a local ``--save``. Raises ConfigError if one cannot be made."""
    for flag, path in (("--run-dir", args.run_dir), ("--save", args.save)):
        if path is None or is_remote(local_path(path)):
            continue
        try:
            make_folder(Path(local_path(path)))
        except OSError as error:
            raise ConfigError(f"the folder {path!r} cannot be made: {error.strerror}", where=flag) from error
