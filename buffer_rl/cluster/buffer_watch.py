"""Notices a Buffer that hangs, and ends its process, so that Ray starts it again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

PATIENCE_S = 0.1
"""Longest time that one look waits for an answer; a healthy Buffer's takes milliseconds."""


class BufferWatch:
    """A watcher of the driver: asks the Buffer how it is, and never waits for it longer than ``PATIENCE_S``.

    hang_s: a Buffer whose process runs, and did not answer for this long or has worked on one change for this long, is
    ended. start_s: so is one that is not there again after this long.
    process: the id of the Buffer's process on this machine; None while there is none.
    shown: hears the Buffer's counts. notice: hears of a Buffer that was replaced or is to be.
    """

    def __init__(
        self,
        actor: Any,
        *,
        hang_s: float,
        start_s: float,
        process: Callable[[], int | None],
        shown: Callable[[dict[str, Any]], None],
        notice: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actor = actor
        self._hang_s = hang_s
        self._start_s = start_s
        self._process = process
        self._shown = shown
        self._notice = notice
        self._now = now
        self._question: Any = None
        self._asked = 0.0
        self._pid: int | None = None

    def __call__(self) -> None:
        """One look."""
        if self._question is None:
            self._question, self._asked = self._actor.get_progress.remote(), self._now()
        if not ray.wait([self._question], timeout=PATIENCE_S)[0]:
            silent = self._now() - self._asked
            if silent > self._hang_s and (self._process() is not None or silent > self._start_s):
                self._end(f"did not answer for {silent:.0f} s")
            return
        question, self._question = self._question, None
        try:
            answer: dict[str, Any] = ray.get(question, timeout=PATIENCE_S)
        except ray.exceptions.RayError:  # it died; who needs it waits for the next one, or ends the run
            return
        if self._pid is not None and answer["pid"] != self._pid:
            self._notice(f"the Buffer died and was replaced (process {answer['pid']})")
        self._pid = answer["pid"]
        if answer["busy_s"] > self._hang_s:
            self._end(f"has worked on one change for {answer['busy_s']:.0f} s")
        self._shown(answer)

    def _end(self, why: str) -> None:
        self._notice(f"the Buffer {why}: its process is ended")
        self._question = None
        process = self._process()
        if process is None:
            ray.kill(self._actor, no_restart=False)
            return
        with suppress(ProcessLookupError):  # as ray.kill, which takes seconds to end a stopped process
            os.kill(process, signal.SIGKILL)
