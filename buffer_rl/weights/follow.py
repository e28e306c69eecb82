"""Published weights for engines that others run and that follow by polling: ``--publish-follow``.

::

    DIR/v000007/      a Hugging Face folder; it has this name once it is whole
    DIR/newest.json   {"publication": 8, "version": 7, "folder": "v000007", "kept": ["v000005", "v000006", "v000007"]}

A reader reads ``newest.json``, and loads the folder if ``publication`` is another than at its last look. It never sees
half a folder or half a pointer, as both get their names by one rename. A folder stays for ``keep`` more publications; a
reader that finds it gone reads the pointer again. ``publication`` goes up by one each time, also if a run that resumes
from an older checkpoint publishes a version again: that gets a folder of another name, ``v000007.12``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from buffer_rl.args import Args
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.files.checkpoint import sync_path
from buffer_rl.weights.disk import VERSION_GLOB, disk_folder, remove_versions, write_folder

POINTER = "newest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """What the pointer says. kept: the folders that are there, the oldest first.

    Example:
        newest = Newest(publication=8, version=7, folder="v000007", kept=["v000006", "v000007"])
    """

    publication: int
    version: int
    folder: str
    kept: list[str]


def read_newest(folder: Path) -> Newest | None:
    """The pointer in ``folder``; None before the first publication. Raises CheckpointError if it is none."""
    path = folder / POINTER
    try:
        return Newest(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"this is no pointer to published weights: {error}", where=str(path)) from error


class FollowFolder:
    """Writes each version into ``folder``, and moves the pointer.

    save_hf: writes the newest weights as a Hugging Face folder. keep: how many folders before the newest stay.
    """

    def __init__(self, folder: Path, save_hf: Callable[[str], object], *, keep: int) -> None:
        self._folder = folder.absolute()
        self._save_hf = save_hf
        self._keep = keep
        self._version: int | None = None

    @classmethod
    def from_args(cls, args: Args, save_hf: Callable[[str], object]) -> Self | None:
        """None without ``--publish-follow``. Raises ConfigError if ``--weight-sync-mode disk`` uses the same folder, as
        it keeps the newest version alone."""
        if args.publish_follow is None:
            return None
        folder = Path(args.publish_follow).absolute()
        if folder == disk_folder(args):
            what = "engines of the run take their weights from the same folder, where one version stays"
            raise ConfigError(what, where=f"--publish-follow {args.publish_follow}", expected="a folder of its own")
        return cls(folder, save_hf, keep=args.publish_follow_keep)

    def write(self, version: int) -> None:
        """Have followers find ``version``, which the trainer has; nothing if it was the last one here.

        Raises CheckpointError, with the pointer as it was, if it cannot be written; ConfigError if the trainer writes
        to another file system than the driver sees."""
        if version == self._version:
            return
        try:
            before = read_newest(self._folder)
            number = 1 if before is None else before.publication + 1
            name = f"v{version:06d}"
            if (self._folder / name).exists():
                name = f"{name}.{number}"
            write_folder(self._folder / name, self._save_hf, where=f"--publish-follow {self._folder}")
            kept = [*(before.kept[-self._keep :] if before is not None and self._keep else ()), name]
            self._move_pointer(Newest(publication=number, version=version, folder=name, kept=kept))
            patterns = f"{VERSION_GLOB}.*", f".{VERSION_GLOB}.*.tmp"
            remove_versions(self._folder, [self._folder / name for name in kept], *patterns)
        except OSError as error:
            what = f"version {version} could not be written for followers: {type(error).__name__}: {error}"
            raise CheckpointError(what, where=f"--publish-follow {self._folder}") from error
        self._version = version

    def _move_pointer(self, newest: Newest) -> None:
        temporary = self._folder / f".{POINTER}.tmp"
        temporary.write_text(json.dumps(asdict(newest)))
        sync_path(temporary)
        temporary.replace(self._folder / POINTER)
