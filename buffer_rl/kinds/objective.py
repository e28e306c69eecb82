"""What advantage estimators, losses and corrections receive and return, and the objective that trainers call."""

from __future__ import annotations

from typing import Any, Protocol

from buffer_rl.kinds.kind import PluginKind
from buffer_rl.kinds.marks import Unit
from buffer_rl.kinds.token_loss import LossInputs, Sums, TokenLoss
from buffer_rl.records.groups import TrainBatch


class AdvantageEstimator(Protocol):
    """Sets ``batch.columns["advantages"]`` and ``["returns"]``: per row ``[response_length]`` float32. Other columns
    that it adds, of the same shape, are there for the loss.

    ``buffer_rl.kinds.marks.scoped`` says which rows it reads, and which columns. batch: rows of whole prompts for scope
    ``group``; any rows, perhaps some of a prompt, for scope ``row``; all rows of the rollout where nothing is declared.
    One with a scope of ``row`` or ``group`` gets ``ref_log_probs``, ``teacher_log_probs`` and ``old_log_probs`` only if
    it declares that it needs them.
    """

    def __call__(self, args: Any, batch: TrainBatch) -> None: ...


class PolicyLoss(Protocol):
    """Computes a number for each response token, or each row, of one micro-batch.
    ``buffer_rl.kinds.marks.loss_unit`` says what it must see together, and which columns it reads beside the usual
    ones."""

    def __call__(self, args: Any, inputs: LossInputs) -> TokenLoss: ...


class Correction(Protocol):
    """Computes the weights ``[num_rows, max_response]`` that the values of a policy loss are multiplied by, for the
    difference between the engine's log-probabilities and the trainer's. They are taken without a gradient. It declares
    what it must see together, and which columns it reads, as a loss does."""

    def __call__(self, args: Any, inputs: LossInputs) -> Any: ...


class Objective(Protocol):
    """The loss of a trained role, which the framework owns and every trainer backend calls. temperature: the divisor of
    logits. unit: rows that one call must see together (``buffer_rl.kinds.marks.Unit``). critic: the model has a value
    head, and calls have ``values`` in place of ``log_probs`` and ``entropy``."""

    temperature: float
    unit: Unit
    critic: bool

    def __call__(self, log_probs: Any, entropy: Any, rows: TrainBatch, values: Any = None) -> tuple[Any, Sums]:
        """The loss of a micro-batch, summed and not divided, to call ``backward`` on, and its sums.

        log_probs, entropy: ``[num_rows, width]`` float32 in nats, of the response tokens of ``rows``, with any padding
        on the right. values: the same of a critic. A loss of the backend's own (such as one that balances experts) is
        multiplied by ``sums.divisor`` and added."""


KINDS = (
    PluginKind(
        name="advantage",
        flags=("--advantage-estimator", "--custom-advantage-function-path"),
        protocol=AdvantageEstimator,
        signature="(args, batch) -> None",
    ),
    PluginKind(
        name="loss",
        flags=("--loss-type", "--custom-loss-function-path"),
        protocol=PolicyLoss,
        signature="(args, inputs) -> TokenLoss",
    ),
    PluginKind(
        name="correction",
        flags=("--custom-tis-function-path",),
        protocol=Correction,
        signature="(args, inputs) -> weights [num_rows, max_response]",
    ),
)
