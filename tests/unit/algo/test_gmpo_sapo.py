"""GMPO and SAPO: hand-derived numbers, gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from buffer_rl.algo.losses import gmpo, policy_loss, sapo
from harness.formulas import at_ratios, check_gradient, slope
from harness.losses import loss_args


def close(found: torch.Tensor, expected: object, rtol: float = 1e-7) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=1e-9)


def test_gmpo_clips_each_token_before_the_geometric_mean() -> None:
    """With the range [e^-0.4, e^0.4] = [0.67, 1.49]: ratios 4 and 1/4 give, for a positive advantage, sqrt(e^0.4 / 4),
    clipped above alone; for a negative one sqrt(4 e^-0.4), clipped below alone. The last token is masked."""
    inputs = at_ratios(
        [[4.0, 0.25, 9.0]] * 2 + [[1.21, 1.0, 9.0]],
        advantages=[[2.0] * 3, [-2.0] * 3, [1.0] * 3],
        loss_mask=[[1, 1, 0]] * 3,
    )
    expected = [-2 * math.exp(0.2) / 2, 2 * 2 * math.exp(-0.2), -1.1]
    loss = gmpo(loss_args(eps_clip=0.4), inputs)
    close(loss.values, expected)
    assert loss.metrics["pg_clipfrac"][:, :2].tolist() == [[True, False], [False, True], [False, False]]
    # d / d log r_t of -A (prod c)^(1/2) is half the value, for tokens that are not clipped
    halves = [value / 2 for value in expected]
    close(
        slope(gmpo, inputs, eps_clip=0.4), [[0, halves[0], 0], [halves[1], 0, 0], [halves[2], halves[2], 0]], rtol=1e-6
    )


def test_gmpo_with_two_widths() -> None:
    inputs = at_ratios([[4.0], [0.25]], advantages=[[1.0], [-1.0]])
    options = {"eps_clip": 0.3, "eps_clip_high": 0.5}
    close(gmpo(loss_args(**options), inputs).values, [-math.exp(0.5), math.exp(-0.3)])


@pytest.mark.parametrize("loss", [gmpo, sapo])
def test_gradients_equal_finite_differences(loss: object) -> None:
    check_gradient(loss, eps_clip=0.2, sapo_tau_neg=1.5)  # type: ignore[arg-type]


def test_sapo_gates_the_ratio_softly() -> None:
    """4 / tau x sigmoid(tau (r - 1)): with tau 2 at r = 1 + log(3) / 2, sigmoid(log 3) = 3/4: 1.5; with tau 4 at
    r = 1 - log(3) / 4, sigmoid(-log 3) = 1/4: 0.25; at r = 1 half of 4 / tau."""
    ratios = [[1 + math.log(3) / 2, 1 - math.log(3) / 4, 1.0, 1.0]]
    inputs = at_ratios(ratios, advantages=[[2.0, -3.0, 1.0, 0.0]])
    loss = sapo(loss_args(sapo_tau_pos=2.0, sapo_tau_neg=4.0), inputs)
    close(loss.values, [[-2 * 1.5, 3 * 0.25, -1.0, 0.0]])
    # the slope of the gate is 4 s (1 - s)
    close(loss.metrics["sapo_gate"], [[0.75, 0.75, 1.0, 1.0]])


def test_the_gradient_of_sapo_at_a_ratio_of_one_is_that_of_the_surrogate() -> None:
    inputs = at_ratios([[1.0, 1.0]], advantages=[[2.0, -3.0]])
    close(slope(sapo, inputs), slope(policy_loss, inputs))


def test_the_gradient_of_sapo_fades_far_from_one_and_more_for_negative_advantages() -> None:
    inputs = at_ratios([[1.2, 8.0], [1.2, 8.0]], advantages=[[1.0, 1.0], [-1.0, -1.0]])
    near, far = (slope(sapo, inputs, sapo_tau_neg=2.0) / torch.tensor([1.2, 8.0])).abs().T
    assert (far < near / 100).all()
    assert near[1] < near[0]
