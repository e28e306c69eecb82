"""The KL coefficient of a run with ``--kl-target``: what is measured, when it changes, and its file in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from buffer_rl.algo.kl_target import MEASURED_KL, adapted_coefficient
from buffer_rl.errors import CheckpointError
from buffer_rl.plan.algorithm import adapted_option
from buffer_rl.train.peers import summed_over_ranks
from buffer_rl.train.steps import StepReport

if TYPE_CHECKING:
    from buffer_rl.args import Args
    from buffer_rl.train.objective import Objective

FILE_NAME = "kl_coef.json"
"""Beside the files of the trainer backend, which knows nothing of the coefficient; rank 0 writes it."""


class KLControl:
    """Adapts the coefficient of ``objective``, which every rank has; does nothing without ``--kl-target``.

    It changes once a rollout, after its optimizer steps: all mini-batches of a rollout are trained with one
    coefficient, whether advantages are computed of the whole rollout, of each mini-batch, or as groups stream.
    """

    def __init__(self, args: Args, objective: Objective) -> None:
        self._args = args
        self._objective = objective

    def adapt(self, report: StepReport) -> None:
        """Adapt the coefficient to the steps in ``report``, which gets the one that they had, and the divergence that
        was measured. Every rank calls it."""
        report.kl_coef = coefficient = self._objective.kl_coef
        if coefficient is None:
            return
        totals = [sums.metrics[MEASURED_KL] for sums in report.sums if MEASURED_KL in sums.metrics]
        kl, tokens = summed_over_ranks([sum(t.value for t in totals), sum(t.weight for t in totals)])
        if tokens:
            # Rounded, as the order of a sum, which ranks and schedules change, is to change nothing.
            report.measured_kl = float(np.float32(kl / tokens))
            self._objective.kl_coef = adapted_coefficient(self._args, coefficient, report.measured_kl)

    def save(self, path: str) -> None:
        """Write the coefficient, where it is adapted, into the folder ``path``."""
        if self._objective.kl_coef is not None:
            saved = {"option": adapted_option(self._args), "kl_coef": self._objective.kl_coef}
            (Path(path) / FILE_NAME).write_text(json.dumps(saved))

    def load(self, path: str) -> None:
        """The inverse of ``save``. The option's value stays where the saved run had a fixed coefficient, and no
        file, or adapted the other one. Raises CheckpointError for a damaged file."""
        file = Path(path) / FILE_NAME
        if self._objective.kl_coef is None or not file.exists():
            return
        try:
            saved = json.loads(file.read_text())
            if saved["option"] == adapted_option(self._args):
                self._objective.kl_coef = float(saved["kl_coef"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"not readable: {error}", where=str(file)) from error
