"""Gradients of rows whose step is not known yet: summed without its totals, divided by them when it is complete.

A loss divides by the step's samples or by its unmasked tokens (``buffer_rl.algo.aggregation``), and neither is known
while the rollout still runs. So the loss is asked twice for each micro-batch, once as if the step had one sample
and endlessly many tokens, and once the other way round: each answer holds what is divided by that total alone.
Gradients are accumulated for the total that ``--loss-agg-mode`` divides by; the other answer must then be 0, and so
must its gradient: advantages that cancel make a value of 0 with a gradient that would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from buffer_rl.contracts import LossInputs, LossOutputs
from buffer_rl.errors import ConfigError, TrainError


def _matters(loss: torch.Tensor, inputs: LossInputs) -> bool:
    """Whether a loss, or its gradient by what the model computed, is a number other than 0. What is not finite does
    not count: it shows in the gradient that is kept."""
    found = [loss.detach()]
    computed = [t for t in (inputs.log_probs, inputs.entropy) if isinstance(t, torch.Tensor) and t.requires_grad]
    if computed and loss.requires_grad:
        found += torch.autograd.grad(loss, computed, retain_graph=True, allow_unused=True)
    return any(bool((torch.isfinite(t) & (t != 0)).any()) for t in found if t is not None)


class UnscaledShares:
    """Sums of one step's losses and metrics, kept apart by the total that they are divided by.

    where: the flag that asks for it, for messages.
    """

    def __init__(self, agg_mode: str, where: str = "--stream-gradients") -> None:
        self._where = where
        self._by_tokens = agg_mode == "token-mean"
        self._sums: dict[str, list[torch.Tensor]] = {}

    def loss_of(self, loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs) -> torch.Tensor:
        """The loss of a micro-batch to call ``backward`` on, not divided by any total.

        Raises ConfigError if the loss divides by both totals: its gradient cannot be scaled afterwards."""
        by_samples = loss(replace(inputs, total_samples=1, total_tokens=math.inf))
        by_tokens = loss(replace(inputs, total_samples=math.inf, total_tokens=1))
        kept, other = (by_tokens, by_samples) if self._by_tokens else (by_samples, by_tokens)
        if _matters(other.loss, inputs):
            raise ConfigError(
                f"the loss divides by the {'samples' if self._by_tokens else 'tokens'} of the step as well",
                where=self._where,
                expected=f"division by its {'tokens' if self._by_tokens else 'samples'} alone, as --loss-agg-mode says",
                hint="aggregate every term with buffer_rl.algo.aggregation.aggregate and args.loss_agg_mode, or take "
                "@scoped('group') from the loss",
            )
        self._add(by_samples, by_tokens)
        return cast(torch.Tensor, kept.loss)

    def divisor(self, total_samples: int, total_tokens: int) -> float:
        """What the accumulated gradients are to be divided by."""
        return float(max(total_tokens if self._by_tokens else total_samples, 1))

    def take_metrics(self, total_samples: int, total_tokens: int) -> dict[str, float]:
        """The metrics' shares of a step with these totals; the sums start anew."""
        metrics = {
            name: float(samples / max(total_samples, 1) + tokens / max(total_tokens, 1))
            for name, (samples, tokens) in self._sums.items()
        }
        self._sums.clear()
        return metrics

    def clear(self) -> None:
        """Forget the sums of a step that is not taken."""
        self._sums.clear()

    def _add(self, by_samples: LossOutputs, by_tokens: LossOutputs) -> None:
        if set(by_samples.metrics) != set(by_tokens.metrics):
            raise TrainError("the loss returned other metrics for other totals", where=self._where)
        for name in by_samples.metrics:
            pair = [torch.as_tensor(outputs.metrics[name]).detach().double() for outputs in (by_samples, by_tokens)]
            known = self._sums.get(name)
            self._sums[name] = pair if known is None else [old + new for old, new in zip(known, pair, strict=True)]
