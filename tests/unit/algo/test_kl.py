from __future__ import annotations

import math

import pytest
import torch

from buffer_rl.algo.kl import KLEstimator as Estimator
from buffer_rl.algo.kl import kl_estimate
from buffer_rl.algo.losses import MAX_LOG_RATIO
from buffer_rl.errors import ConfigError


def _distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the policy (with gradient) and log-probabilities of the reference over a vocabulary of 7."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_the_whole_vocabulary_is_the_kl_divergence(estimator: Estimator) -> None:
    logits, log_q = _distributions()
    log_p = logits.log_softmax(-1)
    mean = (log_p.exp() * kl_estimate(log_p, log_q, estimator)).sum()
    torch.testing.assert_close(mean, _kl(log_p, log_q))


def test_k2_is_biased_but_close_for_close_distributions() -> None:
    log_p = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    log_q = torch.tensor([0.51, 0.49], dtype=torch.float64).log()
    mean = (log_p.exp() * kl_estimate(log_p, log_q, "k2")).sum()
    assert mean.item() == pytest.approx(_kl(log_p, log_q).item(), rel=1e-3)
    assert mean.item() != pytest.approx(_kl(log_p, log_q).item(), rel=1e-6)


def test_estimates_of_one_token_match_hand_computed_numbers() -> None:
    log_p, log_q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_estimate(log_p, log_q, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(log_p, log_q, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(log_p, log_q, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


def _expected_gradient(estimator: Estimator) -> torch.Tensor:
    """Of the estimator as a loss: sampled tokens do not carry a gradient, only their log-probabilities do."""
    logits, log_q = _distributions()
    log_p = logits.log_softmax(-1)
    (log_p.exp().detach() * kl_estimate(log_p, log_q, estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_the_expected_gradient_of_k1_is_zero() -> None:
    torch.testing.assert_close(_expected_gradient("k1"), torch.zeros(7, dtype=torch.float64))


def test_the_expected_gradient_of_k2_is_that_of_the_reverse_kl() -> None:
    logits, log_q = _distributions()
    _kl(logits.log_softmax(-1), log_q).backward()
    torch.testing.assert_close(_expected_gradient("k2"), logits.grad)


def test_the_expected_gradient_of_k3_is_that_of_the_forward_kl() -> None:
    logits, log_q = _distributions()
    _kl(log_q, logits.log_softmax(-1)).backward()
    torch.testing.assert_close(_expected_gradient("k3"), logits.grad)


def test_k3_stays_finite_and_keeps_no_gradient_beyond_the_clamp() -> None:
    log_p = torch.tensor([-200.0, -1.0, 0.0], requires_grad=True)
    values = kl_estimate(log_p, torch.tensor([-1.0, -200.0, -1.0]), "k3")
    values.sum().backward()
    assert values[0].item() == pytest.approx(math.expm1(MAX_LOG_RATIO) - MAX_LOG_RATIO)
    assert values[1].item() == pytest.approx(MAX_LOG_RATIO - 1)
    assert log_p.grad is not None
    assert log_p.grad.tolist() == pytest.approx([0.0, 0.0, 1 - math.exp(-1)])


def test_an_unknown_estimator_is_an_error() -> None:
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_low_var_kl_is_k3_cut_off_at_ten_nats() -> None:
    """r - 1 - log r: with log r = 2, -2, 3 and -12 it is 4.39, 1.14, 16.1 and 11.0."""
    log_p = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([2.0, -2.0, 3.0, -12.0], dtype=torch.float64)
    values = kl_estimate(log_p, log_q, "low_var_kl")
    values.sum().backward()
    expected = [math.exp(2) - 3, math.exp(-2) + 1, 10.0, 10.0]
    assert values.tolist() == pytest.approx(expected)
    assert log_p.grad is not None
    # d/d log p of r - 1 - log r is 1 - r; nothing beyond the cut
    assert log_p.grad.tolist() == pytest.approx([1 - math.exp(2), 1 - math.exp(-2), 0.0, 0.0])


@pytest.mark.parametrize(("straight", "value"), [("k1+", "k1"), ("k3+", "k3")])
def test_straight_through_estimates_have_the_value_of_one_and_the_gradient_of_k2(
    straight: Estimator, value: Estimator
) -> None:
    log_p = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([-2.0, -0.5, -0.5], dtype=torch.float64)
    found = kl_estimate(log_p, log_q, straight)
    torch.testing.assert_close(found, kl_estimate(log_p, log_q, value))
    found.sum().backward()
    torch.testing.assert_close(log_p.grad, log_p.detach() - log_q)  # d/dx of x^2 / 2


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_the_expected_gradient_of_a_straight_through_estimate_is_that_of_the_reverse_kl(estimator: Estimator) -> None:
    logits, log_q = _distributions()
    _kl(logits.log_softmax(-1), log_q).backward()
    torch.testing.assert_close(_expected_gradient(estimator), logits.grad)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_gradients_equal_finite_differences(estimator: Estimator) -> None:
    log_p = torch.tensor([-1.0, -2.0, -0.5, -9.0], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([-2.0, -0.5, -0.6, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda given: kl_estimate(given, log_q, estimator), log_p)
