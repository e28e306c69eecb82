"""Which log-probabilities stand for which policy if tokens are of older weights than those that are trained, and that
engine and trainer are compared on tokens of equal weights alone; hand-derived numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from buffer_rl.algo.returns import distil, token_rewards
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.plan.algorithm import estimator_needs, old_log_probs_pass, policy_field, trains_on_older
from buffer_rl.plan.schedule import Schedule
from buffer_rl.records.groups import TrainBatch
from harness.losses import loss_args, objective_of, outcome, rows_of

LOG_2 = math.log(2)
NOW = [[-2.0 + LOG_2, -1.0 - LOG_2]]
"""Log-probabilities of the forward pass."""
BEHAVIOUR = [[-2.0, -1.0]]
ASYNC: dict[str, Any] = {"schedule": "async"}


def step(**columns: Any) -> TrainBatch:
    """One sample of two tokens, of which the first has an advantage of 1 and the second one of -3."""
    return rows_of(loss_mask=[[1, 1]], advantages=[[1, -3]], rollout_log_probs=BEHAVIOUR, **columns)


def test_with_one_optimizer_step_the_proximal_policy_of_decoupled_ppo_is_the_forward_pass_itself() -> None:
    found = outcome(objective_of(loss_type="decoupled_ppo", **ASYNC), step(), NOW)
    # The ratio is 1, the weights to the sampling policy are 2 and 1/2: -(2 * 1) and -(1/2 * -3), over two tokens.
    assert found.means["loss"] == pytest.approx((-2.0 + 1.5) / 2)
    assert found.means["behave_weight"] == pytest.approx(1.25)
    assert (found.means["pg_clipfrac"], found.means["ppo_kl"]) == (0.0, 0.0)
    np.testing.assert_allclose(np.stack(found.log_prob_gradients), [[-2 / 2, 1.5 / 2]], rtol=1e-6)


def test_with_several_steps_the_proximal_policy_is_that_of_the_start_of_the_first_step() -> None:
    old = [[-2.0 - LOG_2, -1.0 + LOG_2]]
    found = outcome(objective_of(loss_type="decoupled_ppo", eps_clip=0.2, **ASYNC), step(old_log_probs=old), NOW)
    # Ratios 4 and 1/4, clipped to 1.2 and 0.8; weights from old to sampling policy 1/2 and 2.
    assert found.means["loss"] == pytest.approx((-0.5 * 1.2 + 2 * 3 * 0.8) / 2)
    assert found.means["behave_weight"] == pytest.approx(1.25)
    assert found.means["pg_clipfrac"] == 1.0
    np.testing.assert_array_equal(np.stack(found.log_prob_gradients), [[0.0, 0.0]])


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "lockstep"},
        {"schedule": "pipelined"},
        {"schedule": "one-step-off"},
        {"schedule": "async"},
        {"schedule": "async", "max_staleness": 0},
        {"schedule": "async", "max_staleness": 1},
        {"schedule": "async", "max_staleness": 4, "target_staleness": 1},
    ],
)
def test_the_policy_that_sampled_is_the_engine_in_every_schedule_with_a_staleness(options: dict[str, Any]) -> None:
    args: Any = loss_args(**options)
    older = Schedule.of(args).max_staleness > 0
    assert trains_on_older(args) is older
    assert policy_field(args) == ("rollout_log_probs" if older else "old_log_probs")


@pytest.mark.parametrize(
    ("options", "kl"), [({}, [-1.0, 2.0]), (ASYNC, [0.0, 1.0]), ({"schedule": "one-step-off"}, [0, 1])]
)
def test_kl_in_the_reward_and_distillation_read_the_policy_that_sampled(
    options: dict[str, Any], kl: list[float]
) -> None:
    """kl: log pi minus that of the other model, [-2, -2]; pi is [-3, 0] in the trainer and [-2, -1] when sampled."""
    other = [[-2.0, -2.0]]
    batch = step(old_log_probs=[[-3.0, 0.0]], ref_log_probs=other, teacher_log_probs=other, reward=[5.0])
    args: Any = loss_args(kl_coef=0.5, opd_kl_coef=2.0, use_opd=True, **options)
    (rewards,) = token_rewards(args, batch)
    assert rewards.tolist() == [-0.5 * kl[0], 5.0 - 0.5 * kl[1]]
    distil(args, batch)
    (advantages,) = batch.columns["advantages"]
    assert advantages.tolist() == [1 - 2 * kl[0], -3 - 2 * kl[1]]


def test_an_estimator_with_a_kl_penalty_then_needs_the_engines_log_probs_and_no_pass_for_the_trainers() -> None:
    args: Any = loss_args(advantage_estimator="gae", kl_coef=0.1, **ASYNC)
    objective = objective_of(advantage_estimator="gae", kl_coef=0.1, **ASYNC)
    assert objective.needs == {"rollout_log_probs", "ref_log_probs", "values"}
    assert old_log_probs_pass(args, objective._estimator) == ""
    lockstep: Any = loss_args(advantage_estimator="gae", kl_coef=0.1)
    assert "old_log_probs" in estimator_needs(lockstep, objective._estimator)


GAP = "train_rollout_logprob_abs_diff"


def rows_at(versions: list[int] | None, step: int = 5) -> TrainBatch:
    """Three samples of two tokens, the last one masked, in step ``step``; the engine is 0.1, 0.2 and 0.4 away."""
    batch = rows_of(
        loss_mask=[[1, 0]] * 3, advantages=[[1, 1]] * 3, rollout_log_probs=[[-1.1, 9.0], [-1.2, 9.0], [-1.4, 9.0]]
    )
    batch.rollout_id = step
    if versions is not None:
        batch.columns["weight_version"] = np.asarray(versions, dtype=np.int32)
    return batch


@pytest.mark.parametrize(
    ("versions", "expected"),
    [([5, 5, 5], 0.7 / 3), ([5, 4, 5], 0.25), ([3, 4, 5], 0.4), ([3, 4, 4], None), ([-1, -1, -1], None), (None, None)],
)
def test_the_gap_between_engine_and_trainer_is_of_rows_of_the_trained_version(
    versions: list[int] | None, expected: float | None
) -> None:
    found = outcome(objective_of(loss_type="decoupled_ppo", **ASYNC), rows_at(versions), [[-1.0, -1.0]] * 3)
    assert found.means.get(GAP) == (None if expected is None else pytest.approx(expected, rel=1e-5))
    whole = outcome(objective_of(loss_type="decoupled_ppo", **ASYNC), rows_at([5, 5, 5]), [[-1.0, -1.0]] * 3)
    assert found.means["loss"] == whole.means["loss"]


@pytest.mark.parametrize("versions", [[3, 4, 5], [-1, -1, -1], None])
def test_without_staleness_all_tokens_that_are_trained_on_are_of_the_trained_version(
    versions: list[int] | None,
) -> None:
    found = outcome(objective_of(), rows_at(versions), [[-1.0, -1.0]] * 3)  # older tokens are masked
    assert found.means[GAP] == pytest.approx(0.7 / 3, rel=1e-5)


def test_micro_batches_without_rows_of_the_trained_version_leave_the_gap_of_the_others() -> None:
    objective, whole = objective_of(use_tis=True, **ASYNC), rows_at([4, 5, 5])
    parts = [outcome(objective, whole.select(rows), [[-1.0, -1.0]] * len(rows)).sums for rows in ([0], [1, 2])]
    assert Sums.of(parts).means()[GAP] == pytest.approx(0.3, rel=1e-5)
    assert outcome(objective, whole, [[-1.0, -1.0]] * 3).means[GAP] == pytest.approx(0.3, rel=1e-5)
