"""Loaded by every Python process of a timed test session: notes what its start and its imports cost.

A line a process: ``pid<TAB>start<TAB>imports so far`` in processor seconds, written again as imports go on, since most
processes of a test session are killed and never reach their end.
"""

import builtins
import os
import threading
import time


def _watch(folder: str) -> None:
    plain, local, note = builtins.__import__, threading.local(), time.thread_time
    path, start, lock = os.path.join(folder, str(os.getpid())), time.process_time(), threading.Lock()
    seconds = written = 0.0

    def write() -> None:
        with open(path, "w") as file:
            file.write(f"{os.getpid()}\t{start:.3f}\t{seconds:.3f}\n")

    def begin_in_child() -> None:
        nonlocal path, start, lock, seconds, written
        path, start, lock = os.path.join(folder, str(os.getpid())), 0.0, threading.Lock()
        seconds = written = 0.0

    def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal seconds, written
        if getattr(local, "inside", False):
            return plain(*args, **kwargs)
        local.inside, begun = True, note()
        try:
            return plain(*args, **kwargs)
        finally:
            local.inside = False
            with lock:
                seconds += note() - begun
                if seconds - written > 0.02:
                    written = seconds
                    write()

    os.register_at_fork(after_in_child=begin_in_child)
    builtins.__import__ = timed
    write()


if folder := os.environ.get("SESSION_TIMES"):
    _watch(folder)
