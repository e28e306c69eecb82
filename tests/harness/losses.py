"""A run's objective on rows whose log-probabilities are given: losses without a model. A step of a tiny model: as one
rank, as two ranks, and group by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.pool import DataPool
from buffer_rl.buffer.readers import ALL_ROWS, Share
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.options.section import Options, compose
from buffer_rl.plan.roles import ACTOR
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Column, GroupUid, RowId, TrainBatch
from buffer_rl.testing.lint import batch_of as batch_of
from buffer_rl.testing.lint import with_sizes as with_sizes
from buffer_rl.testing.lint_loss import Outcome as Outcome
from buffer_rl.testing.lint_loss import outcome as outcome
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.torch_trainer import TorchTrainer

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def loss_args(**changes: Any) -> Options:
    """The options' defaults with changes. ``custom_loss_function_path`` may be a function."""
    return compose(CORE_SECTIONS)().model_copy(update=changes)


def objective_of(role: str = ACTOR, **changes: Any) -> Objective:
    """The objective of a trained role in a run with these options."""
    return Objective(loss_args(**changes), PluginRegistry.from_flags(()), role)


def built_in_losses() -> list[str]:
    """The names of all losses that buffer_rl registers."""
    infos = PluginRegistry.from_flags(()).infos("loss")
    return sorted(info.name for info in infos if info.distribution == "buffer-rl")


def rows_of(**columns: Any) -> TrainBatch:
    """One prompt's samples of one part each: lists of numbers become rows of float32, or one number a row."""
    arrays: dict[str, Column] = {
        name: [np.asarray(row, dtype=np.float32) for row in rows]
        if isinstance(rows[0], list)
        else np.asarray(rows, dtype=np.float32)
        for name, rows in columns.items()
    }
    return batch_of([RowId(GroupUid("data", 0, 0), index) for index in range(len(arrays["loss_mask"]))], arrays)


PARTS = ({0: 5, 1: 1, 2: 2}, {0: 1, 3: 1})
"""Of each sample of the two groups of ``two_groups``."""
MASKED_ENTIRELY = 2


def two_groups(**more: Any) -> DataPool:
    """Two groups of a step; a sample of five parts, and one of two parts that is masked entirely.

    more: further columns, by functions of a generator and the response lengths."""
    rng = np.random.default_rng(3)
    store = ColumnStore()
    pool = DataPool(0, "train_0", store, num_groups=2)
    for number, samples in enumerate(PARTS):
        uid = GroupUid("data", number, 0)
        rows = [RowId(uid, index, part) for index, parts in samples.items() for part in range(parts)]
        lengths = rng.integers(1, 9, len(rows))
        columns: dict[str, Any] = {
            "tokens": [rng.integers(3, 30, 4 + n).astype(np.int32) for n in lengths],
            "response_length": lengths.astype(np.int32),
            "loss_mask": [
                ((rng.random(n) > 0.3) * (row.sample_index != MASKED_ENTIRELY)).astype(np.float32)
                for row, n in zip(rows, lengths, strict=True)
            ],
            "old_log_probs": [-rng.random(n).astype(np.float32) * 4 for n in lengths],
            "advantages": [np.full(n, rng.normal(), dtype=np.float32) for n in lengths],
            "sample_total_tokens": np.full(len(rows), 1e9, dtype=np.float32),  # written again by the Buffer
        }
        store.put(uid, rows, columns | {name: make(rng, lengths) for name, make in more.items()})
        pool.join(uid)
    pool.select([GroupUid("data", number, 0) for number in range(len(PARTS))])
    return pool


WAYS = ("one rank", "two ranks", "streamed")


def pieces(pool: DataPool, way: str) -> Iterator[TrainBatch]:
    """The step's rows as one rank, as two ranks, or group by group."""
    if way == "streamed":
        for uid in reversed(pool.selection.uids):
            rows = [row for row in assemble(pool.share(ALL_ROWS)).row_ids if row.uid == uid]
            yield assemble(pool.plan_rows(rows))
        return
    ranks = 2 if way == "two ranks" else 1
    for rank in range(ranks):
        yield assemble(pool.share(Share(rank, ranks)))


def gradient(trainer: TorchTrainer, pool: DataPool, way: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the step, and its gradient by the name of each parameter."""
    trainer.zero_grad()
    sums = Sums.of([trainer.accumulate(piece) for piece in pieces(pool, way)])
    gradients = {name: p.grad / sums.divisor for name, p in trainer._actor.named_parameters() if p.grad is not None}
    return sums.means()["loss"], gradients
