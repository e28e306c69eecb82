"""The coefficient after a rollout: arXiv 1909.08593, section 2.2, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.algo.kl import adapted_coefficient


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.05, 0.1),  # at the target
        (0.055, 0.1 * (1 + 0.1 * 0.1)),  # a tenth above it
        (0.045, 0.1 * (1 - 0.1 * 0.1)),
        (0.06, 0.1 * 1.02),  # the error's bound, 0.2
        (5.0, 0.1 * 1.02),
        (0.0, 0.1 * 0.98),
        (-1.0, 0.1 * 0.98),  # k1 may be negative
        (float("inf"), 0.1 * 1.02),
    ],
)
def test_the_coefficient_moves_by_the_clipped_relative_error_times_the_samples_of_the_horizon(
    make_algo_args: Any, kl: float, expected: float
) -> None:
    # 3 groups of 4 samples and a horizon of 120: K = 0.1, as in the paper
    args = make_algo_args(kl_target=0.05, kl_horizon=120.0, rollout_batch_size=3, n_samples_per_prompt=4)
    assert adapted_coefficient(args, 0.1, kl) == pytest.approx(expected, rel=1e-12)
