"""The ``mlflow`` logger: MLflow, with a server or a store of its own in the run's folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from buffer_rl.options.redaction import mask_url
from buffer_rl_trackers.logger import TrackerLogger
from buffer_rl_trackers.tracker import Start

MOST_PARAMS, MOST_METRICS, LONGEST_PARAM = 100, 1000, 500
"""What MLflow takes in one call, and the characters of a value that every version of it takes."""
_REFUSED = re.compile(r"[^\w\-. :/]")


class Mlflow:
    """A run of MLflow. Options become its parameters, which never change: those that a resumed run has already stay."""

    def __init__(self, start: Start) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        store = f"sqlite:///{Path(start.run_dir) / 'mlflow.db'}"
        uri = start.options["mlflow_tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI") or store
        self._client = MlflowClient(uri)
        if start.run_id:
            run = self._client.get_run(start.run_id)
            self._client.update_run(start.run_id, status="RUNNING")
        else:
            run = self._client.create_run(self._experiment(start), run_name=start.name)
        self.run_id = str(run.info.run_id)
        self.place = f"run {self.run_id} in {mask_url(uri)}"
        params = [
            Param(name, str(value)[:LONGEST_PARAM])
            for name, value in start.config.items()
            if name not in run.data.params
        ]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + MOST_PARAMS])

    def _experiment(self, start: Start) -> str:
        name = start.options["mlflow_experiment"]
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of a step. MLflow refuses some characters in names; they become underscores."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(_REFUSED.sub("_", name), value, now_ms, step) for name, value in metrics.items()]
        for first in range(0, len(rows), MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=rows[first : first + MOST_METRICS])

    def close(self, failed: bool) -> None:
        """Mark the run as ended; each metric was written when it was logged."""
        self._client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")


class MlflowLogger(TrackerLogger):
    """``--logger mlflow``."""

    name = "mlflow"
    tracker = Mlflow
