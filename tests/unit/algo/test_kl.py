from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from buffer_rl.algo.losses import MAX_LOG_RATIO, kl_estimate
from buffer_rl.errors import ConfigError

Estimator = Literal["k1", "k2", "k3"]


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
    with pytest.raises(ConfigError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
