"""DPO: which samples are a pair, hand-derived numbers, its divisor, its gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.algo.dpo import dpo
from buffer_rl.driver.role_checks import _check_loss
from buffer_rl.errors import ConfigError
from buffer_rl.kinds.marks import Unit
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, RowId
from harness.formulas import check_gradient, inputs_of
from harness.losses import batch_of, loss_args, objective_of, outcome, with_sizes

LOG_3 = math.log(3)


def rows(ids: list[tuple[int, int, int]], rewards: list[float], masks: list[list[float]]) -> Any:
    """Rows of these prompts, samples and parts; the reference gives each token -1."""
    columns: dict[str, Any] = {
        "loss_mask": [np.asarray(mask, dtype=np.float32) for mask in masks],
        "ref_log_probs": [np.full(len(mask), -1, dtype=np.float32) for mask in masks],
        "reward": np.asarray(rewards, dtype=np.float32),
    }
    return with_sizes(batch_of([RowId(GroupUid("data", p, 0), sample, part) for p, sample, part in ids], columns))


def test_the_best_and_the_worst_sample_of_a_prompt_are_a_pair() -> None:
    """Of the first prompt: d_chosen = 2 log 3 + log 3 over two tokens, d_rejected = log 3 with one token masked: the
    margin is 0.5 x 2 log 3, its sigmoid 3 / 4. The second prompt's rewards are equal: no pair."""
    batch = rows(
        [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0)], [0.5, 2, -1, 1, 1], [[1], [1, 1], [1, 0], [1], [1]]
    )
    log_probs: list[list[float]] = [[-9], [-1 + 2 * LOG_3, -1 + LOG_3], [-1 + LOG_3, 7], [-5], [-6]]
    objective = objective_of(loss_type="dpo", dpo_beta=0.5)
    assert objective.unit is Unit.GROUP
    found = outcome(objective, batch, log_probs)
    assert found.sums.divisor == 1
    assert found.means["loss"] == pytest.approx(-math.log(3 / 4))
    assert found.means["dpo_margin"] == pytest.approx(LOG_3)
    assert found.means["dpo_accuracy"] == 1
    # -beta (1 - sigmoid) by each token of the chosen sample, the opposite by those of the rejected one
    slopes: list[list[float]] = [[0], [-0.125] * 2, [0.125, 0], [0], [0]]
    for row, expected in zip(found.log_prob_gradients, slopes, strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_the_loss_is_the_mean_over_pairs() -> None:
    batch = rows([(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)], [1, 0, 0, 1], [[1]] * 4)
    found = outcome(objective_of(loss_type="dpo", dpo_beta=0.5), batch, [[-1 + LOG_3], [-1], [-1 + LOG_3], [-1]])
    # margins of +-log(3) / 2, whose sigmoids are sqrt(3) / (1 + sqrt(3)) and 1 / (1 + sqrt(3))
    assert found.means["loss"] == pytest.approx(-math.log(math.sqrt(3) / (1 + math.sqrt(3)) ** 2) / 2)
    assert found.means["dpo_accuracy"] == 0.5
    assert found.means["dpo_margin"] == pytest.approx(0, abs=1e-6)


def test_all_parts_of_a_sample_count_together() -> None:
    """Another prompt has a pair as well, which weighs as much."""
    other = [(1, 0, 0), (1, 1, 0)]
    whole = rows([(0, 0, 0), (0, 1, 0), *other], [1, 0, 1, 0], [[1, 1, 1], [1], [1], [1]])
    ids = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), *other]
    parts = rows(ids, [1, 1, 1, 0, 1, 0], [[1], [0, 1], [1], [1], [1], [1]])
    objective = objective_of(loss_type="dpo")
    one = outcome(objective, whole, [[-2, -1.5, -3], [-2], [-1], [-4]])
    fanned = outcome(objective, parts, [[-2], [-9, -1.5], [-3], [-2], [-1], [-4]])
    assert fanned.means == pytest.approx(one.means | {name: fanned.means[name] for name in ("log_probs", "entropy")})
    gradients = np.concatenate(fanned.log_prob_gradients)[[0, 2, 3, 4, 5, 6]]
    np.testing.assert_allclose(gradients, np.concatenate(one.log_prob_gradients), rtol=1e-5)


def test_a_sample_that_is_masked_entirely_is_in_no_pair() -> None:
    batch = rows([(0, 0, 0), (0, 1, 0), (0, 2, 0)], [5, 1, 0], [[0], [1], [1]])
    found = outcome(objective_of(loss_type="dpo", dpo_beta=1.0), batch, [[-3], [-1 + LOG_3], [-1]])
    assert found.means["loss"] == pytest.approx(-math.log(3 / 4))


def test_of_equal_rewards_the_first_sample_counts_in_any_order_of_rows() -> None:
    shifts = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    inputs = inputs_of(shifts, ref_log_probs=[[0.0]] * 4, reward=[1.0, 0.0, 1.0, 0.0])
    args = loss_args(dpo_beta=1.0)
    assert dpo(args, inputs).metrics["dpo_margin"].values.tolist() == [-1, 0, 0, 0]  # samples 0 and 1
    order = [3, 2, 1, 0]
    turned = inputs_of(shifts[order], ref_log_probs=[[0.0]] * 4, reward=[0.0, 1.0, 0.0, 1.0])
    turned.row_ids[:] = [inputs.row_ids[index] for index in order]
    assert dpo(args, turned).metrics["dpo_margin"].values.tolist() == [0, 0, 0, -1]


def test_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    above_1 = float(np.nextafter(np.float32(1), np.float32(2)))
    shifts, references = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), [[0.0]] * 4
    for rewards, margins in (([1.0, 0.0, above_1, 0.0], [-1, 0, 0, 0]), ([1.0, above_1, 1.0, 1.0], [0, 0, 0, 0])):
        inputs = inputs_of(shifts, ref_log_probs=references, reward=rewards)
        assert dpo(loss_args(dpo_beta=1.0), inputs).metrics["dpo_margin"].values.tolist() == margins


def test_a_step_without_pairs_has_no_gradient() -> None:
    found = outcome(objective_of(loss_type="dpo"), rows([(0, 0, 0), (0, 1, 0)], [1, 1], [[1], [1]]), [[-1], [-2]])
    assert found.sums.divisor == found.means["loss"] == 0
    assert not np.concatenate(found.log_prob_gradients).any()


def test_its_gradient_equals_finite_differences() -> None:
    check_gradient(dpo, dpo_beta=0.7)


def test_without_a_reference_a_run_ends_before_it_starts() -> None:
    args, registry = loss_args(loss_type="dpo"), PluginRegistry.from_flags(())
    with pytest.raises(ConfigError, match="--use-kl-loss"):
        _check_loss(args, registry)
