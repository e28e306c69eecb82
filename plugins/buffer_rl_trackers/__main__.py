"""``python -m buffer_rl_trackers``: one tracker, started, fed and ended by a ``TrackerLogger``.

A line of JSON a record on standard input: what the tracker starts with, then metrics, then the end. If the input ends
without that, the run has died, and the tracker's run ends as failed. Answers are lines of JSON on what was standard
output; the library gets the log file for it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import threading
import traceback
from typing import Any, TextIO

from buffer_rl.options.redaction import mask_url
from buffer_rl_trackers.logger import Start, Tracker, id_file


class Answers:
    """Writes answers. After a deadline, which starts once, the process says what it was ``doing`` and ends."""

    def __init__(self, pipe: TextIO, close_s: float) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._timer = threading.Timer(close_s, self._give_up, (f"{close_s:g} s after it was told to end",))
        self._timer.daemon = True
        self._has_started = False
        self.doing = "its start"

    def write(self, **answer: Any) -> None:
        """Write one answer; nobody reads it if the run has died."""
        with self._lock, contextlib.suppress(OSError):
            self._pipe.write(json.dumps(answer) + "\n")
            self._pipe.flush()

    def start_deadline(self) -> None:
        """From now on, the process ends within the deadline."""
        with self._lock:
            has_started, self._has_started = self._has_started, True
        if not has_started:
            self._timer.start()

    def _give_up(self, when: str) -> None:
        self.write(error=f"{self.doing} is not done {when}")
        os._exit(1)


def main() -> None:
    """Serve one tracker, then end the process without waiting for what the library left running."""
    requests, answer_pipe = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the library, or a process that it starts, prints
    line = requests.readline()
    if line:
        start = json.loads(line)
        answers = Answers(answer_pipe, start["close_s"])
        records: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(requests, records, answers), daemon=True).start()
        _serve(start, records, answers)
    os._exit(0)


def _read(requests: TextIO, records: queue.SimpleQueue[dict[str, Any]], answers: Answers) -> None:
    for line in requests:
        records.put(json.loads(line))
    answers.start_deadline()  # the run has sent its end, or has died
    records.put({"end": True, "failed": True})


def _serve(start: dict[str, Any], records: queue.SimpleQueue[dict[str, Any]], answers: Answers) -> None:
    tracker: Tracker | None = None
    try:
        tracker = _tracker(start)
        answers.write(place=tracker.place, done=1)
        while "end" not in (record := records.get()):
            answers.doing = f"step {record['step']}"
            tracker.log(record["metrics"], record["step"])
            answers.write(done=1)
        answers.doing = "its end"
        tracker.close(record["failed"])
        answers.write(closed=1)
    except BaseException as error:  # fault boundary: a library, which may raise SystemExit too
        traceback.print_exc()
        answers.write(error=f"{type(error).__name__}: {mask_url(str(error))}".removesuffix(": "))
        answers.start_deadline()
        if tracker is not None:
            with contextlib.suppress(BaseException):
                tracker.close(True)


def _tracker(start: dict[str, Any]) -> Tracker:
    module, _, name = start["tracker"].partition(":")
    made = {key: start[key] for key in ("run_dir", "run_id", "options", "config")}
    tracker: Tracker = getattr(importlib.import_module(module), name)(Start(**made))
    file = id_file(start["run_dir"], start["name"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{tracker.run_id}\n")
    return tracker


if __name__ == "__main__":
    main()
