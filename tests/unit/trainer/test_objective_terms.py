"""What the framework makes of a loss's numbers: weights, divisors, KL and entropy terms, metrics; hand-derived numbers
on given log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.errors import DataError
from buffer_rl.kinds.marks import loss_unit
from buffer_rl.kinds.token_loss import LossInputs, Metric, Sums, TokenLoss
from buffer_rl.records.groups import TrainBatch
from harness.losses import MODES, objective_of, outcome, rows_of

LOG_2 = math.log(2)
LOG_PROBS = [[-2.0 + LOG_2, -1.0 - LOG_2], [-1.5, -1.0]]
ENTROPY = [[0.3, 0.6], [0.9, 7.0]]


def step(**columns: Any) -> TrainBatch:
    """Two samples of two tokens; the last token is masked. The ratios are 2, 1/2, 1 and (masked) e^49."""
    defaults = {
        "loss_mask": [[1, 1], [1, 0]],
        "old_log_probs": [[-2, -1], [-1.5, -50]],
        "advantages": [[1, 1], [-3, 5]],
    }
    return rows_of(**{name: rows for name, rows in {**defaults, **columns}.items() if rows is not None})


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", -(1.2 + 0.5 - 3) / 3),
        ("seq-mean-token-mean", -((1.2 + 0.5) / 2 + -3 / 1) / 2),
        ("seq-mean-token-sum", -(1.2 + 0.5 - 3) / 2),
    ],
)
def test_the_policy_loss_and_its_metrics_match_hand_computed_numbers(mode: str, expected: float) -> None:
    found = outcome(objective_of(loss_agg_mode=mode), step(), LOG_PROBS, ENTROPY)
    assert found.means["loss"] == pytest.approx(expected)
    assert found.means["pg_loss"] == pytest.approx(expected)
    assert found.means["pg_clipfrac"] == pytest.approx(1 / 3)
    assert found.means["ppo_kl"] == pytest.approx(0.0, abs=1e-6)  # (-log 2 + log 2 + 0) / 3
    assert found.means["entropy"] == pytest.approx(0.6)
    assert found.means["log_probs"] == pytest.approx((-2 + LOG_2 - 1 - LOG_2 - 1.5) / 3)


def test_clipped_and_masked_tokens_carry_no_gradient() -> None:
    found = outcome(objective_of(), step(), LOG_PROBS)
    # d/d log_prob of -A x ratio is -A x ratio; the first token is clipped, the last masked
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), np.array([[0, -0.5], [3, 0]]) / 3, rtol=1e-6)


def test_without_old_log_probs_the_ratio_is_one_and_keeps_its_gradient() -> None:
    found = outcome(objective_of(), step(old_log_probs=None), LOG_PROBS)
    assert found.means["loss"] == pytest.approx(-(1 + 1 - 3) / 3)
    assert found.means["pg_clipfrac"] == 0
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), np.array([[-1, -1], [3, 0]]) / 3, rtol=1e-6)


def test_the_engines_log_probs_can_be_the_old_ones() -> None:
    batch = step(rollout_log_probs=[[-2 + LOG_2, -1 - LOG_2], [-1.5, -50]])
    found = outcome(objective_of(use_rollout_logprobs=True), batch, LOG_PROBS)
    assert found.means["loss"] == pytest.approx(-(1 + 1 - 3) / 3)
    assert found.means["train_rollout_logprob_abs_diff"] == pytest.approx(0, abs=1e-6)


def test_the_gap_between_trainer_and_engine_is_measured() -> None:
    found = outcome(objective_of(), step(rollout_log_probs=[[-2.1, -1.2], [-1.5, 9.0]]), LOG_PROBS)
    assert found.means["train_rollout_logprob_abs_diff"] == pytest.approx(0.1)
    assert "train_rollout_logprob_abs_diff" not in outcome(objective_of(), step(), LOG_PROBS).means


def test_the_gap_is_the_mean_over_the_tokens_of_an_engine() -> None:
    batch = step(rollout_log_probs=[[-2.1, -1.3], [math.nan, math.nan]])
    found = outcome(objective_of(), batch, LOG_PROBS)
    assert found.means["train_rollout_logprob_abs_diff"] == pytest.approx((0.1 + 0.3) / 2, rel=1e-5)
    assert found.means["loss"] == outcome(objective_of(), step(), LOG_PROBS).means["loss"]


def test_the_kl_penalty_is_added_with_its_weight() -> None:
    batch = step(old_log_probs=None, ref_log_probs=[[-1, -1], [-1, -1]])
    found = outcome(objective_of(use_kl_loss=True, kl_loss_coef=0.1), batch, [[0, 0], [0, 0]])
    k3 = math.exp(-1) - 1 + 1
    assert found.means["kl_loss"] == pytest.approx(k3)
    assert found.means["loss"] == pytest.approx(1 / 3 + 0.1 * k3)


def test_the_entropy_bonus_is_subtracted_and_carries_its_gradient() -> None:
    found = outcome(objective_of(entropy_coef=0.5), step(old_log_probs=None), LOG_PROBS, ENTROPY)
    assert found.means["loss"] == pytest.approx(1 / 3 - 0.5 * 0.6, rel=1e-5)
    np.testing.assert_allclose(np.stack(found.entropy_gradients), -0.5 * np.array([[1, 1], [1, 0]]) / 3, rtol=1e-6)


@pytest.mark.parametrize("masked", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_and_masked_reaches_neither_loss_nor_gradient(masked: float) -> None:
    batch = step(old_log_probs=[[-2, -1], [-1.5, masked]], advantages=[[1, 1], [-3, masked]])
    found = outcome(objective_of(), batch, [LOG_PROBS[0], [-1.5, masked]], [[0, 0], [0, masked]])
    assert found.means["loss"] == pytest.approx(-(1.2 + 0.5 - 3) / 3)
    assert np.isfinite(found.log_prob_gradients).all()


def test_the_supervised_loss_has_no_terms_of_the_framework() -> None:
    options = {"loss_type": "sft_loss", "use_kl_loss": True, "kl_loss_coef": 1.0, "entropy_coef": 1.0}
    found = outcome(objective_of(**options), step(), [[-1, -2], [-6, -99]], ENTROPY)
    assert found.means["loss"] == pytest.approx(3.0)
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), np.array([[-1, -1], [-1, 0]]) / 3, rtol=1e-6)
    options["loss_agg_mode"] = "seq-mean-token-sum"
    assert outcome(objective_of(**options), step(), [[-1, -2], [-6, -99]]).means["loss"] == pytest.approx(4.5)


@pytest.mark.parametrize("old", [[[-2, -1], [-1.5, math.nan]], None])
def test_a_loss_sees_0_wherever_a_token_is_masked(old: list[list[float]] | None) -> None:
    """In every column of tokens, whether a token is masked or padding. It may declare that it needs the old
    log-probabilities, though they may be its own."""
    nan, seen = math.nan, []

    @loss_unit("token", needs=("old_log_probs", "advantages"))
    def looks(args: Any, inputs: LossInputs) -> TokenLoss:
        tensors = [inputs.log_probs, inputs.entropy, inputs.values, inputs.old_log_probs, inputs.advantages]
        seen.extend(tensor[inputs.loss_mask == 0].tolist() for tensor in tensors)
        assert not inputs.old_log_probs.requires_grad
        return TokenLoss(inputs.log_probs)

    batch = step(advantages=[[1, 1], [-3, nan]], old_log_probs=old)
    given = torch.tensor([[-1.0, -1.0, nan], [-1.0, nan, nan]], requires_grad=True)
    objective_of(custom_loss_function_path=looks)(given, given, batch, given)
    assert seen == [[0.0] * 3] * 5


def rejecting(args: Any, inputs: LossInputs) -> TokenLoss:
    """Tokens whose column ``keep`` is 0 leave the divisor."""
    return TokenLoss(-inputs.advantages * inputs.log_probs, weights=inputs["keep"])


def test_a_token_that_a_losss_own_weights_reject_leaves_the_divisor() -> None:
    """D is 2 + 1 = 3 under any mode: the second token is rejected, and the last one is masked whatever its weight."""
    batch = step(keep=[[2, 0], [1, 9]])
    for mode in MODES:
        found = outcome(
            objective_of(custom_loss_function_path=rejecting, loss_agg_mode=mode), batch, [[-1, -2], [-4, 0]]
        )
        assert found.sums.divisor == 3
        assert found.means["loss"] == pytest.approx((2 * 1 - 12) / 3)
        np.testing.assert_allclose(np.stack(found.log_prob_gradients), np.array([[-2, 0], [3, 0]]) / 3, rtol=1e-6)


def test_weights_have_no_gradient_and_may_be_nan_where_masked() -> None:
    def by_probability(args: Any, inputs: LossInputs) -> TokenLoss:
        weights = torch.where(inputs.loss_mask != 0, inputs.log_probs.exp(), torch.nan)
        return TokenLoss(-inputs.log_probs, weights=weights)

    found = outcome(objective_of(custom_loss_function_path=by_probability), step(), [[0, -LOG_2], [-LOG_2, 0]])
    assert found.sums.divisor == pytest.approx(2)
    assert found.means["loss"] == pytest.approx(LOG_2 / 2)
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), -np.array([[1, 0.5], [0.5, 0]]) / 2, rtol=1e-6)


@loss_unit("row")
def sequence_mean(args: Any, inputs: LossInputs) -> TokenLoss:
    """A number for each row: the mean of its log-probabilities, negative."""
    mask = inputs.loss_mask
    return TokenLoss(-(inputs.log_probs * mask).sum(-1) / mask.sum(-1).clamp(min=1))


def three_samples(**columns: Any) -> TrainBatch:
    """Samples of two parts, of one, and of one that is masked entirely."""
    mask = [[1, 1], [1], [1, 1], [0]]
    return step(loss_mask=mask, sample_parts=[2, 2, 1, 1], sample_total_tokens=[3, 3, 2, 0], **columns)


ROWS = [[-1.0, -3.0], [-6.0], [-2.0, -2.0], [-9.0]]


@pytest.mark.parametrize("mode", MODES)
def test_a_number_for_each_row_is_averaged_over_samples(mode: str) -> None:
    batch = three_samples(old_log_probs=None, advantages=None)
    objective = objective_of(custom_loss_function_path=sequence_mean, loss_agg_mode=mode)
    found = outcome(objective, batch, ROWS)
    assert found.sums.divisor == 3, "a sample that is masked entirely counts"
    assert found.means["loss"] == pytest.approx(((2 + 6) / 2 + 2 + 0) / 3)
    expected = [[-0.25, -0.25], [-0.5], [-0.5, -0.5], [0]]
    for gradient, row in zip(found.log_prob_gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, np.array(row) / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "kl", "entropy"),
    [
        ("token-mean", (2 + 6) / 2 + 2, (2 + 4) / 2 + 1),
        ("seq-mean-token-mean", (2 + 6) / 2 + 2, (2 + 4) / 2 + 1),
        ("seq-mean-token-sum", (4 + 6) / 2 + 4, (4 + 4) / 2 + 2),
    ],
)
def test_kl_and_entropy_take_the_shape_and_the_weights_of_numbers_for_rows(
    mode: str, kl: float, entropy: float
) -> None:
    """k1 against a reference of 0, with the negative sign: the same numbers as the loss."""
    zeros = [[0.0] * len(row) for row in ROWS]
    batch = three_samples(old_log_probs=None, advantages=None, ref_log_probs=zeros)
    options = {"use_kl_loss": True, "kl_loss_type": "k1", "kl_loss_coef": 0.5, "entropy_coef": 0.1}
    objective = objective_of(custom_loss_function_path=sequence_mean, loss_agg_mode=mode, **options)
    found = outcome(objective, batch, ROWS, [[1, 3], [4], [1, 1], [9]])
    assert found.means["kl_loss"] == pytest.approx(-kl / 3)
    assert found.means["loss"] == pytest.approx((6 - 0.5 * kl - 0.1 * entropy) / 3)


def measured(args: Any, inputs: LossInputs) -> TokenLoss:
    values = -inputs.log_probs
    rows = inputs.log_probs.sum(-1)
    metrics = {"mean": values, "mean_of_rows": rows}
    metrics |= {"largest": Metric(values, "max"), "smallest_row": Metric(rows, "min"), "again": Metric(values, "loss")}
    return TokenLoss(values, metrics=metrics)


def test_a_metric_is_reduced_as_it_says() -> None:
    batch = three_samples(old_log_probs=None, advantages=None)
    options = {"custom_loss_function_path": measured, "loss_agg_mode": "seq-mean-token-mean"}
    for blocks in ([[0, 1, 2, 3]], [[3], [1], [2, 0]]):
        found = outcome(objective_of(**options), batch, ROWS, blocks=blocks).means
        assert found["mean"] == pytest.approx((1 + 3 + 6 + 2 + 2) / 5)
        assert found["mean_of_rows"] == pytest.approx(((-4 - 6) / 2 - 4) / 2), (
            "samples that are masked entirely are out"
        )
        assert (found["largest"], found["smallest_row"]) == (6, -6)
        assert [found["again"], found["loss"]] == pytest.approx([(10 / 3 + 2) / 3] * 2)


def test_nothing_has_no_largest_value_and_a_mean_of_0() -> None:
    batch = step(loss_mask=[[0, 0], [0, 0]], advantages=None)
    found = outcome(objective_of(custom_loss_function_path=measured), batch, LOG_PROBS).means
    assert (found["loss"], found["mean"], found["mean_of_rows"]) == (0, 0, 0)
    assert not {"largest", "smallest_row"} & found.keys()


def test_sums_of_ranks_without_rows_or_metrics_add_nothing() -> None:
    whole = outcome(objective_of(custom_loss_function_path=measured), step(), LOG_PROBS).sums
    assert (Sums() + whole + Sums()).means() == whole.means()
    assert Sums().means() == {"loss": 0.0}


def test_a_loss_reads_any_column_a_number_for_each_token_or_row() -> None:
    seen: dict[str, list[Any]] = {}

    def reader(args: Any, inputs: LossInputs) -> TokenLoss:
        seen.update({name: inputs[name].tolist() for name in ("by_token", "by_row", "listed")})
        assert inputs.get("absent") is None
        return TokenLoss(-inputs.log_probs)

    batch = step(by_token=[[1, 2], [3, 4]], by_row=[5, 6])
    batch.columns["listed"] = [7, 8]  # type: ignore[list-item]
    outcome(objective_of(custom_loss_function_path=reader), batch, LOG_PROBS, padding=1)
    assert seen == {"by_token": [[1, 2, 0], [3, 0, 0]], "by_row": [5, 6], "listed": [7, 8]}
    batch.columns["listed"] = ["hard", "easy"]  # type: ignore[list-item]
    with pytest.raises(DataError, match="listed holds no numbers"):
        outcome(objective_of(custom_loss_function_path=reader), batch, LOG_PROBS)
