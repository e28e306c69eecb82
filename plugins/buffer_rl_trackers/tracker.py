"""What a tracker is for the process that it lives in, and what it starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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
