"""A step of a run's objective on rows whose log-probabilities are given: a loss without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from buffer_rl.kinds.token_loss import Sums
from buffer_rl.records.groups import TrainBatch
from buffer_rl.train.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a step: its sums; the numbers that are logged; the gradient of its loss, divided by D, by the log-probability,
    the entropy and the critic's value of each response token: per row ``[response_length]`` each."""

    sums: Sums
    means: dict[str, float]
    log_prob_gradients: list[np.ndarray]
    entropy_gradients: list[np.ndarray]
    value_gradients: Sequence[np.ndarray] = ()


def outcome(
    objective: Objective,
    batch: TrainBatch,
    log_probs: Sequence[Sequence[float]],
    entropy: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    *,
    blocks: Iterable[Sequence[int]] | None = None,
    padding: int = 0,
) -> Outcome:
    """A step on ``batch``, whose rows are called in ``blocks`` (all together where None), each padded by ``padding``
    more than its longest response, with NaN.

    log_probs, entropy, values: per row ``[response_length]``; no entropy is 0, no values are no critic.
    Raises ValueError if padding gets a gradient."""
    zeros: list[Any] = [np.zeros(len(row)) for row in log_probs]
    given = [log_probs, zeros if entropy is None else entropy, *([] if values is None else [values])]
    sums: list[Sums] = []
    gradients: list[dict[int, np.ndarray]] = [{} for _ in given]
    for block in [range(len(batch))] if blocks is None else blocks:
        leaves = [padded([column[index] for index in block], padding) for column in given]
        loss, part = objective(leaves[0], leaves[1], batch.select(block), leaves[2] if values is not None else None)
        loss.backward()  # type: ignore[no-untyped-call]
        sums.append(part)
        for leaf, found in zip(leaves, gradients, strict=True):
            rows = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for index, row in zip(block, rows.numpy(), strict=True):
                if row[len(log_probs[index]) :].any():
                    raise ValueError(f"row {batch.row_ids[index]}: padding has a gradient")
                found[index] = row[: len(log_probs[index])]
    step = Sums.of(sums)
    scale = 1 / step.divisor if step.divisor else 0.0
    by_row = [[found[index] * scale for index in range(len(batch))] for found in gradients]
    return Outcome(
        sums=step,
        means=step.means(),
        log_prob_gradients=by_row[0],
        entropy_gradients=by_row[1],
        value_gradients=by_row[2] if values is not None else (),
    )


def padded(rows: Sequence[Sequence[float]], padding: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A leaf ``[num_rows, longest + padding]`` that holds the rows, and NaN beyond them."""
    leaf = torch.full((len(rows), max(map(len, rows), default=0) + padding), torch.nan, dtype=dtype)
    for index, row in enumerate(rows):
        leaf[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.float32))
    return leaf.requires_grad_()
