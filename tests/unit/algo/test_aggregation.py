from __future__ import annotations

import pytest
import torch

from buffer_rl.algo.aggregation import mask_out, per_row, row_weights, token_weights
from buffer_rl.errors import ConfigError

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 99.0], [5.0, 99.0, 99.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
TOKENS, PARTS = torch.tensor([3.0, 2.0, 0.0]), torch.ones(3)


def aggregated(
    mode: str, values: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, parts: torch.Tensor
) -> tuple[float, float]:
    """The sum of weights times values, and D."""
    weights, divisor = token_weights(mode, mask, tokens, parts)
    return mask_out(values, weights).sum().item(), divisor.item()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (36, 5)),  # 1 + 2 + 3 + 10 + 20, of 5 unmasked tokens
        ("seq-mean-token-mean", (2 + 15 + 0, 3)),
        ("seq-mean-token-sum", (6 + 30 + 0, 3)),
    ],
)
def test_sums_and_divisors_match_hand_computed_numbers(mode: str, expected: tuple[float, float]) -> None:
    assert aggregated(mode, VALUES, MASK, TOKENS, PARTS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (6 + 30 + 5 + 8, 7)),
        ("seq-mean-token-mean", ((6 + 30 + 5) / 6 + 8 / 1 + 0, 3)),
        ("seq-mean-token-sum", ((6 + 30 + 5) + 8 + 0, 3)),
    ],
)
@pytest.mark.parametrize("block", [5, 2, 1])
def test_a_sample_of_three_parts_weighs_as_much_as_one_of_one_part(
    mode: str, expected: tuple[float, float], block: int
) -> None:
    """Three parts of 3, 2 and 1 unmasked tokens, a sample of one token and one that is masked entirely; ``block`` rows
    a micro-batch."""
    values = torch.cat([VALUES, torch.tensor([[8.0, 99.0, 99.0], [99.0, 99.0, 99.0]])])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    tokens, parts = torch.tensor([6.0, 6, 6, 1, 0]), torch.tensor([3.0, 3, 3, 1, 1])
    shares = [
        aggregated(mode, values[rows], mask[rows], tokens[rows], parts[rows])
        for rows in (slice(start, start + block) for start in range(0, 5, block))
    ]
    assert tuple(map(sum, zip(*shares, strict=True))) == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_masked_values_may_be_infinite_or_nan(mode: str) -> None:
    values = VALUES.clone()
    values[MASK == 0] = float("nan")
    values[1, 2] = float("inf")
    values.requires_grad_()
    weights, _ = token_weights(mode, MASK, TOKENS, PARTS)
    total = mask_out(values, weights).sum()
    total.backward()
    assert total.item() == pytest.approx(aggregated(mode, VALUES, MASK, TOKENS, PARTS)[0])
    assert values.grad is not None
    torch.testing.assert_close(values.grad, weights)
    assert (values.grad[MASK == 0] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_samples_that_are_masked_entirely_weigh_nothing_and_count_as_samples(mode: str) -> None:
    nothing = torch.zeros_like(MASK)
    assert aggregated(mode, VALUES, nothing, torch.zeros(3), PARTS) == (0.0, 0.0 if mode == "token-mean" else 3.0)


def test_a_number_for_each_row_is_averaged_over_samples_whatever_their_parts() -> None:
    """A sample of two parts, one of one part, and a part of a sample of four that is masked entirely."""
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    weights, divisor = row_weights(mask, torch.tensor([2.0, 2.0, 1.0, 4.0]))
    assert weights.tolist() == [0.5, 0.5, 1.0, 0.0]
    assert divisor.item() == 2.25


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", [2, 15, 0]), ("seq-mean-token-mean", [2, 15, 0]), ("seq-mean-token-sum", [6, 30, 0])],
)
def test_a_term_of_the_framework_becomes_one_number_for_each_row(mode: str, expected: list[float]) -> None:
    values = torch.where(MASK != 0, VALUES, torch.nan)
    assert per_row(values, MASK, mode).tolist() == expected


def test_an_unknown_mode_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="seq-mean-token-sum"):
        token_weights("mean", MASK, TOKENS, PARTS)
