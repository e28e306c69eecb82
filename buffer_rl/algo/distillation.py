"""On-policy distillation: the student's advantages minus the log-ratio to the teacher on the student's own samples.
Numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.algo.returns import masks_of, spread, unmasked
from buffer_rl.plan.algorithm import policy_field
from buffer_rl.records.groups import TrainBatch

if TYPE_CHECKING:
    from buffer_rl.args import Args


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
