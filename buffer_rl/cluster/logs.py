"""Where a worker's own output goes: a file of the run, so that a ``print`` in a reward function can be read."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def redirect_output(path: str) -> None:
    """Send this process's standard output and error, and those of its children, to the end of ``path``."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Python's own streams may write to Ray's copies of the descriptors: point them at the file as well.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
