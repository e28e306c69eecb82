"""A tracker as a logger of metrics that can neither end the run nor slow it.

The library of a tracker runs in a process of its own: whatever it raises, waits for, starts or prints stays there.
Records go to it by its standard input, from a thread, and its answers are read by another.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from buffer_rl.observe.terminal import say
from buffer_rl.options.redaction import mask_secrets
from buffer_rl.options.section import ENV_PREFIX
from buffer_rl_trackers.options import TrackerOptions

if TYPE_CHECKING:
    from buffer_rl_trackers.options import TrackerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a tracker's run is made of.

    run_dir: the run's folder, absolute. run_id: the tracker's run to continue; empty for a new one. options: those of
    ``TrackerOptions``. config: all options of the run, as JSON values without secrets.
    """

    run_dir: str
    run_id: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return Path(self.run_dir).name


class Tracker(Protocol):
    """A run in a tracker, constructed as ``cls(start)``. All of it may raise anything, and take any time.

    run_id: by which the run is continued. place: where the user finds it.
    """

    run_id: str
    place: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add finite numbers to ``step``, which may be lower than the one before, or the same."""

    def close(self, failed: bool) -> None:
        """Send what is left, and end the run."""


def id_file(run_dir: str, name: str) -> Path:
    """The file of a run's folder that keeps the id of its run in the tracker ``name``."""
    return Path(run_dir) / "trackers" / f"{name}.id"


QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "DO_NOT_TRACK": "1",
}
"""Variables of the process, unless the user sets them: no output of its own, no reports to the library's makers."""
MOST_PENDING = 10_000
"""Records that were sent and are not logged yet."""
GRACE_S = 5.0
"""For the process to end after its own deadline."""


class TrackerLogger:
    """A logger (see ``MetricLogger``) that keeps the tracker ``name`` in a process.

    tracker: the class of it, which is constructed there. hang_s, close_s: how long a record and the end may take.
    None of its methods raises: a tracker that fails or hangs is named once, and gets no more metrics."""

    name: ClassVar[str]
    tracker: ClassVar[type[Tracker]]
    hang_s: ClassVar[float] = 300.0
    close_s: ClassVar[float] = 60.0

    def __init__(self, args: TrackerArgs, run_dir: str) -> None:
        self._lock = threading.Lock()
        self._pending = deque([time.monotonic()])  # when what is not answered yet was sent; the start is the first
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._early: list[str] | None = []  # notices until the first record; the run's line of its start is open
        self._is_dropped = self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._process: subprocess.Popen[str] | None = None
        self._log_path = Path(run_dir).absolute() / "logs" / f"tracker_{self.name}.log"
        try:
            start = self._start_of(args, run_dir)
            self._process = self._start_process()
        except OSError as error:
            self._drop(str(error))
            return
        self._send(start)
        for work in (self._write, self._read):
            thread = threading.Thread(target=work, args=(self._process,), name=f"tracker-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the finite numbers of ``metrics``."""
        self._say_early()
        if self._is_dropped:
            return
        now = time.monotonic()
        with self._lock:
            waited_s, count = now - (self._pending[0] if self._pending else now), len(self._pending)
            self._pending.append(now)
        if waited_s > self.hang_s or count >= MOST_PENDING:
            self._drop(f"no answer for {waited_s:.0f} s, {count} records wait", kill=True)
            return
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        self._send({"step": int(step), "metrics": finite})

    def close(self) -> None:
        """Let the tracker send what is left, ``close_s`` at most, and end its process."""
        self._say_early()
        if self._process is None:
            return
        self._send({"end": True, "failed": sys.exc_info()[0] is not None})
        self._lines.put(None)
        try:
            self._process.wait(self.close_s + GRACE_S)
        except subprocess.TimeoutExpired:
            self._drop(f"does not end, {self.close_s + GRACE_S:.0f} s after it was told to")
        finally:  # also for a second signal
            self._kill()
        for thread in self._threads:
            thread.join(GRACE_S)

    def _start_of(self, args: TrackerArgs, run_dir: str) -> dict[str, Any]:
        """The first line for the process. Options go by it, not by the command line, which others can read."""
        kept = id_file(run_dir, self.name)
        if args.load is None:
            kept.unlink(missing_ok=True)
        return {
            "name": self.name,
            "tracker": f"{self.tracker.__module__}:{self.tracker.__qualname__}",
            "close_s": self.close_s,
            "run_dir": str(Path(run_dir).absolute()),
            "run_id": kept.read_text().strip() if kept.is_file() else "",
            "options": {name: getattr(args, name) for name in TrackerOptions.model_fields},
            "config": mask_secrets(args.model_dump(mode="json")),
        }

    def _start_process(self) -> subprocess.Popen[str]:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        folders = os.pathsep.join(folder for folder in sys.path if folder)
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "buffer_rl_trackers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**QUIET, **own, "PYTHONPATH": folders},
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the run, which then ends this in order
            )

    def _send(self, record: Mapping[str, Any]) -> None:
        self._lines.put(json.dumps(record) + "\n")

    def _write(self, process: subprocess.Popen[str]) -> None:
        """Writes to the process what is sent; a thread, as that waits where the process reads slowly."""
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as pipe:  # why it does not read any more, _read says
            for line in iter(self._lines.get, None):
                pipe.write(line)
                pipe.flush()

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Reads what the process answers, until it has ended."""
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                answer = json.loads(line)
                if "error" in answer:
                    self._drop(answer["error"])
                elif "place" in answer:
                    self._say(answer["place"])
                self._is_closed = self._is_closed or "closed" in answer
                with self._lock:
                    if "done" in answer and self._pending:
                        self._pending.popleft()
        if not self._is_closed:
            self._drop(f"its process has ended with status {process.wait()}")

    def _drop(self, why: str, *, kill: bool = False) -> None:
        with self._lock:
            if self._is_dropped:
                return
            self._is_dropped = True
        self._say(f"{why}; the run goes on without it ({self._log_path})")
        self._lines.put(None)
        if kill:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(GRACE_S)

    def _say_early(self) -> None:
        with self._lock:
            early, self._early = self._early or [], None
        for text in early:
            self._say(text)

    def _say(self, text: str) -> None:
        with self._lock:
            if self._early is not None:
                self._early.append(text)
                return
        say(f"buffer-rl: notice: logger {self.name}: {text}", file=sys.stderr)
