"""The loggers ``wandb`` (Weights & Biases), ``trackio`` (on this machine or in a Hugging Face Space) and ``mlflow`` (a
server, or a store in the run's folder)."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from buffer_rl.options.redaction import mask_url
from buffer_rl_trackers.logger import Start, TrackerLogger


class Wandb:
    """A run of Weights & Biases. Metrics are drawn over their own ``step``, as wandb's counter cannot go back."""

    def __init__(self, start: Start) -> None:
        import wandb

        options = start.options
        if options["wandb_host"]:
            os.environ["WANDB_BASE_URL"] = options["wandb_host"]
        run_id = options["wandb_run_id"] or start.run_id or None
        self._run = wandb.init(
            project=options["wandb_project"] or os.environ.get("WANDB_PROJECT") or "buffer-rl",
            entity=options["wandb_team"],
            group=options["wandb_group"],
            mode=options["wandb_mode"],
            dir=options["wandb_dir"] or os.environ.get("WANDB_DIR") or start.run_dir,
            name=os.environ.get("WANDB_NAME") or start.name,
            id=run_id,
            resume="allow" if run_id else None,
            config=dict(start.config),
        )
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)
        self.place = str(self._run.url or f"offline; 'wandb sync {Path(self._run.dir).parent}' uploads it")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a row."""
        self._run.log({**metrics, "step": step})

    def close(self, failed: bool) -> None:
        """Upload what is left, and end wandb's own process."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()


class WandbLogger(TrackerLogger):
    """``--logger wandb``, or ``--use-wandb``."""

    name = "wandb"
    tracker = Wandb


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
        new = {name: str(value) for name, value in start.config.items() if name not in run.data.params}
        params = [Param(name, text[:LONGEST_PARAM]) for name, text in new.items()]
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
