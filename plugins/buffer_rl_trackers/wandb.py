"""The ``wandb`` logger: Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from buffer_rl_trackers.logger import TrackerLogger
from buffer_rl_trackers.tracker import Start


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
