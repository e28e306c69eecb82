"""Rewards, returns and statistics of response tokens, and the part of the teacher in on-policy distillation: the
advantages minus the log-ratio to it. Numpy only.

A masked token (of a tool, of a removed sample) is skipped over as if it were absent: neither reward, value nor discount
belongs to it, and its advantage is 0. Suffix ``_u``: ``[num_unmasked]`` of one row, float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from buffer_rl.algo.advantages import rewards_of
from buffer_rl.args import Args
from buffer_rl.errors import DataError
from buffer_rl.plan.algorithm import policy_field
from buffer_rl.records.groups import Column, TrainBatch

EPS = 1e-8
"""Added to the variance, as in slime's and verl's ``masked_whiten``."""


TURN_REWARDS = "turn_rewards"
"""The column of an agent's rewards at the last token of each turn, minus their sum over the sample at the last token:
they say when a sample's reward is earned, and add nothing to it."""


def token_rewards(args: Args, batch: TrainBatch) -> list[np.ndarray]:
    """Per row ``[num_unmasked]`` float64: the sample's reward on its last unmasked token, and on each token
    ``-kl_coef * (log pi - log ref)``, the penalty of REINFORCE++, arXiv 2501.03262 (the k1 estimator). With
    ``--turn-rewards`` the column of this name, ``[response_length]``, is added.

    Raises DataError for a missing column, or a reward that is not finite.
    """
    rewards = rewards_of(batch)
    rows = [np.zeros(int((mask != 0).sum())) for mask in masks_of(batch)]
    if args.kl_coef:
        policy, reference = unmasked(batch, policy_field(args)), unmasked(batch, "ref_log_probs")
        rows = [args.kl_coef * (ref_u - log_u) for log_u, ref_u in zip(policy, reference, strict=True)]
    for row_u, reward in zip(rows, rewards, strict=True):
        if row_u.size:
            row_u[-1] += reward
    if args.turn_rewards:
        rows = [row_u + given_u for row_u, given_u in zip(rows, unmasked(batch, TURN_REWARDS), strict=True)]
    return rows


def masks_of(batch: TrainBatch) -> list[np.ndarray]:
    """The loss mask of each row, ``[response_length]``."""
    return [np.asarray(mask) for mask in batch.columns["loss_mask"]]


def unmasked(batch: TrainBatch, column: str) -> list[np.ndarray]:
    """A column of response tokens without the masked ones: per row ``[num_unmasked]`` float64. Raises DataError."""
    if column not in batch.columns:
        raise DataError(f"the batch has no {column}", where=batch.task, expected=f"a column {column}")
    rows = []
    for row_id, row, mask in zip(batch.row_ids, batch.columns[column], masks_of(batch), strict=True):
        if np.shape(row) != mask.shape:
            what = f"{column} has the shape {np.shape(row)}"
            raise DataError(what, where=str(row_id), expected=f"{mask.shape}, as loss_mask")
        rows.append(np.asarray(row, dtype=np.float64)[mask != 0])
    return rows


def discounted_sums(rows: Sequence[np.ndarray], decay: float) -> list[np.ndarray]:
    """``s_t = x_t + decay * s_(t+1)`` of each row, 0 after its end: per row as long as the row."""
    lengths = [len(row) for row in rows]
    padded_bt = np.zeros((len(rows), max(lengths, default=0)))
    for index, row in enumerate(rows):
        padded_bt[index, : len(row)] = row
    for t in reversed(range(padded_bt.shape[1] - 1)):
        padded_bt[:, t] += decay * padded_bt[:, t + 1]
    return [row[:length].copy() for row, length in zip(padded_bt, lengths, strict=True)]


def whitened(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """All numbers of all rows minus their mean, divided by their standard deviation (divisor: their number minus 1).
    Each number counts once, whichever sample, part or group it belongs to. Equal numbers give exactly 0."""
    flat_n = np.concatenate([*rows, np.zeros(0)]).astype(np.float64)
    if flat_n.size:
        flat_n = flat_n - flat_n[0]  # makes equal numbers exactly 0, which their mean need not be
        flat_n -= flat_n.mean()
        flat_n /= np.sqrt(flat_n.var(ddof=int(flat_n.size > 1)) + EPS)
    return np.split(flat_n, np.cumsum([len(row) for row in rows])[:-1]) if rows else []


def spread(rows: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Numbers of unmasked tokens at their places among all: per row ``[response_length]`` float32, masked ones 0."""
    spread_rows = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    for target, row_u, mask in zip(spread_rows, rows, masks, strict=True):
        target[mask != 0] = row_u
    return spread_rows


def whitened_tokens(rows: Column, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``whitened`` over the unmasked tokens of rows ``[response_length]``; the same shape, float32, masked ones 0."""
    kept = [np.asarray(row)[mask != 0] for row, mask in zip(rows, masks, strict=True)]
    return spread(whitened(kept), masks)


REVERSE_KL = "opd_reverse_kl"
"""The column of log-ratios: a row that has it has its teacher's part in its advantages."""


def distil(args: Args, batch: TrainBatch) -> None:
    """Subtract ``opd_kl_coef * (log pi - log teacher)`` from the advantages of unmasked tokens, and set the log-ratio
    as the column ``opd_reverse_kl``: per row ``[response_length]`` float32, 0 for masked tokens.

    Its mean over tokens estimates the reverse KL divergence in nats a token (MiniLLM, arXiv 2306.08543; on samples of
    the student, GKD, arXiv 2306.13649). Raises DataError for a column that is missing or of another length.
    """
    policy, teacher = unmasked(batch, policy_field(args)), unmasked(batch, "teacher_log_probs")
    ratios = spread([own - other for own, other in zip(policy, teacher, strict=True)], masks_of(batch))
    advantages = zip(batch.columns["advantages"], ratios, strict=True)
    batch.columns["advantages"] = [row - args.opd_kl_coef * ratio for row, ratio in advantages]
    batch.columns[REVERSE_KL] = ratios
