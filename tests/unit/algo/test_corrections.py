"""Weights between engine and trainer: hand-derived numbers, and what the objective makes of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.algo.corrections import truncated_weights
from buffer_rl.algo.options import LossOptions
from buffer_rl.errors import ConfigError, PluginError, TrainError
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss
from buffer_rl.plan.algorithms import LOSSES
from buffer_rl.records.groups import TrainBatch
from harness.formulas import inputs_of
from harness.losses import MODES, Outcome, loss_args, objective_of, outcome, rows_of

WEIGHTS = [[4.0, 0.5, 0.25], [3.0, 3.0, 1.0], [0.4, 2.0, 9.0]]
"""Probability under the trainer over that under the engine. The last token of each row is masked."""
MASK = [[1, 1, 0]] * 3


def inputs() -> LossInputs:
    """At positions that are masked all columns are 0, as the framework gives them."""
    old = (torch.tensor(WEIGHTS, dtype=torch.float64).log() - 3) * torch.tensor(MASK)
    rollout = torch.full((3, 3), -3.0, dtype=torch.float64) * torch.tensor(MASK)
    return inputs_of(old.clone().requires_grad_(), old_log_probs=old, rollout_log_probs=rollout, loss_mask=MASK)


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("truncate", 0.0, 2.0, [[2, 0.5], [2, 2], [0.4, 2]]),
        ("truncate", 0.5, 3.5, [[3.5, 0.5], [3, 3], [0.5, 2]]),
        ("token", 0.45, 3.5, [[0, 0.5], [3, 3], [0, 2]]),  # IcePop
        ("sequence", 0.5, 5.0, [[2, 2], [0, 0], [0.8, 0.8]]),  # products 2, 9 and 0.8
        ("geometric", 0.85, 1.5, [[1, 1], [0, 0], [1, 1]]),  # square roots 1.41, 3 and 0.894
    ],
)
def test_weights_match_hand_computed_numbers(mode: str, low: float, high: float, expected: list[list[float]]) -> None:
    args = loss_args(tis_mode=mode, tis_clip_low=low, tis_clip=high)
    found = truncated_weights(args, inputs())
    torch.testing.assert_close(found[:, :2], torch.tensor(expected, dtype=torch.float64))


LOG_PROBS = [[-1.0, -2.0], [-1.5, -1.0]]


def step(**columns: Any) -> TrainBatch:
    """Two samples of two tokens, the last masked; the ratio of the loss is 1. The weights are 4, 1/2 and 1."""
    log_4, log_2 = math.log(4), math.log(2)
    given = {
        "loss_mask": [[1, 1], [1, 0]],
        "old_log_probs": LOG_PROBS,
        "rollout_log_probs": [[-1 - log_4, -2 + log_2], [-1.5, -9]],
        "advantages": [[1, 1], [-3, 5]],
    }
    return rows_of(**{name: rows for name, rows in {**given, **columns}.items() if rows is not None})


def found_with(loss: Any = "policy_loss", batch: TrainBatch | None = None, **options: Any) -> Outcome:
    flag = "loss_type" if isinstance(loss, str) else "custom_loss_function_path"
    objective = objective_of(**{flag: loss}, use_tis=True, **options)
    return outcome(objective, step() if batch is None else batch, LOG_PROBS, [[0.3, 0.6], [0.9, 7.0]])


def test_values_are_multiplied_and_the_divisor_stays() -> None:
    found = found_with()
    # -(2 x 1 + 0.5 x 1 - 1 x 3) / 3; the slope of -A r at r = 1 is -A
    assert found.means["loss"] == pytest.approx((-2 - 0.5 + 3) / 3)
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), np.array([[-2, -0.5], [3, 0]]) / 3, rtol=1e-6)


def test_a_rejected_token_has_no_gradient_and_stays_in_the_divisor() -> None:
    found = found_with(tis_mode="token", tis_clip_low=0.45, tis_clip=3.0)
    assert found.sums.divisor == 3
    assert found.means["loss"] == pytest.approx((-0.5 + 3) / 3)
    assert found.means["mismatch/rejected"] == pytest.approx(1 / 3)
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), np.array([[0, -0.5], [3, 0]]) / 3, rtol=1e-6)


def test_metrics_of_the_mismatch_match_hand_computed_numbers() -> None:
    found = found_with().means
    log_4, log_2 = math.log(4), math.log(2)
    # w - 1 - log w of 4, 1/2 and 1
    assert found["mismatch/k3_kl"] == pytest.approx(((3 - log_4) + (-0.5 + log_2) + 0) / 3)
    assert found["mismatch/weight"] == pytest.approx(5.5 / 3)
    assert found["mismatch/chi2"] == pytest.approx((15 - 0.75 + 0) / 3)
    assert found["mismatch/ess"] == pytest.approx((5.5 / 3) ** 2 / ((16 + 0.25 + 1) / 3))
    assert found["mismatch/rejected"] == 0


def test_equal_log_probs_change_nothing() -> None:
    batch = step(rollout_log_probs=LOG_PROBS)
    found, plain = found_with(batch=batch), outcome(objective_of(), batch, LOG_PROBS)
    assert found.means["loss"] == pytest.approx(plain.means["loss"])
    assert found.means["mismatch/ess"] == found.means["mismatch/weight"] == 1
    assert found.means["mismatch/chi2"] == found.means["mismatch/k3_kl"] == 0


def test_penalty_and_bonus_are_not_multiplied() -> None:
    found = found_with(entropy_coef=0.5)
    np.testing.assert_allclose(np.stack(found.entropy_gradients), np.array([[-0.5, -0.5], [-0.5, 0]]) / 3, rtol=1e-6)


def test_a_loss_of_rows_takes_the_mean_weight_of_its_tokens() -> None:
    found = found_with("gspo")
    # rows of ratio 1: -(2 + 0.5) / 2 x 1 and -1 x (-3)
    assert found.means["loss"] == pytest.approx((-1.25 + 3) / 2)


def test_without_old_log_probs_the_weights_start_from_the_present_ones() -> None:
    assert found_with(batch=step(old_log_probs=None)).means["loss"] == pytest.approx((-2 - 0.5 + 3) / 3)


def test_without_the_engines_log_probs_the_column_is_named() -> None:
    with pytest.raises((TrainError, PluginError), match="rollout_log_probs"):
        found_with(batch=step(rollout_log_probs=None))


@loss_unit("token")
def halves(args: Any, inputs: LossInputs) -> torch.Tensor:
    weights: torch.Tensor = 0.5 * inputs.log_probs / inputs.log_probs.detach()
    return weights  # with a gradient, which is not taken


def test_weights_of_ones_own_replace_the_built_in_ones() -> None:
    found = found_with(custom_tis_function_path=halves)
    assert found.means["loss"] == pytest.approx((-0.5 - 0.5 + 1.5) / 3)
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), np.array([[-0.5, -0.5], [1.5, 0]]) / 3, rtol=1e-6)


def test_weights_of_another_shape_are_named() -> None:
    with pytest.raises(PluginError, match=r"a tensor of shape \[2\]"):
        found_with(custom_tis_function_path=lambda args, inputs: inputs.log_probs.sum(-1))


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({}, Unit.TOKEN),
        ({"tis_mode": "geometric"}, Unit.ROW),
        ({"custom_tis_function_path": halves}, Unit.TOKEN),
        ({"custom_tis_function_path": lambda args, inputs: inputs.log_probs}, Unit.ROW),
        ({"loss_type": "gspo"}, Unit.ROW),
    ],
)
def test_the_unit_is_the_wider_one_of_loss_and_correction(options: dict[str, Any], unit: Unit) -> None:
    assert objective_of(use_tis=True, **options).unit is unit


def test_the_supervised_loss_is_not_corrected() -> None:
    found = found_with("sft_loss")
    assert found.means["loss"] == pytest.approx((1 + 2 + 1.5) / 3)
    assert not [name for name in found.means if name.startswith("mismatch")]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_whose_tokens_are_all_rejected_has_no_gradient(mode: str) -> None:
    found = found_with(tis_mode="token", tis_clip_low=10.0, tis_clip=20.0, loss_agg_mode=mode)
    assert found.means["loss"] == 0
    assert not np.stack(found.log_prob_gradients).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_tis": True, "tis_clip_low": 3.0}, "no weight is between 3 and 2"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "every weight would be 1"),
        *(({"use_tis": True, "loss_type": n}, row.uncorrected) for n, row in LOSSES.items() if row.uncorrected),
    ],
)
def test_options_that_contradict_a_correction_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LossOptions.check(loss_args(**options))


def test_a_correction_of_a_policy_loss_is_accepted() -> None:
    LossOptions.check(loss_args(use_tis=True, tis_mode="token", tis_clip_low=0.5, tis_clip=5.0))


def test_token_loss_is_the_only_answer_of_a_loss() -> None:
    """A correction gives weights, a loss gives TokenLoss: neither is taken for the other."""
    with pytest.raises(PluginError, match="a tensor of weights"):
        found_with(custom_tis_function_path=lambda args, inputs: TokenLoss(inputs.log_probs))
