"""The ``trackio`` logger: Trackio, on this machine or in a Hugging Face Space."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from buffer_rl_trackers.logger import TrackerLogger
from buffer_rl_trackers.tracker import Start


class Trackio:
    """A run of Trackio, which finds a run again by its name; so each has a name of its own."""

    def __init__(self, start: Start) -> None:
        import trackio

        project, space = start.options["trackio_project"], start.options["trackio_space_id"]
        self.run_id = start.run_id or f"{start.name}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            project,
            name=self.run_id,
            space_id=space,
            config=dict(start.config),
            resume="allow" if start.run_id else "never",
            embed=False,
        )
        where = f"in the Space {space}" if space else f"'trackio show --project {project}' shows it"
        self.place = f"run {self.run_id}; {where}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        """Write or send what is left."""
        self._run.finish()


class TrackioLogger(TrackerLogger):
    """``--logger trackio``."""

    name = "trackio"
    tracker = Trackio
