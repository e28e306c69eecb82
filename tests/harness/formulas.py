"""Losses as functions of float64 tensors: their inputs, numbers and gradients without the framework around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from buffer_rl.kinds.token_loss import LossInputs, TokenLoss
from buffer_rl.records.groups import GroupUid, RowId
from harness.losses import loss_args

Loss = Callable[[Any, LossInputs], TokenLoss]


def inputs_of(log_probs: torch.Tensor, *, prompts: list[int] | None = None, **columns: Any) -> LossInputs:
    """Rows of one prompt, or of these prompts; all tokens count unless ``loss_mask`` is among the columns."""
    tensors = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return LossInputs(
        log_probs=log_probs,
        entropy=torch.zeros_like(log_probs),
        loss_mask=tensors.pop("loss_mask", torch.ones_like(log_probs)).detach(),
        row_ids=[RowId(GroupUid("data", p, 0), index) for index, p in enumerate(prompts or [0] * len(log_probs))],
        column=tensors.get,
    )


def at_ratios(ratios: Any, **columns: Any) -> LossInputs:
    """Rows with these ratios to the old policy: old log-probabilities of -3."""
    log_probs = (torch.as_tensor(ratios, dtype=torch.float64).log() - 3).requires_grad_()
    return inputs_of(log_probs, old_log_probs=torch.full_like(log_probs, -3).detach(), **columns)


def slope(loss: Loss, inputs: LossInputs, **options: Any) -> torch.Tensor:
    """The gradient of the sum of the loss's values by each log-probability."""
    values = loss(loss_args(**options), inputs).values
    found: torch.Tensor = torch.autograd.grad(values.sum(), inputs.log_probs)[0]
    return found


def check_gradient(loss: Loss, **options: Any) -> None:
    """The gradient equals finite differences, on random rows of both signs of advantage, one token masked. For a loss
    without stop-gradients. Raises torch's GradcheckError."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_probs = (0.3 * normal(4, 5) - 2).requires_grad_()
    fixed = {name: 0.3 * normal(4, 5) - 2 for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")}
    mask = torch.ones(4, 5, dtype=torch.float64)
    mask[1, 3:] = 0
    columns = {**fixed, "advantages": normal(4, 1).expand(4, 5), "reward": normal(4), "loss_mask": mask}
    args = loss_args(**options)

    def values(given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss(args, inputs_of(given * mask, prompts=[0, 0, 1, 1], **columns)).values
        return found

    assert torch.autograd.gradcheck(values, log_probs)
