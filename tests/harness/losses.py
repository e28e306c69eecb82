"""A run's objective on rows whose log-probabilities are given: losses without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from buffer_rl.buffer.columns import RowSizes, sample_sizes
from buffer_rl.config import Options, compose
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.plugins import PluginRegistry
from buffer_rl.token_loss import Sums
from buffer_rl.train.objective import Objective
from buffer_rl.types import Column, GroupUid, RowId, TrainBatch, concat_columns

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def loss_args(**changes: Any) -> Options:
    """The options' defaults with changes. ``custom_loss_function_path`` may be a function."""
    return compose(CORE_SECTIONS)().model_copy(update=changes)


def objective_of(**changes: Any) -> Objective:
    """The objective of a run with these options."""
    return Objective(loss_args(**changes), PluginRegistry.from_flags(()))


def built_in_losses() -> list[str]:
    """The names of all losses that buffer_rl registers."""
    infos = PluginRegistry.from_flags(()).infos("loss")
    return sorted(info.name for info in infos if info.distribution == "buffer-rl")


def batch_of(row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> TrainBatch:
    """Rows with these columns. Columns of tokens and lengths are made from the loss mask where they are absent."""
    lengths = np.asarray([len(row) for row in columns["loss_mask"]], dtype=np.int32)
    given = {"tokens": [np.zeros(n + 2, dtype=np.int32) for n in lengths], "response_length": lengths, **columns}
    return TrainBatch(
        rollout_id=0, task="train_0", row_ids=list(row_ids), columns=given, total_samples=0, total_tokens=0
    )


def rows_of(**columns: Any) -> TrainBatch:
    """One prompt's samples of one part each: lists of numbers become rows of float32, or one number a row."""
    arrays: dict[str, Column] = {
        name: [np.asarray(row, dtype=np.float32) for row in rows]
        if isinstance(rows[0], list)
        else np.asarray(rows, dtype=np.float32)
        for name, rows in columns.items()
    }
    return batch_of([RowId(GroupUid("data", 0, 0), index) for index in range(len(arrays["loss_mask"]))], arrays)


def with_sizes(batch: TrainBatch) -> TrainBatch:
    """The columns of samples' sizes as the Buffer writes them, group by group. Rows of a group must be adjacent."""
    blocks = []
    for uid in dict.fromkeys(row.uid for row in batch.row_ids):
        rows = [row for row in batch.row_ids if row.uid == uid]
        masks = [mask for row, mask in zip(batch.row_ids, batch.columns["loss_mask"], strict=True) if row.uid == uid]
        blocks.append(sample_sizes(rows, RowSizes.of({"loss_mask": masks}, len(rows))))
    batch.columns |= concat_columns(blocks)
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a step: its sums; the numbers that are logged; the gradient of its loss, divided by D, by each response token's
    log-probability and entropy: per row ``[response_length]`` each."""

    sums: Sums
    means: dict[str, float]
    log_prob_gradients: list[np.ndarray]
    entropy_gradients: list[np.ndarray]


def outcome(
    objective: Objective,
    batch: TrainBatch,
    log_probs: Sequence[Sequence[float]],
    entropy: Sequence[Sequence[float]] | None = None,
    *,
    blocks: Iterable[Sequence[int]] | None = None,
    padding: int = 0,
) -> Outcome:
    """A step on ``batch``, whose rows are called in ``blocks`` (all together where None), each padded by ``padding``
    more than its longest response, with NaN.

    log_probs, entropy: per row ``[response_length]``; entropy 0 where absent."""
    entropy = [np.zeros(len(row)) for row in log_probs] if entropy is None else entropy
    sums: list[Sums] = []
    gradients: list[dict[int, np.ndarray]] = [{}, {}]
    for block in [range(len(batch))] if blocks is None else blocks:
        width = max((len(log_probs[index]) for index in block), default=0) + padding
        leaves = [_padded([given[index] for index in block], width) for given in (log_probs, entropy)]
        loss, part = objective(leaves[0], leaves[1], batch.select(block))
        loss.backward()  # type: ignore[no-untyped-call]
        sums.append(part)
        for leaf, found in zip(leaves, gradients, strict=True):
            rows = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for index, row in zip(block, rows.numpy(), strict=True):
                assert not row[len(log_probs[index]) :].any(), "padding has a gradient"
                found[index] = row[: len(log_probs[index])]
    step = Sums.of(sums)
    scale = 1 / step.divisor if step.divisor else 0.0
    by_row = [[found[index] * scale for index in range(len(batch))] for found in gradients]
    return Outcome(sums=step, means=step.means(), log_prob_gradients=by_row[0], entropy_gradients=by_row[1])


def _padded(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    values = torch.full((len(rows), width), torch.nan)
    for index, row in enumerate(rows):
        values[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.float32))
    return values.requires_grad_()
