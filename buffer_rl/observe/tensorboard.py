"""The ``tensorboard`` logger: metrics as scalars in TensorBoard's event files.

Uses the writer that ships with the tensorboard package, which imports in a quarter of a second; the one in
torch would load torch into the driver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from buffer_rl.args import Args
from buffer_rl.observe.run_folder import set_aside


class TensorBoardLogger:
    """Writes to ``RUN_DIR/tensorboard``; an earlier run's folder is set aside unless ``args.load`` resumes it."""

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

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(float(value))
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
