from __future__ import annotations

import pytest
import torch

from buffer_rl.algo.aggregation import aggregate
from buffer_rl.errors import ConfigError

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 99.0], [5.0, 99.0, 99.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 36 / 5),  # (1 + 2 + 3 + 10 + 20) / 5
        ("seq-mean-token-mean", (2 + 15 + 0) / 3),
        ("seq-mean-token-sum", (6 + 30 + 0) / 3),
    ],
)
def test_aggregates_match_hand_computed_numbers(mode: str, expected: float) -> None:
    assert aggregate(VALUES, MASK, mode, total_rows=3, total_tokens=5).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_micro_batches_add_up_to_the_whole(mode: str) -> None:
    whole = aggregate(VALUES, MASK, mode, 3, 5)
    shares = [aggregate(VALUES[i : i + 1], MASK[i : i + 1], mode, 3, 5) for i in range(3)]
    torch.testing.assert_close(torch.stack(shares).sum(), whole)


@pytest.mark.parametrize("mode", MODES)
def test_masked_values_may_be_infinite_or_nan(mode: str) -> None:
    values = VALUES.clone()
    values[MASK == 0] = float("nan")
    values[1, 2] = float("inf")
    values.requires_grad_()
    total = aggregate(values, MASK, mode, 3, 5)
    total.backward()
    assert total.item() == pytest.approx(aggregate(VALUES, MASK, mode, 3, 5).item())
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()
    assert (values.grad[MASK == 0] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_whose_tokens_are_all_masked_is_zero(mode: str) -> None:
    assert aggregate(VALUES, torch.zeros_like(MASK), mode, 3, 0).item() == 0.0


def test_an_unknown_mode_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="seq-mean-token-sum"):
        aggregate(VALUES, MASK, "mean", 3, 5)
