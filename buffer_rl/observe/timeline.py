"""The timeline of a run: spans of work of all roles, as a trace that Perfetto and Chrome open.

Times are those of the monotonic clock of the driver's machine, which its processes share. Roles on other machines have
clocks of their own: their spans are shifted to the driver's by what the machines' wall clocks say, and are as exact as
these agree (see ``WorkReport``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from buffer_rl.errors import DataError
from buffer_rl.observe.run_folder import set_aside
from buffer_rl.plan.roles import ROLES

TRACE_FILE = "trace.json"
_ORDER = tuple(ROLES)
"""The order in which roles are shown; others come after them."""
SAME_CLOCK_S = 0.05
"""Processes of one machine share the monotonic clock; what they measure differs by how long a look at two clocks takes.
Differences up to this are no shift."""
_NAMED_BY_VERSION = ("publish", "pause", "save", "evaluate")
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSpan:
    """A stretch of work on a rollout. start, end: seconds of ``time.monotonic()``. num_rows: 0 where not counted.

    The ``rollout_id`` of the spans ``publish``, ``pause``, ``save`` and ``evaluate`` is the version of the weights:
    that of the step before, plus one. In an asynchronous run that of a rollout's span is the number of its ticket,
    whose groups several steps may train on.
    """

    name: str
    rollout_id: int
    start: float
    end: float
    num_rows: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def step(self) -> int:
        """The training step that it is part of: the rollout's id; -1 for what comes before the first rollout. Not of a
        ticket of an asynchronous run."""
        return self.rollout_id - (self.name in _NAMED_BY_VERSION)


def clock_origin() -> float:
    """When this machine's monotonic clock was 0, in seconds of the wall clock."""
    return time.time() - time.monotonic()


@dataclass(slots=True, kw_only=True)
class WorkReport:
    """What a role did with one rollout.

    origin: ``clock_origin()`` of the process whose monotonic clock the spans are on.
    """

    spans: list[WorkSpan] = field(default_factory=list)
    num_rows: int = 0
    origin: float = field(default_factory=clock_origin)

    def add(self, span: WorkSpan) -> None:
        """One more span, and its rows."""
        self.spans.append(span)
        self.num_rows += span.num_rows

    @classmethod
    def joined(cls, reports: Iterable[WorkReport]) -> WorkReport:
        """The reports of several processes of one role, which may be on several machines; on the first one's clock."""
        parts = list(reports)
        origin = parts[0].origin if parts else clock_origin()
        spans = [span for part in parts for span in part.spans_on(origin)]
        return cls(spans=spans, num_rows=sum(part.num_rows for part in parts), origin=origin)

    def spans_on(self, origin: float) -> list[WorkSpan]:
        """The spans on the monotonic clock of another machine, as exactly as the two machines' wall clocks agree."""
        shift = self.origin - origin
        if abs(shift) <= SAME_CLOCK_S:
            return self.spans
        return [replace(span, start=span.start + shift, end=span.end + shift) for span in self.spans]


