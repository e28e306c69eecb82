"""Log-probabilities, entropies and gradients of a split vocabulary, and attention of packed rows, by torch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.errors import ConfigError, TrainError
from harness import megatron_vocabulary
from harness.megatron_ranks import HAS_MEGATRON, REASON, RankPool

pytestmark = [pytest.mark.skipif(not HAS_MEGATRON, reason=REASON), pytest.mark.timeout(300)]

NUM_TOKENS, VOCABULARY = 7, 12


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("chunk", [1 << 24, 1], ids=["at once", "a token at a time"])
@pytest.mark.parametrize("keeps", [False, True], ids=["all", "kept tokens"])
def test_split_log_probs_entropies_and_gradients_are_those_of_log_softmax(
    ranks: RankPool, world_size: int, chunk: int, keeps: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(NUM_TOKENS, VOCABULARY, generator=generator)
    targets = torch.tensor([0, 5, 6, 11, 3, 7, 2])
    weights = [torch.randn(NUM_TOKENS, generator=generator) for _ in range(2)]
    # Of the second token one of each half, of the third one alone, of the last all of one half; of others the whole.
    sets = {1: [5, 9], 2: [6], 6: [0, 1, 2, 3, 4, 5]} if keeps else {}
    counts = torch.tensor([len(sets.get(token, ())) for token in range(NUM_TOKENS)])
    ids = torch.tensor([each for token in sorted(sets) for each in sets[token]], dtype=torch.long)
    found = ranks.run(
        world_size, megatron_vocabulary.split_outputs, logits, targets, [counts, ids] if keeps else [], chunk, weights
    )
    whole = logits.double().clone().requires_grad_()
    allowed = torch.ones(NUM_TOKENS, VOCABULARY, dtype=torch.bool)
    for token, own in sets.items():
        allowed[token] = torch.isin(torch.arange(VOCABULARY), torch.tensor(own))
    all_log_probs = torch.log_softmax((whole / 0.7).masked_fill(~allowed, float("-inf")), -1)
    log_probs = all_log_probs.gather(1, targets[:, None])[:, 0]
    probabilities = all_log_probs.exp()
    entropy = -(probabilities * all_log_probs.masked_fill(~allowed, 0.0)).sum(-1)
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    for rank in found:
        torch.testing.assert_close(rank["log_probs"].double(), log_probs.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rank["entropy"].double(), entropy.detach(), atol=1e-5, rtol=1e-5)
    gradient = torch.cat([rank["gradient"] for rank in found], dim=1)
    torch.testing.assert_close(gradient.double(), whole.grad, atol=1e-5, rtol=1e-5)


def attention(**changes: Any) -> Any:
    from buffer_rl_megatron.attention import CausalAttention

    config = SimpleNamespace(**{"attention_dropout": 0.0, "window_size": None, "kv_channels": 8, **changes})
    return CausalAttention(config)


def test_packed_rows_attend_to_their_own_earlier_tokens() -> None:
    from buffer_rl_megatron.attention import packed_rows, share_of

    lengths = np.array([7, 48, 20, 1, 33])
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(lengths.sum(), 4, 8, generator=generator)
    key, value = (torch.randn(lengths.sum(), 2, 8, generator=generator) for _ in range(2))
    found = attention()(query, key, value, None, packed_seq_params=packed_rows(share_of(lengths), torch.device("cpu")))
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        states = [query[own], *(each[own].repeat_interleave(2, dim=1) for each in (key, value))]
        scores = torch.einsum("qnd,knd->nqk", states[0], states[1]) / 8**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        expected = torch.einsum("nqk,knd->qnd", scores.softmax(-1), states[2]).flatten(1)
        torch.testing.assert_close(found[own], expected, atol=1e-5, rtol=1e-5)
        start += length


def test_a_mask_is_refused_and_dropout_too() -> None:
    states = torch.zeros(2, 1, 2, 8)
    with pytest.raises(TrainError, match="mask"):
        attention()(states, states, states, torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="dropout"):
        attention(attention_dropout=0.1)
