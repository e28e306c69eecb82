"""The loss of a value model.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``; torch float32; values in units of the reward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss

if TYPE_CHECKING:
    from buffer_rl.args import Args


@loss_unit(Unit.TOKEN, needs=("returns", "values"))
def value_loss(args: Args, inputs: LossInputs) -> TokenLoss:
    """Half the squared distance of the values to the returns that the estimator sets.

    With ``--value-clip`` c it is ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``, the form of PPO's
    implementation (Engstrom et al., arXiv 2005.12729, section 3): a value that moved further than c from ``V_old``, the
    column ``values`` from before the first optimizer step, has no gradient unless it moved away from the return.

    Metrics, means over tokens: ``value_clipfrac``, ``values``, ``returns``, and the moments that the step's
    ``explained_variance`` is made of, ``1 - Var(R - V) / Var(R)``. Raises TrainError if one of the columns is
    not there.
    """
    values_bt, returns_bt, old_bt = inputs.values, inputs["returns"], inputs["values"]
    squared_bt = (values_bt - returns_bt).square()
    clipped_bt = torch.zeros_like(squared_bt)
    if args.value_clip is not None:
        near_bt = torch.clamp(values_bt, old_bt - args.value_clip, old_bt + args.value_clip)
        bounded_bt = (near_bt - returns_bt).square()
        clipped_bt = (bounded_bt > squared_bt).float()
        squared_bt = torch.maximum(squared_bt, bounded_bt)
    errors_bt = (returns_bt - values_bt).detach()
    metrics = {
        "value_clipfrac": clipped_bt,
        "values": values_bt.detach(),
        "returns": returns_bt,
        "returns_squared": returns_bt.square(),
        "value_error": errors_bt,
        "value_error_squared": errors_bt.square(),
    }
    return TokenLoss(squared_bt / 2, metrics=metrics)
