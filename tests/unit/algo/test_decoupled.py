"""Decoupled PPO: hand-derived numbers with three policies."""

from __future__ import annotations

import pytest
import torch

from buffer_rl.algo.corrections import truncated_weights
from buffer_rl.algo.losses import decoupled_ppo, policy_loss
from buffer_rl.errors import TrainError
from buffer_rl.kinds.token_loss import LossInputs
from harness.formulas import at_ratios, check_gradient, slope
from harness.losses import loss_args, objective_of, outcome, rows_of

ADVANTAGES = [[1.0, 1.0, -2.0, -1.0]]
BEHAVE = (-3 - torch.tensor([[0.5, 4.0, 1.5, 2.0]], dtype=torch.float64).log()).tolist()
"""The engine's log-probabilities, with weights of the proximal policy (-3) of 0.5, 4, 1.5 and 2."""


def inputs() -> LossInputs:
    """Ratios to the proximal policy of 1.1, 2, 1.1 and 0.5."""
    return at_ratios([[1.1, 2.0, 1.1, 0.5]], rollout_log_probs=BEHAVE, advantages=ADVANTAGES)


def close(found: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_clipped_surrogate_is_weighed_by_the_proximal_over_the_behaviour_policy() -> None:
    # 0.5 x -1.1; 4 x -min(2, 1.2); 1.5 x 2 x 1.1; 2 x max(0.5, 0.8)
    loss = decoupled_ppo(loss_args(eps_clip=0.2), inputs())
    close(loss.values, [[-0.55, -4.8, 3.3, 1.6]])
    assert loss.metrics["behave_capped"].sum() == 0
    close(loss.metrics["behave_weight"], [[0.5, 4.0, 1.5, 2.0]])


@pytest.mark.parametrize(
    ("mode", "expected"), [("clamp", [[-0.55, -3 * 1.2, 3.3, 1.6]]), ("mask", [[-0.55, 0.0, 3.3, 1.6]])]
)
def test_the_cap_cuts_off_or_masks(mode: str, expected: list[list[float]]) -> None:
    loss = decoupled_ppo(loss_args(eps_clip=0.2, decoupled_behave_cap=3.0, decoupled_behave_mode=mode), inputs())
    close(loss.values, expected)
    assert loss.metrics["behave_capped"].tolist() == [[False, True, False, False]]
    assert loss.weights is None  # a masked token stays in the divisor


def test_without_proximal_log_probs_it_is_the_truncated_correction_of_the_policy_loss() -> None:
    options = {"eps_clip": 0.2, "decoupled_behave_cap": 3.0, "use_tis": True, "tis_clip": 3.0}
    args, given = loss_args(**options), inputs()
    corrected = policy_loss(args, given).values * truncated_weights(args, given)
    assert torch.equal(decoupled_ppo(args, given).values, corrected)


def test_its_gradient_is_that_of_the_clipped_surrogate_times_the_weight() -> None:
    # -A r w where the token is not clipped
    close(slope(decoupled_ppo, inputs(), eps_clip=0.2), [[-0.55, 0.0, 3.3, 0.0]])


def test_its_gradient_equals_finite_differences() -> None:
    check_gradient(decoupled_ppo, eps_clip=0.2, decoupled_behave_cap=1.2)


def test_proximal_log_probs_come_before_the_old_ones() -> None:
    given = at_ratios([[2.0]], rollout_log_probs=[[-4.0]], prox_log_probs=[[-3.5]], advantages=[[-1.0]])
    ratio, weight = 2 * torch.tensor(0.5).exp(), torch.tensor(0.5).exp()  # e^(log 2 - 3 + 3.5), e^(-3.5 + 4)
    close(decoupled_ppo(loss_args(), given).values, [[float(ratio * weight)]])


def test_with_the_engines_log_probs_as_old_ones_proximal_ones_are_needed() -> None:
    with pytest.raises(TrainError, match="prox_log_probs"):
        decoupled_ppo(loss_args(use_rollout_logprobs=True), inputs())


def test_with_one_policy_it_is_the_policy_loss() -> None:
    batch = rows_of(
        loss_mask=[[1, 1], [1, 0]],
        old_log_probs=[[-2, -1], [-1, -1]],
        rollout_log_probs=[[-2, -1], [-1, -1]],
        advantages=[[1, -2], [3, 1]],
    )
    log_probs = [[-1.5, -1.1], [-1.1, -4]]
    losses = [outcome(objective_of(loss_type=name), batch, log_probs) for name in ("decoupled_ppo", "policy_loss")]
    assert losses[0].means["loss"] == pytest.approx(losses[1].means["loss"])
    assert losses[0].means["behave_weight"] == 1
