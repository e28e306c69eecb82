"""Log-probabilities renormalised over the tokens that the engine kept, against numbers derived by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.errors import DataError
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.trainer import vocabulary
from buffer_rl.trainer.collate import collate
from buffer_rl.trainer.forward import response_log_probs
from buffer_rl.trainer.output_layer import fuse_where_possible, is_fused

CPU = torch.device("cpu")
TABLE = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]


class Bigrams(torch.nn.Module):
    """The next token has the probabilities of the row of ``TABLE`` that the last one names."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(TABLE).log().T)
        if fused:
            fuse_where_possible(self)
        assert is_fused(self) == fused

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.head(torch.nn.functional.one_hot(input_ids, 4).float()))


def batch_of(kept: list[list[list[int]]], tokens: list[list[int]]) -> TrainBatch:
    """Rows of one prompt token; ``kept`` for each response token."""
    return TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("data", 0, 0), i) for i in range(len(tokens))],
        columns={
            "tokens": [np.array(row, dtype=np.int32) for row in tokens],
            "response_length": np.array([len(row) - 1 for row in tokens], dtype=np.int32),
            "kept_counts": [np.array([len(ids) for ids in row], dtype=np.int32) for row in kept],
            "kept_tokens": [np.array([i for ids in row for i in ids], dtype=np.int32) for row in kept],
        },
    )


# Row 0: token 1 after 0, of {0, 1}; then 3 after 1, of the whole vocabulary. Row 1: token 2 after 3, of itself alone.
KEPT = [[[0, 1], []], [[2]]]
TOKENS = [[0, 1, 3], [3, 2]]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [1 << 24, 8, 4])  # three response tokens of a vocabulary of four
def test_log_probs_and_entropies_are_of_the_distribution_over_the_kept_tokens(
    chunk: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
    log_probs, entropy = response_log_probs(Bigrams(fused), collate(batch_of(KEPT, TOKENS), CPU), 1.0)  # type: ignore[arg-type]
    expected = [[math.log(0.3 / 0.8), math.log(0.4)], [0.0, 0.0]]
    torch.testing.assert_close(log_probs, torch.tensor(expected), atol=1e-6, rtol=0)
    of_two = -(5 / 8 * math.log(5 / 8) + 3 / 8 * math.log(3 / 8))
    of_all = -sum(p * math.log(p) for p in TABLE[1])
    torch.testing.assert_close(entropy, torch.tensor([[of_two, of_all], [0.0, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_the_temperature_comes_before_the_renormalisation(fused: bool) -> None:
    log_probs, _ = response_log_probs(Bigrams(fused), collate(batch_of(KEPT, TOKENS), CPU), 0.5)  # type: ignore[arg-type]
    assert log_probs[0, 0].item() == pytest.approx(math.log(0.09 / 0.34), abs=1e-6)  # squares of 0.3 and 0.5


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_equal_finite_differences(fused: bool) -> None:
    micro, model = collate(batch_of(KEPT, TOKENS), CPU), Bigrams(fused)
    weights = torch.tensor([[1.0, -2.0], [3.0, 0.0]])

    def value() -> torch.Tensor:
        log_probs, entropy = response_log_probs(model, micro, 0.8)  # type: ignore[arg-type]
        return (weights * log_probs + entropy).sum()

    value().backward()
    exact = model.head.weight.grad
    assert exact is not None
    for place in np.ndindex(4, 4):
        ends = []
        with torch.no_grad():
            for step in (1e-2, -2e-2, 1e-2):
                model.head.weight[place] += step
                ends.append(float(value()))
        assert float(exact[place]) == pytest.approx((ends[0] - ends[1]) / 2e-2, abs=2e-3)
    assert exact[2:, 0].abs().sum() == 0  # tokens 2 and 3 were cut off after token 0
    assert exact[:, 3].abs().sum() == 0  # nothing else was left


@pytest.mark.parametrize(
    ("counts", "ids"),
    [
        ([2], [0, 1]),  # one number for two tokens
        ([2, 0], [0]),
        ([2, 0], [0, 2]),  # without the token itself
        ([2, 2], [0, 1, 0, 1]),  # the second set lacks token 3
        ([0, 2], [1, 3, 1]),
        ([1, 2], [1, 3, 3]),
        ([2, 2], [1, 1, 0, 1]),  # the first set has its token twice, the second not at all
    ],
)
def test_kept_tokens_of_another_response_are_an_error_that_names_the_row(counts: list[int], ids: list[int]) -> None:
    batch = batch_of(KEPT, TOKENS)
    batch.columns["kept_counts"] = [np.array(counts), np.array([1])]
    batch.columns["kept_tokens"] = [np.array(ids), np.array([2])]
    with pytest.raises(DataError, match="its kept tokens are not those") as caught:
        collate(batch, CPU)
    assert caught.value.where == str(batch.row_ids[0])
