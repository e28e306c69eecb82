"""Metrics: a JSONL file that is always written, and a hub that also passes them to every logger, such as
``tensorboard``.

A metric's name is ``part/name`` (``rollout/raw_reward``, ``train/loss``, ``perf/step_time``, ``eval/dev``); its
part becomes the ``kind`` of its line. ``step`` is the rollout id; an evaluation is logged at the number of
training steps done before it, so step ``r`` always speaks of weight version ``r``.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from buffer_rl.args import Args
from buffer_rl.kinds.rollout import MetricLogger
from buffer_rl.observe.run_folder import JsonlWriter, read_jsonl, set_aside

METRICS_FILE = "metrics.jsonl"
DROP_PREFIX = "rollout/drop_"
PARTS_OF_ROLLOUTS = ("rollout", "production")
"""What metrics of rollouts are named by: at a staleness of 0 the first alone, else the second for what tickets did."""
# The trainer's passes for log-probabilities are inside the phase ``train``; the rollout worker's own times
# (generate, reward) overlap each other and are no phases.
_INSIDE_TRAIN = ("ref_log_probs", "teacher_log_probs", "old_log_probs", "values")
PHASES = ("rollout", *_INSIDE_TRAIN, "train", "save", "publish")
"""The phases of a step, in their order."""
_NUMBER_AT_END = re.compile(r"^(.+?)[_ :=]-?\d+(\.\d+)?(e[+-]?\d+)?$", re.DOTALL)
_log = logging.getLogger(__name__)


class MetricsFile(JsonlWriter):
    """Writes ``metrics.jsonl`` in a run's folder: ``{"step": 3, "kind": "train", "train/loss": 0.12, ...}``.

    resume_step: append to the file that is there, which then ends with the checkpoint after that many steps: what
    an earlier run did beyond it is done again. Where it is None, an existing file is kept aside as
    ``metrics.N.jsonl``.
    """

    def __init__(self, run_dir: str | Path, *, resume_step: int | None = None) -> None:
        super().__init__(Path(run_dir) / METRICS_FILE, "step", resume_step)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line for each kind of metric in ``metrics``; a number that is not finite becomes null."""
        by_kind: dict[str, dict[str, float | None]] = {}
        for name, value in metrics.items():
            number = float(value)
            if not math.isfinite(number):
                _log.warning("metric %s is %s at step %d; written as null", name, number, step)
            kind = name.split("/", 1)[0] if "/" in name else "other"
            by_kind.setdefault(kind, {})[name] = number if math.isfinite(number) else None
        for kind, values in by_kind.items():
            self.append({"step": int(step), "kind": kind, **values})


class MetricHub:
    """Writes flat metrics to the JSONL file and passes them to every logger.

    loggers: by the name in ``--logger``. A logger that raises is logged, closed and dropped, and the run goes on:
    observation must not end training. The file is not a logger: an error there is raised.
    """

    def __init__(
        self, run_dir: str | Path, loggers: Mapping[str, MetricLogger] | None = None, *, resume_step: int | None = None
    ) -> None:
        self._file = MetricsFile(run_dir, resume_step=resume_step)
        self._loggers = dict(loggers or {})

    def went_back(self, step: int) -> None:
        """The run goes on after ``step`` steps (-1: before everything): the file's later lines are removed. Loggers get
        them a second time."""
        self._file.went_back(step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write ``metrics`` of ``step`` everywhere. Raises ``OSError`` if the JSONL file cannot be written."""
        self._file.write(metrics, step)
        for name, logger in list(self._loggers.items()):
            try:
                logger.log(metrics, step)
            except Exception as error:  # fault boundary: a logger is a plugin
                failed = f"{type(error).__name__}: {error}"
                _log.warning("logger %r failed at step %d and is dropped: %s", name, step, failed)
                del self._loggers[name]
                _close_quietly(name, logger)

    def close(self) -> None:
        """Close the file and every logger; a logger that fails to close is named."""
        for name, logger in self._loggers.items():
            _close_quietly(name, logger)
        self._loggers.clear()
        self._file.close()


def _close_quietly(name: str, logger: MetricLogger) -> None:
    try:
        logger.close()
    except Exception as error:  # fault boundary, as in MetricHub.log
        _log.warning("logger %r failed to close: %s: %s", name, type(error).__name__, error)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, or of the one in the run's folder ``path``, in the order written.

    Raises DataError naming file and line if the file is missing or a line is not a JSON object.
    """
    file = Path(path)
    return read_jsonl(file / METRICS_FILE if file.is_dir() else file)


def steps_of(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """The metrics of each training step, ascending; evaluations are left out, and so are null values.

    Where a step occurs twice (after a resume) the later line counts.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        if record.get("kind") != "eval":
            numbers = {name: value for name, value in record.items() if "/" in name and value is not None}
            steps.setdefault(int(record["step"]), {}).update(numbers)
    return dict(sorted(steps.items()))


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of one step; together they are the step. ``other`` is what no phase was measured for."""
    times = {name: float(metrics.get(f"perf/{name}_time", 0.0)) for name in PHASES}
    times["train"] = max(0.0, times["train"] - sum(times[name] for name in _INSIDE_TRAIN))
    times["other"] = max(0.0, float(metrics.get("perf/step_time", 0.0)) - sum(times.values()))
    return times


def drop_metrics(drops: Mapping[str, int], prefix: str = DROP_PREFIX) -> dict[str, float]:
    """Dropped groups by reason, as ``rollout/drop_REASON``. A number that a reason ends with (``zero_std_0.5`` of
    slime's filters) is no part of the name, which would make a metric of each value."""
    found: dict[str, float] = {}
    for reason, count in sorted(drops.items()):
        name = prefix + _NUMBER_AT_END.sub(r"\1", reason)
        found[name] = found.get(name, 0.0) + count
    return found


def drops_of(metrics: Mapping[str, float]) -> dict[str, int]:
    """Dropped groups by reason, from ``rollout/drop_REASON`` and ``production/drop_REASON``; reasons with no group are
    left out."""
    found: dict[str, int] = {}
    for name, value in metrics.items():
        part, _, rest = name.partition("/drop_")
        if rest and value and part in PARTS_OF_ROLLOUTS:
            found[rest] = found.get(rest, 0) + int(value)
    return found


def reward_with_dropped(metrics: Mapping[str, float]) -> float | None:
    """The mean reward of kept and filtered groups together; None if no filter made it another one than that of the
    kept ones."""
    for part in PARTS_OF_ROLLOUTS:
        everything = metrics.get(f"{part}/raw_reward_all")
        if everything is not None and everything != metrics.get(f"{part}/raw_reward"):
            return float(everything)
    return None


def eval_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Mean reward of each evaluation set, from ``eval/NAME``; finer metrics (``eval/NAME/...``) are left out."""
    scores = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
    return {name: float(value) for name, value in scores.items() if "/" not in name and value is not None}


class TensorBoardLogger:
    """Writes scalars to ``RUN_DIR/tensorboard``; an earlier run's folder is set aside unless ``args.load`` resumes it.

    Uses the writer of the tensorboard package, which imports in a quarter of a second; torch's would load torch into
    the driver.
    """

    def __init__(self, args: Args, run_dir: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = Path(run_dir) / "tensorboard"
        if getattr(args, "load", None) is None:
            set_aside(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self.folder), flush_secs=10)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the finite numbers of ``metrics``; TensorBoard draws nothing for the others."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
