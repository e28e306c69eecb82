from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from buffer_rl.algo.aggregation import aggregate
from buffer_rl.contracts import LossInputs
from buffer_rl.errors import ConfigError

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 99.0], [5.0, 99.0, 99.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


def step_of(
    mask: torch.Tensor = MASK, samples: int = 3, tokens: int = 5, sample_tokens: Sequence[float] = (3, 2, 0)
) -> LossInputs:
    columns = dict.fromkeys(
        ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "entropy")
    )
    totals = torch.tensor(sample_tokens, dtype=torch.float32)
    return LossInputs(**columns, loss_mask=mask, total_samples=samples, total_tokens=tokens, sample_total_tokens=totals)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 36 / 5),  # (1 + 2 + 3 + 10 + 20) / 5
        ("seq-mean-token-mean", (2 + 15 + 0) / 3),
        ("seq-mean-token-sum", (6 + 30 + 0) / 3),
    ],
)
def test_aggregates_match_hand_computed_numbers(mode: str, expected: float) -> None:
    assert aggregate(VALUES, step_of(), mode).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (6 + 30 + 5 + 8) / 7),
        ("seq-mean-token-mean", ((6 + 30 + 5) / 6 + 8 / 1 + 0) / 3),
        ("seq-mean-token-sum", ((6 + 30 + 5) + 8 + 0) / 3),
    ],
)
@pytest.mark.parametrize("block", [5, 2, 1])
def test_a_sample_of_three_parts_weighs_as_much_as_one_of_one_part(mode: str, expected: float, block: int) -> None:
    """Three parts of 3, 2 and 1 unmasked tokens, a sample of one token and one that is masked entirely; ``block`` rows
    a micro-batch."""
    values = torch.cat([VALUES, torch.tensor([[8.0, 99.0, 99.0], [99.0, 99.0, 99.0]])])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    sample_tokens = [6, 6, 6, 1, 0]
    shares = [
        aggregate(values[rows], step_of(mask[rows], samples=3, tokens=7, sample_tokens=sample_tokens[rows]), mode)
        for rows in (slice(start, start + block) for start in range(0, 5, block))
    ]
    assert torch.stack(shares).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_micro_batches_add_up_to_the_whole(mode: str) -> None:
    whole = aggregate(VALUES, step_of(), mode)
    shares = [
        aggregate(VALUES[i : i + 1], step_of(MASK[i : i + 1], sample_tokens=(3, 2, 0)[i : i + 1]), mode)
        for i in range(3)
    ]
    torch.testing.assert_close(torch.stack(shares).sum(), whole)


@pytest.mark.parametrize("mode", MODES)
def test_masked_values_may_be_infinite_or_nan(mode: str) -> None:
    values = VALUES.clone()
    values[MASK == 0] = float("nan")
    values[1, 2] = float("inf")
    values.requires_grad_()
    total = aggregate(values, step_of(), mode)
    total.backward()
    assert total.item() == pytest.approx(aggregate(VALUES, step_of(), mode).item())
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()
    assert (values.grad[MASK == 0] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_whose_tokens_are_all_masked_is_zero(mode: str) -> None:
    nothing = step_of(torch.zeros_like(MASK), tokens=0, sample_tokens=(0, 0, 0))
    assert aggregate(VALUES, nothing, mode).item() == 0.0


def test_an_unknown_mode_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="seq-mean-token-sum"):
        aggregate(VALUES, step_of(), "mean")
