"""The driver's process: how it is told to end, and which folder it has to itself."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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
def sole_user(run_dir: Path) -> Iterator[None]:
    """Make ``run_dir`` and keep other runs out of it for the length of the block.

    Two runs in one folder would read each other's weights. The lock ends with the process, however that ends.
    Raises ConfigError if another run has it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder cannot be made: {error}", where="--run-dir") from error
    with (run_dir / LOCK_NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is at work in {str(run_dir)!r}", where="--run-dir", hint="add --run-dir PATH"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
