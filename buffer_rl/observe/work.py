"""What the processes of a role answer when they have worked on a rollout."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from buffer_rl.observe.timeline import WorkSpan

SAME_CLOCK_S = 0.05
"""Processes of one machine share the monotonic clock; what they measure differs by how long a look at two clocks takes.
Differences up to this are no shift."""


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
