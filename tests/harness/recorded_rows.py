"""Rows of rollouts that no engine generated, for tests that train on recorded rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from buffer_rl.records.groups import GroupUid, RowId, TrainBatch

SAMPLES = 3
"""Of each group; the second one fanned out into two parts, so a group has one row more."""

OPTIONS: dict[str, Any] = {
    # As streamed gradients take them: there is one forward pass, by the weights that sampled the rows.
    "use_rollout_logprobs": True,
    "eps_clip_high": 1.0,
    "max_logprob_diff": None,
    "prompt_data": [],
    "custom_rm_path": None,
    "eval_prompt_data": [],
    "eval_interval": None,
    "deterministic": True,
}
"""Of a run that trains on recorded rows, and ends alike with streamed gradients."""


def recorded_rows(rollout_id: int, num_groups: int) -> TrainBatch:
    """Groups with 2 to 6 prompt and 0 to 12 response tokens a row, a fifth of them masked, with rewards normalised over
    their samples and the sampler's log-probabilities. Token ids are 3 to 6: a tiny model of four characters has them.

    The columns are those that the Buffer has when a rollout was recorded."""
    rng = np.random.default_rng(rollout_id)
    row_ids: list[RowId] = []
    columns: dict[str, Any] = {
        "tokens": [],
        "response_length": [],
        "loss_mask": [],
        "rollout_log_probs": [],
        "reward": [],
        "raw_reward": [],
        "sample_total_tokens": [],
        "sample_parts": [],
    }
    for number in range(num_groups):
        uid = GroupUid("recorded", rollout_id * num_groups + number, 0)
        raw = rng.normal(size=SAMPLES)
        rewards = (raw - raw.mean()) / raw.std()
        for sample in range(SAMPLES):
            lengths = rng.integers(0, 13, 2 if sample == 1 else 1).tolist()
            masks = [(rng.random(length) > 0.2).astype(np.float32) for length in lengths]
            for part, (length, mask) in enumerate(zip(lengths, masks, strict=True)):
                row_ids.append(RowId(uid, sample, part))
                columns["tokens"].append(rng.integers(3, 7, int(rng.integers(2, 7)) + length).astype(np.int32))
                columns["response_length"].append(length)
                columns["loss_mask"].append(mask)
                columns["rollout_log_probs"].append(-rng.uniform(1, 3, length).astype(np.float32))
                columns["reward"].append(rewards[sample])
                columns["raw_reward"].append(raw[sample])
                columns["sample_total_tokens"].append(sum(float(mask.sum()) for mask in masks))
                columns["sample_parts"].append(len(masks))
    columns["response_length"] = np.array(columns["response_length"], dtype=np.int32)
    for name in ("reward", "raw_reward", "sample_total_tokens", "sample_parts"):
        columns[name] = np.array(columns[name], dtype=np.float32)
    return TrainBatch(rollout_id=rollout_id, task=f"train_{rollout_id}", row_ids=row_ids, columns=columns)
