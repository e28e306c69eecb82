"""A process that ends with the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends, even while other code hangs; elsewhere this does nothing.

    Linux means the parent's thread that started this process, which must live as long as the parent. parent: its
    process id, for a caller whose parent may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)
