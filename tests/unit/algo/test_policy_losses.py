"""The formulas of PPO with dual clip, GSPO and CISPO: hand-derived numbers, gradients against finite differences."""

from __future__ import annotations

import pytest
import torch

from buffer_rl.algo.losses import cispo, gspo, gspo_token, policy_loss
from buffer_rl.kinds.marks import Unit, unit_of
from buffer_rl.plan.algorithms import algorithm_of
from buffer_rl.plugin.registry import PluginRegistry
from harness.formulas import at_ratios, check_gradient, inputs_of, slope
from harness.losses import loss_args, objective_of, outcome, rows_of


def close(found: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64))


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    # -min(2, 1.2) x 2; max(2, 1.2) x 2 = 4, at most 1.5 x 2; -min(0.5, 0.8) x 2; -min(2, 1.2) x 0.5
    inputs = at_ratios([[2.0, 2.0, 0.5, 2.0]], advantages=[[2.0, -2.0, 2.0, 0.5]])
    loss = policy_loss(loss_args(eps_clip=0.2, eps_clip_c=1.5), inputs)
    close(loss.values, [[-2.4, 3.0, -1.0, -0.6]])
    assert loss.metrics["pg_clipfrac"].tolist() == [[True, True, False, True]]
    close(policy_loss(loss_args(eps_clip=0.2), inputs).values, [[-2.4, 4.0, -1.0, -0.6]])


def test_a_token_at_the_dual_clip_has_no_gradient() -> None:
    inputs = at_ratios([[2.0, 2.0, 0.5, 1.4]], advantages=[[2.0, -2.0, 2.0, -2.0]])
    # the slope of -A r by log r is -A r; the first is clipped above, the second at 1.5 |A|
    close(slope(policy_loss, inputs, eps_clip=0.2, eps_clip_c=1.5), [[0.0, 0.0, -1.0, 2.8]])


@pytest.mark.parametrize("eps_clip_c", [None, 1.3])
def test_the_gradient_of_the_clipped_surrogate_equals_finite_differences(eps_clip_c: float | None) -> None:
    check_gradient(policy_loss, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=eps_clip_c)


def test_gspo_clips_the_geometric_mean_of_a_row() -> None:
    """Ratios 4 and 1: sqrt(4) = 2; 1/4 and 1: 1/2; 1.21 and 1 with a masked token of 9: 1.1."""
    inputs = at_ratios(
        [[4.0, 1.0, 1.0], [0.25, 1.0, 1.0], [1.21, 1.0, 9.0]],
        advantages=[[1.0] * 3, [-1.0] * 3, [-2.0] * 3],
        loss_mask=[[1, 1, 0]] * 3,
    )
    # -min(2, 1.3) x 1; max(0.5, 0.8) x 1; max(1.1, 0.8) x 2
    options = {"eps_clip": 0.2, "eps_clip_high": 0.3}
    loss = gspo(loss_args(**options), inputs)
    close(loss.values, [-1.3, 0.8, 2.2])
    close(loss.metrics["ppo_kl"].exp(), [1 / 2, 2, 1 / 1.1])
    assert loss.metrics["sequence_clipfrac"].tolist() == [True, True, False]
    # d s / d log r_t = s / |y|: 2.2 / 2 for each unmasked token of the row that is not clipped
    close(slope(gspo, inputs, **options), [[0, 0, 0], [0, 0, 0], [1.1, 1.1, 0]])


def test_the_gradient_of_gspo_equals_finite_differences() -> None:
    check_gradient(gspo, eps_clip=0.2, eps_clip_high=0.28)


def test_gspo_token_has_the_ratio_of_the_row_and_the_gradient_of_the_token() -> None:
    """Ratios 1.21 and 1: 1.1 for both tokens, within the clip range; the advantages differ."""
    inputs = at_ratios([[1.21, 1.0]], advantages=[[-2.0, 1.0]])
    close(gspo_token(loss_args(eps_clip=0.2), inputs).values, [[2.2, -1.1]])
    # not through the mean of the other token's ratio: -A s each, where gspo's tokens would share the sum
    close(slope(gspo_token, inputs, eps_clip=0.2), [[2.2, -1.1]])


def test_with_one_advantage_a_row_gspo_token_is_gspo() -> None:
    """As section 4.3 of the paper says, where each sequence weighs the same."""
    batch = rows_of(
        loss_mask=[[1, 1, 1], [1, 0, 1], [1, 1, 1]],
        old_log_probs=[[-1, -2, -1.5], [-1, -1, -2], [-3, -2, -1]],
        advantages=[[1, 1, 1], [-2, -2, -2], [0.5, 0.5, 0.5]],
    )
    log_probs = [[-1.1, -1.9, -1.6], [-0.9, -7.0, -2.0], [-1.0, -1.0, -1.0]]  # the last row is clipped
    names = ("gspo", "gspo_token")
    found = [
        outcome(objective_of(loss_type=name, loss_agg_mode="seq-mean-token-mean"), batch, log_probs) for name in names
    ]
    assert found[0].means["loss"] == pytest.approx(found[1].means["loss"], rel=1e-5)
    for ours, theirs in zip(found[0].log_prob_gradients, found[1].log_prob_gradients, strict=True):
        assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-5)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    ratios, advantages = [[1.0, 1.14, 1.56, 0.4]], torch.tensor([[1.0, -1.0, 2.0, -3.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 1.14, 1.28, 0.8]], dtype=torch.float64)
    inputs = at_ratios(ratios, advantages=advantages)
    options = {"eps_clip": 0.2, "eps_clip_high": 0.28}
    loss = cispo(loss_args(**options), inputs)
    close(loss.values, -weights * advantages * inputs.log_probs)
    assert loss.metrics["cispo_clipfrac"].tolist() == [[False, False, True, True]]
    # the weight has no gradient: the slope of w A log pi is w A, not w A (1 + log pi)
    close(slope(cispo, inputs, **options), -weights * advantages)


def test_a_gradient_of_cispo_within_the_clip_range_is_that_of_the_surrogate() -> None:
    inputs = at_ratios([[1.1, 0.9]], advantages=[[1.0, -2.0]])
    close(slope(cispo, inputs), slope(policy_loss, inputs))


def test_a_ratio_beyond_every_float_stays_finite() -> None:
    for loss in (policy_loss, gspo, gspo_token, cispo):
        far = torch.full((1, 2), -1.0, dtype=torch.float64).requires_grad_()
        inputs = inputs_of(far, old_log_probs=[[-1e4, -1e4]], advantages=[[-1.0, -1.0]])
        assert loss(loss_args(), inputs).values.isfinite().all()


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_the_name_of_the_estimator_selects_the_loss(name: str) -> None:
    registry = PluginRegistry.from_flags(())
    assert algorithm_of(name).loss == name
    assert registry.resolve("advantage", name) is registry.resolve("advantage", "grpo")
    assert objective_of(advantage_estimator=name).unit is unit_of(registry.resolve("loss", name))


def test_losses_of_whole_rows_say_so() -> None:
    assert [unit_of(loss) for loss in (policy_loss, cispo, gspo, gspo_token)] == [Unit.TOKEN] * 2 + [Unit.ROW] * 2
