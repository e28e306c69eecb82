"""Two roles of one's own: each adds a field to finished groups, in a process of its own beside the trainer, and a loss
reads both.

    buffer-rl train --config examples/quickstart/train.yaml --schedule pipelined \
        --role-path examples/roles/weights.py:Novelty examples/roles/weights.py:Brevity --fuse-roles novelty+brevity \
        --custom-loss-function-path examples/roles/weights.py:weighted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from buffer_rl.algo.losses import policy_loss
from buffer_rl.kinds.marks import loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss
from buffer_rl.plan.roles import Role
from buffer_rl.records.groups import Column, TrainBatch

N = 3


class Novelty:
    """``novelty`` ``[response_length]``: 0 for a token that ends a trigram which its response had before, else 1."""

    role = Role(name="novelty", fields=("novelty",))

    def __init__(self, args: Any) -> None:
        del args

    def compute(self, batch: TrainBatch) -> Mapping[str, Column]:
        """The field for each row of some groups."""
        lengths = np.asarray(batch.columns["response_length"])
        rows = zip(batch.columns["tokens"], lengths, strict=True)
        return {"novelty": [novelty(tokens[len(tokens) - length :].tolist()) for tokens, length in rows]}


def novelty(response: list[int]) -> np.ndarray:
    """Of one response, float32 ``[response_length]``."""
    seen: set[tuple[int, ...]] = set()
    found = np.ones(len(response), dtype=np.float32)
    for end in range(N, len(response) + 1):
        ngram = tuple(response[end - N : end])
        found[end - 1] = ngram not in seen
        seen.add(ngram)
    return found


class Brevity:
    """``brevity`` ``[num_rows]``: the shortest response of the prompt by the row's own, both 1 token longer."""

    role = Role(name="brevity", fields=("brevity",))

    def __init__(self, args: Any) -> None:
        del args

    def compute(self, batch: TrainBatch) -> Mapping[str, Column]:
        """The field for some groups, which come whole."""
        lengths = np.asarray(batch.columns["response_length"], dtype=np.float32) + 1
        uids = [row_id.uid for row_id in batch.row_ids]
        shortest = {uid: min(n for other, n in zip(uids, lengths, strict=True) if other == uid) for uid in set(uids)}
        return {"brevity": np.array([shortest[uid] for uid in uids], dtype=np.float32) / lengths}


@loss_unit("token", needs=("novelty", "brevity"))
def weighted(args: Any, inputs: LossInputs) -> TokenLoss:
    """The clipped surrogate of PPO, as a mean over tokens; repeated ones count nothing, those of longer responses
    less."""
    loss = policy_loss(args, inputs)
    return replace(loss, weights=inputs.loss_mask * inputs["novelty"] * inputs["brevity"][:, None])