class TraceFile(AbstractContextManager["TraceFile"]):
    """Writes spans in the Trace Event Format: one process row a role, one event a line, times in microseconds since the
    first span. A context manager.

    A clean end writes the closing bracket; without it, after a kill, Perfetto, Chrome and ``read_trace`` still read
    the file. resume_step: go on with the file that is there, up to the checkpoint after that many steps; new spans
    then follow the last one kept without a gap, because the clock may have restarted in between. Where it is None,
    an existing file is kept aside as ``trace.N.json``.
    """

    def __init__(self, run_dir: str | Path, *, resume_step: int | None = None) -> None:
        self._path = Path(run_dir) / TRACE_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open(resume_step)

    def _open(self, resume_step: int | None) -> None:
        self._rows: dict[str, int] = {}
        self._lanes: dict[str, list[int]] = {}  # by role: when each of its lanes is free again
        self._is_empty = True
        self._end = 0
        self._offset: int | None = 0
        if resume_step is None:
            set_aside(self._path)
        earlier, before = read_trace(self._path), resume_step or 0
        temporary = self._path.with_name(f".{TRACE_FILE}.tmp")
        temporary.write_text("[", encoding="utf-8")
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        for role, spans in earlier.items():
            kept = [span for span in spans if span.step < before]
            self.write(role, kept)
            self._end = max([self._end, *(round(span.end * _MICROSECONDS) for span in kept)])
        self._offset = None

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def went_back(self, step: int) -> None:
        """Go on from the checkpoint after ``step`` steps, as for ``resume_step``; -1: from the start."""
        self.__exit__()
        self._open(step)

    def write(self, role: str, spans: Iterable[WorkSpan]) -> None:
        """Add spans of a role, as complete events; spans at the same time get lanes of their own."""
        if role not in self._rows:
            row = self._rows[role] = len(self._rows) + 1
            order = _ORDER.index(role) if role in ROLES else len(ROLES) + row
            self._write({"ph": "M", "name": "process_name", "pid": row, "args": {"name": role}})
            self._write({"ph": "M", "name": "process_sort_index", "pid": row, "args": {"sort_index": order}})
        for span in sorted(spans, key=lambda span: span.start):
            start = round(span.start * _MICROSECONDS)
            if self._offset is None:
                self._offset = self._end - start
            begin, duration = start + self._offset, max(round(span.seconds * _MICROSECONDS), 1)
            facts = {"rollout_id": span.rollout_id} | ({"rows": span.num_rows} if span.num_rows else {})
            place = {"pid": self._rows[role], "tid": self._lane(role, begin, begin + duration)}
            event = {"ph": "X", "name": span.name, "cat": role, "ts": begin, "dur": duration}
            self._write({**event, **place, "args": facts})
        self._file.flush()

    def _lane(self, role: str, start: int, end: int) -> int:
        """A lane (from 1) of the role's row that is free: the format wants no partial overlap within one."""
        lanes = self._lanes.setdefault(role, [])
        # Rounding may let two spans that touch overlap by a microsecond.
        lane = next((number for number, free in enumerate(lanes) if free <= start + 1), len(lanes))
        if lane == len(lanes):
            lanes.append(end)
        lanes[lane] = end
        return lane + 1

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("\n" if self._is_empty else ",\n") + json.dumps(event))
        self._is_empty = False


def read_trace(path: str | Path) -> dict[str, list[WorkSpan]]:
    """The spans by role of a ``trace.json``, or of the one in the run's folder ``path``; ascending in time.

    Empty where there is no such file. A run that is still at work or was killed has no end and perhaps half a last
    line. Raises DataError naming file and line for any other line that is no event.
    """
    file = Path(path)
    file = file / TRACE_FILE if file.is_dir() else file
    spans: dict[str, list[WorkSpan]] = {}
    if not file.is_file():
        return spans
    lines = file.read_bytes().decode(errors="replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            event = json.loads(text)
            if event["ph"] == "X":
                spans.setdefault(str(event["cat"]), []).append(_span_of(event))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # the run was killed while it wrote, or is writing
                break
            expected = "one event of the Trace Event Format"
            raise DataError(f"no trace event: {error}", where=f"{file}:{number}", expected=expected) from error
    return {role: sorted(spans[role], key=lambda span: span.start) for role in in_order(spans)}


def _span_of(event: Mapping[str, Any]) -> WorkSpan:
    start, facts, name = event["ts"] / _MICROSECONDS, event["args"], str(event["name"])
    rollout_id, num_rows = int(facts["rollout_id"]), int(facts.get("rows", 0))
    end = start + event["dur"] / _MICROSECONDS
    return WorkSpan(name=name, rollout_id=rollout_id, start=start, end=end, num_rows=num_rows)


def in_order(roles: Iterable[str]) -> list[str]:
    """Roles as they are shown: as in ``ROLES``, then the others by name."""
    return sorted(roles, key=lambda role: (_ORDER.index(role) if role in ROLES else len(ROLES), role))
