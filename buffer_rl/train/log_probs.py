"""Log-probabilities of a batch under one model, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from buffer_rl.algo.batching import micro_batches
from buffer_rl.train.collate import collate, split_rows
from buffer_rl.train.forward import response_log_probs
from buffer_rl.types import TrainBatch


def batch_log_probs(
    args: Any, model: PreTrainedModel, batch: TrainBatch, device: torch.device, temperature: float
) -> list[np.ndarray]:
    """Per row ``[response_length]`` float32, in nats. Reads ``max_tokens_per_gpu`` and ``deterministic``."""
    rows: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(batch)
    for indices in row_blocks(args, batch):
        micro = collate(batch.select(indices), device)
        with torch.no_grad():
            log_probs_bt, _ = response_log_probs(model, micro, temperature, with_entropy=False)
        for index, row in zip(indices, split_rows(log_probs_bt, micro.response_lengths), strict=True):
            rows[index] = row
    return rows


def row_blocks(args: Any, batch: TrainBatch) -> list[list[int]]:
    """Row indices of each micro-batch of ``batch``.

    Under ``--deterministic`` no micro-batch holds rows of two prompts: a row's values then do not depend on which
    groups were ready together, and a schedule that computes them early gets the same bits as one that waits.
    """
    if not args.deterministic:
        return micro_batches(batch.lengths, args.max_tokens_per_gpu)
    lengths = batch.lengths
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(batch.row_ids):
        groups.setdefault(row.uid, []).append(index)
    return [
        [indices[position] for position in block]
        for indices in groups.values()
        for block in micro_batches([lengths[index] for index in indices], args.max_tokens_per_gpu)
    ]
