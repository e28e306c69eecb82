"""Which tokens of rows a context-parallel rank has, by hand, and its attention, by torch's own on whole rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness import megatron_vocabulary
from harness.megatron_ranks import HAS_MEGATRON, REASON, RankPool

pytestmark = [pytest.mark.skipif(not HAS_MEGATRON, reason=REASON), pytest.mark.timeout(300)]


def test_each_rank_has_a_chunk_from_the_front_and_one_from_the_back_of_each_row() -> None:
    from buffer_rl_megatron.attention import share_of

    lengths = np.array([8, 4])
    first, second = share_of(lengths, 2, 0), share_of(lengths, 2, 1)
    assert first.own.tolist() == [0, 1, 6, 7, 8, 11]
    assert second.own.tolist() == [2, 3, 4, 5, 9, 10]
    assert first.place_t.tolist() == second.place_t.tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]
    assert share_of(np.array([12]), 3, 1).own.tolist() == [2, 3, 8, 9]
    alone = share_of(np.array([3, 2]))
    assert alone.own.tolist() == alone.place_t.tolist() == [0, 1, 2, 3, 4]


def by_torch(lengths: np.ndarray, states: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    """Of packed rows: outputs, and gradients of queries, keys and values."""
    own = [each.clone().requires_grad_() for each in states]
    rows = []
    for query, key, value in zip(*(each.split(lengths.tolist()) for each in own), strict=True):
        heads = (each.transpose(0, 1) for each in (query, key, value))
        row = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        rows.append(row.transpose(0, 1).flatten(1))
    output = torch.cat(rows)
    (output * weights).sum().backward()
    return [output.detach(), *(each.grad for each in own if each.grad is not None)]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.slow
def test_attention_of_split_rows_is_that_of_whole_rows(ranks: RankPool, packed: bool) -> None:
    """Padded rows are of one length."""
    lengths = np.array([8, 48, 20, 4, 20]) if packed else np.array([12, 12, 12])
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(lengths.sum(), heads, 8, generator=generator) for heads in (4, 2, 2)]
    weights = torch.randn(lengths.sum(), 32, generator=generator)
    expected = by_torch(lengths, states, weights)
    if not packed:  # [length, num_rows, ...]
        lengths, (*states, weights) = (
            lengths[:1],
            [each.unflatten(0, (3, 12)).transpose(0, 1) for each in (*states, weights)],
        )
        expected = [each.unflatten(0, (3, 12)).transpose(0, 1) for each in expected]
    for found in ranks.run(2, megatron_vocabulary.split_attention, lengths, states, weights, packed):
        assert len(found) == len(expected)
        for (own, values), whole in zip(found, expected, strict=True):
            torch.testing.assert_close(values, whole[own], atol=1e-5, rtol=1e-5)
