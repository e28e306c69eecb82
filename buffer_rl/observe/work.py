"""What the processes of a role answer when they have worked on a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from buffer_rl.observe.timeline import WorkSpan


@dataclass(slots=True, kw_only=True)
class WorkReport:
    """What a role did with one rollout."""

    spans: list[WorkSpan] = field(default_factory=list)
    num_rows: int = 0

    @classmethod
    def joined(cls, reports: Iterable[WorkReport]) -> WorkReport:
        """The reports of several processes of one role."""
        parts = list(reports)
        return cls(spans=[span for part in parts for span in part.spans], num_rows=sum(p.num_rows for p in parts))
