"""The KL coefficient of a run with a target: what it is compared with, what it changes, and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from buffer_rl.errors import CheckpointError
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.steps import KL_FILE, KLControl, StepReport
from harness.losses import MODES, objective_of, outcome, rows_of

# 3 groups of 4 samples and a horizon of 120: a relative error of 0.2 changes the coefficient by 2%.
TARGET = {"kl_target": 0.5, "kl_horizon": 120.0, "rollout_batch_size": 3, "n_samples_per_prompt": 4}
IN_LOSS = {**TARGET, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}
IN_REWARDS = {**TARGET, "kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"}

LOG_PROBS = [[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]


def step() -> TrainBatch:
    """Two samples with 2 and 1 unmasked tokens, a policy that moved by 0.5 since they were sampled; the log-ratios to
    the reference are 2, (90, masked), -1 and 3 now, 1.5, -1.5 and 2.5 before."""
    return rows_of(
        loss_mask=[[1, 0, 1], [1, 0, 0]],
        old_log_probs=[[-1.5, -2.5, -3.5], [-1.5, -1.5, -1.5]],
        ref_log_probs=[[-3, -92, -2], [-4, -1, -1]],
        advantages=[[1, 1, 1], [1, 1, 1]],
    )


def reported(objective: Objective) -> StepReport:
    found = outcome(objective, step(), LOG_PROBS)
    return StepReport(sums=[found.sums], metrics=[{"grad_norm": 1.0, "lr": 0.1}])


@pytest.mark.parametrize("mode", MODES)
def test_what_is_measured_is_the_mean_over_tokens_of_the_penaltys_estimate_whatever_the_loss_averages(
    mode: str,
) -> None:
    in_loss = outcome(objective_of(**IN_LOSS, loss_agg_mode=mode), step(), LOG_PROBS).means
    assert in_loss["ref_kl"] == pytest.approx((2**2 / 2 + 1 / 2 + 3**2 / 2) / 3)
    in_rewards = outcome(objective_of(**IN_REWARDS, loss_agg_mode=mode), step(), LOG_PROBS).means
    assert in_rewards["ref_kl"] == pytest.approx((1.5 - 1.5 + 2.5) / 3)
    fixed = outcome(objective_of(use_kl_loss=True, kl_loss_coef=0.1), step(), LOG_PROBS).means
    assert "ref_kl" not in fixed


def test_the_penalty_of_the_loss_has_the_adapted_coefficient_from_the_next_rollout_on() -> None:
    objective = objective_of(**IN_LOSS)
    control = KLControl(objective._args, objective)
    before = outcome(objective, step(), LOG_PROBS).means
    report = reported(objective)
    control.adapt(report)
    assert (report.kl_coef, objective.kl_coef) == (0.1, pytest.approx(0.1 * 1.02))  # 7 / 3 nats: far above 0.5
    after = outcome(objective, step(), LOG_PROBS).means
    assert after["loss"] - before["loss"] == pytest.approx(0.1 * 0.02 * 7 / 3, rel=1e-4)
    assert StepReport.metrics_of([report])["kl_coef"] == 0.1


def test_token_rewards_have_the_adapted_coefficient() -> None:
    objective = objective_of(**IN_REWARDS, gamma=1.0)
    rows = step()
    del rows.columns["advantages"]
    rows.columns["reward"] = np.array([1.0, 2.0], dtype=np.float32)
    KLControl(objective._args, objective).adapt(reported(objective))
    assert objective.kl_coef == pytest.approx(0.1 * 1.02)  # 2.5 / 3 nats: more than a fifth above 0.5
    objective.compute_advantages(rows)
    # returns: minus the coefficient times the log-ratios to come, plus the reward
    first, second = (row.tolist() for row in rows.columns["returns"])
    assert first == pytest.approx([1 - 0.102 * 0.0, 0, 1 + 0.102 * 1.5])
    assert second == pytest.approx([2 - 0.102 * 2.5, 0, 0])


def test_all_steps_of_a_rollout_count_by_their_tokens_and_steps_that_were_left_out_do_not() -> None:
    objective = objective_of(**{**IN_LOSS, "kl_target": 2.8})
    control = KLControl(objective._args, objective)
    report = reported(objective)
    report.sums.append(outcome(objective, step().select([1]), LOG_PROBS[1:]).sums)
    control.adapt(report)
    control.adapt(StepReport())
    # (2 + 0.5 + 4.5 + 4.5) / 4 = 2.875 nats a token, 0.075 above the target
    assert objective.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 0.075 / 2.8), rel=1e-7)


def test_the_metric_is_the_number_that_is_compared_with_the_target() -> None:
    """Of two steps, the first with three tokens: their mean over tokens, not the mean of their means, 2.33 and 4.5."""
    objective = objective_of(**{**IN_LOSS, "kl_target": 2.8})
    report = reported(objective)
    report.sums.append(outcome(objective, step().select([1]), LOG_PROBS[1:]).sums)
    report.metrics *= 2
    KLControl(objective._args, objective).adapt(report)
    compared = StepReport.metrics_of([report])["ref_kl"]
    assert compared == 2.875
    error = (compared - 2.8) / 2.8
    assert objective.kl_coef == 0.1 * (1 + error * 12 / 120)


def test_a_fixed_coefficient_stays_and_has_no_file(tmp_path: Path) -> None:
    objective = objective_of(use_kl_loss=True, kl_loss_coef=0.1)
    control = KLControl(objective._args, objective)
    report = reported(objective)
    control.adapt(report)
    control.save(str(tmp_path))
    assert (report.kl_coef, objective.kl_coef, list(tmp_path.iterdir())) == (None, None, [])
    (tmp_path / KL_FILE).write_text('{"kl_coef": 7.0}')
    args = objective._args
    control.load(str(tmp_path))
    assert objective._args is args


def test_a_coefficient_that_was_saved_is_loaded_to_the_last_bit(tmp_path: Path) -> None:
    first, second = objective_of(**IN_REWARDS), objective_of(**IN_REWARDS)
    KLControl(first._args, first).adapt(reported(first))
    first.kl_coef = float(np.nextafter(first.kl_coef or 0.0, 1.0))
    KLControl(first._args, first).save(str(tmp_path))
    control = KLControl(second._args, second)
    control.load(str(tmp_path))
    assert second.kl_coef == first.kl_coef != 0.1
    control.load(str(tmp_path / "of a run with a fixed coefficient"))
    assert second.kl_coef == first.kl_coef
    in_loss = objective_of(**IN_LOSS)
    KLControl(in_loss._args, in_loss).load(str(tmp_path))
    assert in_loss.kl_coef == 0.1  # what was saved is the weight of another penalty
    (tmp_path / KL_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="kl_coef"):
        control.load(str(tmp_path))
