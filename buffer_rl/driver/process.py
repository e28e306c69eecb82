"""The driver's process: how it is told to end, and which folder it has to itself."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from buffer_rl.checkpoint import make_folder, remove_unfinished
from buffer_rl.errors import ConfigError

LOCK_NAME = ".lock"


@contextmanager
def termination_as_exception() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP (a closed terminal) into SystemExit for the length of the block, so that everything
    is taken down.

    Outside the main thread, where Python allows no handlers, the signals keep their meaning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def sole_user(folder: Path, flag: str = "--run-dir") -> Iterator[None]:
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
        except OSError:  # a file system without locks: who knows whose the files are
            pass
        else:
            remove_unfinished(folder)
        yield
