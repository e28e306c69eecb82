"""AdamW with the state of the ``FusedAdam`` of Apex and TransformerEngine, which needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import Any
from unittest.mock import patch

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101). A group has one step for all its parameters, an int, once it was stepped."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode
        settings = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **settings})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises KeyError for a state of other tensors than it has."""
        for state in state_dict["state"].values():
            if unknown := set(state) - set(MOMENTS):
                raise KeyError(f"FusedAdam has no {min(unknown)}")
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """A step of the parameters that have gradients."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            corrections = [1 - beta ** index(group["step"]) for beta in group["betas"]]
            if not group["bias_correction"]:
                corrections = [1.0, 1.0]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group, *corrections)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any], first: float, second: float) -> None:
        state, (beta, beta_sq) = self.state[parameter], group["betas"]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        state["exp_avg"].lerp_(gradient, 1 - beta)
        state["exp_avg_sq"].mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / first)


@contextmanager
def as_installed() -> Iterator[None]:
    """Within the block Megatron makes ``FusedAdam``, as where TransformerEngine is installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    made = {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}
    known = {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
    with patch.multiple(optimizer, **made), patch.multiple(distrib_optimizer, **known):
        yield
