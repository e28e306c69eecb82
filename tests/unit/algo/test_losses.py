from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffer_rl.algo.losses import MAX_LOG_RATIO, policy_loss, sft_loss
from buffer_rl.errors import TrainError
from buffer_rl.kinds.token_loss import LossInputs, Metric
from buffer_rl.records.groups import GroupUid, RowId

LOG_2 = math.log(2)


def _args(**overrides: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None} | overrides))


def _inputs(**columns: Any) -> LossInputs:
    """Two rows of two tokens; the last token is masked, and 0 everywhere. The ratios are 2, 1/2 and 1."""
    old = torch.tensor([[-2.0, -1.0], [-1.5, 0.0]])
    columns = {"old_log_probs": old, "advantages": torch.tensor([[1.0, 1.0], [-3.0, 0.0]])} | columns
    return LossInputs(
        log_probs=(old + torch.tensor([[LOG_2, -LOG_2], [0.0, 0.0]])).requires_grad_(),
        entropy=torch.zeros(2, 2),
        loss_mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        row_ids=[RowId(GroupUid("data", 0, 0), index) for index in range(2)],
        column=columns.get,
    )


def test_the_clipped_surrogate_matches_hand_computed_numbers() -> None:
    # -min(2, 1.2) x 1; -min(0.5, 0.8) x 1; -1 x (-3)
    loss = policy_loss(_args(), _inputs())
    torch.testing.assert_close(loss.values, torch.tensor([[-1.2, -0.5], [3.0, 0.0]]))
    assert loss.weights is None
    assert loss.metrics["pg_loss"] == Metric(loss.values, "loss")
    assert loss.metrics["pg_clipfrac"].tolist() == [[True, False], [False, False]]
    torch.testing.assert_close(loss.metrics["ppo_kl"], torch.tensor([[-LOG_2, LOG_2], [0.0, 0.0]]))


def test_a_clipped_token_carries_no_gradient() -> None:
    inputs = _inputs()
    policy_loss(_args(), inputs).values.sum().backward()
    # d/d log_prob of -A x ratio is -A x ratio; the first token is clipped, the last has no advantage
    torch.testing.assert_close(inputs.log_probs.grad, torch.tensor([[0.0, -0.5], [3.0, 0.0]]))


def test_the_clip_range_may_be_asymmetric() -> None:
    loss = policy_loss(
        _args(eps_clip=0.3, eps_clip_high=0.5), _inputs(advantages=torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    )
    # min(2, 1.5) x 1; a negative advantage takes max(0.5, 0.7) x (-1)
    torch.testing.assert_close(loss.values, torch.tensor([[-1.5, 0.7], [0.0, 0.0]]))
    assert loss.metrics["pg_clipfrac"].sum() == 2


def test_a_ratio_beyond_every_float_stays_finite() -> None:
    loss = policy_loss(_args(), _inputs(old_log_probs=torch.full((2, 2), -1e4), advantages=-torch.ones(2, 2)))
    torch.testing.assert_close(loss.values, torch.full((2, 2), math.exp(MAX_LOG_RATIO)))


@pytest.mark.parametrize("missing", ["advantages", "old_log_probs"])
def test_a_missing_column_is_named(missing: str) -> None:
    with pytest.raises(TrainError, match=f"no {missing}"):
        policy_loss(_args(), _inputs(**{missing: None}))


def test_the_supervised_loss_is_the_negative_log_likelihood() -> None:
    inputs = _inputs(old_log_probs=None, advantages=None)
    torch.testing.assert_close(sft_loss(_args(), inputs).values, -inputs.log_probs)


def test_a_column_is_asked_for_once() -> None:
    asked = []

    def column(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(1, 1)

    one = torch.ones(1, 1)
    inputs = LossInputs(log_probs=one, entropy=one, loss_mask=one, row_ids=[], column=column)
    assert inputs["mine"] is inputs["mine"] is inputs.get("mine")
    assert inputs.advantages is inputs["advantages"]
    assert inputs.ref_log_probs is inputs["ref_log_probs"]
    assert asked == ["mine", "advantages", "ref_log_probs"]
