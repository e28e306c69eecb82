"""The weight of the loss that balances experts, which Megatron adds to a gradient by itself.

It is a mean over a micro-batch, and is weighed by the micro-batch's share of the divisor, as the objective's loss is.
Earlier pipeline stages, whose rows lack what the objective reads, are told the share before the passes: it is that of
log-probabilities of 0, so that the weights of a loss must not depend on them there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from buffer_rl.contracts import Objective
from buffer_rl.errors import TrainError
from buffer_rl.token_loss import Sums
from buffer_rl_megatron.forward import Micro


class Balance:
    """The weights in the passes of ``micros``. Collective: all pipeline stages make it together."""

    def __init__(self, micros: Sequence[Micro], objective: Objective) -> None:
        self._divisors: dict[int, float] = {}
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        device = micros[0].batch.response_bt.device
        divisors = torch.zeros(len(micros), dtype=torch.float64, device=device)
        if parallel_state.is_pipeline_last_stage():
            for place, micro in enumerate(micros):
                if micro.indices:
                    divisors[place] = _divisor_of(micro, objective)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(divisors, last, group=parallel_state.get_pipeline_model_parallel_group())
        self._divisors = {micro.number: each for micro, each in zip(micros, divisors.tolist(), strict=True)}

    def note(self, micro: Micro, sums: Sums) -> None:
        """Take the divisor that the objective gave for the outputs. Raises TrainError if the stages have another."""
        divisor = float(sums.divisor)
        if not math.isclose(self._divisors.setdefault(micro.number, divisor), divisor, rel_tol=1e-6, abs_tol=1e-12):
            raise TrainError(
                "the weights of the loss depend on log-probabilities, which earlier pipeline stages do not have",
                where="--moe-router-load-balancing-type and --pipeline-model-parallel-size",
                expected=f"a divisor of {self._divisors[micro.number]:g} for the micro-batch, not {divisor:g}",
                hint="take one pipeline stage, --moe-router-load-balancing-type none, or a loss with other weights",
            )

    def weigh(self, micro: Micro) -> None:
        """Have the backward pass of the micro-batch, which begins, take its weight."""
        # Megatron multiplies its mean over the micro-batch by the tokens without padding; those of all tensor and
        # context ranks, as 0.16.1 sums the counts that it takes for the rank's in place.
        weight = self._divisors[micro.number] / sum(micro.rows.lengths) if micro.indices else 0.0
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([weight], device=micro.batch.response_bt.device))


def _divisor_of(micro: Micro, objective: Objective) -> torch.Tensor:
    none_bt = torch.zeros(micro.batch.response_bt.shape, device=micro.batch.response_bt.device)
    outputs = (None, None, micro.rows, none_bt) if objective.critic else (none_bt, none_bt, micro.rows)
    divisor: torch.Tensor = objective(*outputs)[1].divisor
    return divisor
