"""Rows of a batch as padded tensors: what the model reads and what the loss reads.

Suffix legend: ``_bl`` is ``[num_rows, max_length]`` (whole rows), ``_bt`` is ``[num_rows, max_response]`` (responses),
``_n`` is ``[num_response_tokens]`` (responses one after another, without padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from buffer_rl.contracts import LossInputs
from buffer_rl.errors import DataError
from buffer_rl.types import TrainBatch


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together, padded on the right.

    tokens_bl: int64. response_bt: bool, False on padding.
    predictor_n: int64, for each response token the position in the flattened ``tokens_bl`` of the token before it,
        whose logits predict it. target_n: int64, the response tokens.
    response_lengths: tokens of each row's response.
    """

    tokens_bl: torch.Tensor
    response_bt: torch.Tensor
    predictor_n: torch.Tensor
    target_n: torch.Tensor
    response_lengths: list[int]


def collate(batch: TrainBatch, device: torch.device) -> MicroBatch:
    """The rows of ``batch`` as one micro-batch on ``device``.

    Raises DataError for a row whose response has no token before it, or is longer than the row.
    """
    lengths_b = np.asarray(batch.lengths, dtype=np.int64)
    response_b = np.asarray(batch.columns["response_length"], dtype=np.int64)
    prompt_b = lengths_b - response_b
    wrong = np.flatnonzero((prompt_b < 1) | (response_b < 0))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"{lengths_b[row]} tokens with a response of {response_b[row]}",
            where=str(batch.row_ids[row]),
            expected="at least one prompt token, and a response of 0 tokens or more",
        )
    max_length = int(lengths_b.max(initial=1))
    tokens_bl = np.zeros((len(lengths_b), max_length), dtype=np.int64)
    valid_bl = np.arange(max_length) < lengths_b[:, None]
    tokens_bl[valid_bl] = np.concatenate(batch.columns["tokens"])
    steps_t = np.arange(int(response_b.max(initial=0)))
    response_bt = steps_t < response_b[:, None]
    starts_b = np.arange(len(lengths_b)) * max_length + prompt_b - 1
    predictor_n = (starts_b[:, None] + steps_t)[response_bt]
    target_n = tokens_bl.reshape(-1)[predictor_n + 1]
    return MicroBatch(
        tokens_bl=torch.from_numpy(tokens_bl).to(device),
        response_bt=torch.from_numpy(response_bt).to(device),
        predictor_n=torch.from_numpy(predictor_n).to(device),
        target_n=torch.from_numpy(target_n).to(device),
        response_lengths=response_b.tolist(),
    )


def loss_inputs(
    batch: TrainBatch, micro: MicroBatch, log_probs_bt: torch.Tensor, entropy_bt: torch.Tensor
) -> LossInputs:
    """What the loss sees of the rows of ``batch``; columns that the batch does not have are None.

    Raises DataError if a column's rows are not as long as the responses, or a sample has several parts and the batch
    no column ``sample_total_tokens``.
    """
    padded_bt = _padded(batch, micro, "loss_mask")
    mask_bt = micro.response_bt.float() if padded_bt is None else padded_bt
    return LossInputs(
        log_probs=log_probs_bt,
        old_log_probs=_padded(batch, micro, "old_log_probs"),
        rollout_log_probs=_padded(batch, micro, "rollout_log_probs"),
        ref_log_probs=_padded(batch, micro, "ref_log_probs"),
        advantages=_padded(batch, micro, "advantages"),
        loss_mask=mask_bt,
        entropy=entropy_bt,
        total_samples=batch.total_samples,
        total_tokens=batch.total_tokens,
        sample_total_tokens=_sample_total_tokens(batch, mask_bt),
    )


def split_rows(values_bt: torch.Tensor, response_lengths: Sequence[int]) -> list[np.ndarray]:
    """The inverse of padding: per row ``[response_length]`` float32 on the CPU."""
    array_bt = values_bt.detach().float().cpu().numpy()
    return [row[:length].copy() for row, length in zip(array_bt, response_lengths, strict=True)]


def _sample_total_tokens(batch: TrainBatch, mask_bt: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` float32. Without the column, which the Buffer writes, each row is taken for a whole sample."""
    if "sample_total_tokens" in batch.columns:
        totals_b = np.array(batch.columns["sample_total_tokens"], dtype=np.float32)
        return torch.from_numpy(totals_b).to(mask_bt.device)
    if parts := [row for row in batch.row_ids if row.part]:
        raise DataError(
            "a part of a sample cannot be weighed: its other parts may be elsewhere",
            where=str(parts[0]),
            expected="a column sample_total_tokens: unmasked response tokens of the row's sample over all its parts",
        )
    return mask_bt.sum(-1)


def _padded(batch: TrainBatch, micro: MicroBatch, name: str) -> torch.Tensor | None:
    if name not in batch.columns:
        return None
    rows = batch.columns[name]
    for row_id, row, length in zip(batch.row_ids, rows, micro.response_lengths, strict=True):
        if len(row) != length:
            raise DataError(
                f"{name} has {len(row)} values for a response of {length} tokens",
                where=str(row_id),
                expected="one value for each response token",
            )
    values_bt = np.zeros(tuple(micro.response_bt.shape), dtype=np.float32)
    if len(rows):
        values_bt[micro.response_bt.cpu().numpy()] = np.concatenate(list(rows))
    return torch.from_numpy(values_bt).to(micro.response_bt.device)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices in micro-batches whose padded cost, rows x longest row, is at most ``max_tokens``.

    lengths: tokens a row, ``[num_rows]``. Rows are taken from the longest to the shortest (ties by index), so that
    rows of one micro-batch have similar lengths and little is padding, and a batch that does not fit into memory
    fails at once. A row that is longer than the budget gets a micro-batch of its own: splitting it would change its
    log-probabilities, and leaving it out would change the loss. Equal input gives equal output.

    Raises ValueError if ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = int(lengths[row])
    return batches


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
