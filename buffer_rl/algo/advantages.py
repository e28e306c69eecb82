"""Advantage estimators: functions that set the columns ``advantages`` and ``returns`` of a batch. Numpy only.

Each column holds one array ``[response_length]`` float32 for each row.
"""

from __future__ import annotations

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import DataError
from buffer_rl.kinds.marks import scoped
from buffer_rl.records.groups import TrainBatch


@scoped("row")
def grpo(args: Args, batch: TrainBatch) -> None:
    """Group-relative advantages: each response token gets its sample's normalised reward.

    DeepSeekMath (arXiv 2402.03300) section 4.1.2, outcome supervision. The normalisation over the samples of a prompt
    was done when the rewards were post-processed (``buffer_rl.algo.rewards``), because a rank may see only some of a
    prompt's samples. Returns equal advantages: there is no value function.

    So ``dr_grpo``, ``rloo`` and ``pass_at_k`` are this function too: their rewards are normalised in another way
    (``buffer_rl.plan.algorithms``).

    Raises DataError if the batch has no ``reward`` column or a reward is not finite.
    """
    rewards, lengths = rewards_of(batch), np.asarray(batch.columns["response_length"])
    spans = list(zip((np.cumsum(lengths) - lengths).tolist(), np.cumsum(lengths).tolist(), strict=True))
    for column in ("advantages", "returns"):
        tokens_n = np.repeat(rewards, lengths)
        batch.columns[column] = [tokens_n[start:end] for start, end in spans]


def rewards_of(batch: TrainBatch, column: str = "reward") -> np.ndarray:
    """One reward for each row, ``[num_rows]`` float32. Raises DataError if the column is not there or not finite."""
    if column not in batch.columns:
        what = f"the batch has no {column}s"
        raise DataError(what, where=batch.task, expected=f"a column {column}", hint="score the samples first")
    rewards = np.asarray(batch.columns[column], dtype=np.float32)
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise DataError(f"the {column} is {rewards[row]}", where=str(batch.row_ids[row]), expected="a finite number")
    return rewards
