"""The loss of a value model: hand-derived numbers, the gradient against finite differences, the linter."""

from __future__ import annotations

import pytest
import torch

from buffer_rl.algo.losses import value_loss
from buffer_rl.errors import DataError
from buffer_rl.kinds.token_loss import LossInputs, Reduction, Sums, Total
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.lint import Result
from buffer_rl.testing.lint_loss import lint_loss
from harness.losses import loss_args, objective_of, rows_of


def inputs_of(values: list[float], old: list[float], returns: list[float]) -> LossInputs:
    columns = {"values": torch.tensor([old]).double(), "returns": torch.tensor([returns]).double()}
    leaf = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    return LossInputs(
        log_probs=None,
        entropy=None,
        values=leaf,
        loss_mask=torch.ones(1, len(values)),
        row_ids=[],
        column=columns.get,
    )


def test_a_value_that_moved_beyond_the_clip_range_counts_where_it_is_cut_off() -> None:
    """Old values 0.5, clip range 0.2: 0.6 is inside, (0.6 - 1)^2 / 2 = 0.08. 0.9 becomes 0.7, (0.7 - 1)^2 / 2 = 0.045,
    more than 0.005 of 0.9 itself. 0.1 becomes 0.3 and is further from 1 than that: (0.1 - 1)^2 / 2 = 0.405."""
    inputs = inputs_of([0.6, 0.9, 0.1], [0.5] * 3, [1.0] * 3)
    loss = value_loss(loss_args(value_clip=0.2), inputs)
    torch.testing.assert_close(loss.values, torch.tensor([[0.08, 0.045, 0.405]]).double())
    assert loss.metrics["value_clipfrac"].tolist() == [[0, 1, 0]]
    loss.values.sum().backward()
    # of the second none: to move it further towards its return changes nothing
    torch.testing.assert_close(inputs.values.grad, torch.tensor([[-0.4, 0.0, -0.9]]).double())
    free = value_loss(loss_args(value_clip=None), inputs).values
    torch.testing.assert_close(free, torch.tensor([[0.08, 0.005, 0.405]]).double())


def test_its_gradient_equals_finite_differences() -> None:
    old, returns = [0.0, 0.3, -0.2, 1.0], [1.0, -1.0, 0.5, 0.2]
    inputs = inputs_of([0.1, 0.9, -0.8, 0.4], old, returns)
    arguments = loss_args(value_clip=0.25)

    def summed(values: torch.Tensor) -> torch.Tensor:
        return value_loss(arguments, inputs_of(values[0].tolist(), old, returns)).values.detach().sum()

    value_loss(arguments, inputs).values.sum().backward()
    step = 1e-6
    for place in range(4):
        offset = torch.zeros(1, 4).double()
        offset[0, place] = step
        slope = (summed(inputs.values + offset) - summed(inputs.values - offset)) / (2 * step)
        torch.testing.assert_close(slope, inputs.values.grad[0, place], atol=1e-6, rtol=1e-6)


def critic_step(batch: TrainBatch, values: list[list[float]], **options: object) -> dict[str, float]:
    loss, sums = objective_of("critic", **options)(None, None, batch, torch.tensor(values, requires_grad=True))
    assert loss.requires_grad
    return Sums.of([sums]).means()


def test_a_critics_step_has_its_loss_and_what_its_values_explain_and_no_terms_of_a_policy() -> None:
    """Returns 1, 3 and values 0, 3: errors 1, 0 with variance 1/4; returns have variance 1; the masked token counts
    nowhere."""
    batch = rows_of(loss_mask=[[1, 1, 0]], returns=[[1.0, 3.0, 9.0]], values=[[0.0, 3.0, 7.0]], response_length=[3])
    found = critic_step(batch, [[0.0, 3.0, 8.0]], use_kl_loss=True, kl_loss_coef=1.0, entropy_coef=1.0, use_tis=True)
    assert found == pytest.approx(
        {
            "loss": (1 + 0) / 2 / 2,
            "value_clipfrac": 0.0,
            "values": 1.5,
            "returns": 2.0,
            "value_error": 0.5,
            "explained_variance": 0.75,
        }
    )


def test_advantages_of_a_converter_are_no_returns_for_a_critic() -> None:
    rows = {"loss_mask": [[1, 1]], "advantages": [[1.0, 1.0]], "response_length": [2]}
    objective_of().compute_advantages(alone := rows_of(**rows))
    assert alone.columns["returns"] is alone.columns["advantages"]
    with pytest.raises(DataError, match="no returns, which the critic is trained on"):
        objective_of(use_critic=True).compute_advantages(rows_of(**rows))


def test_equal_returns_leave_nothing_to_explain() -> None:
    for equal in (1.0, 0.1, -0.9, 0.0):  # the square of 0.1 in float32 is above that of its float32 in float64
        rows = {"loss_mask": [[1, 1]], "returns": [[equal, equal]], "values": [[0.0, 0.0]], "response_length": [2]}
        assert critic_step(rows_of(**rows), [[0.5, 0.0]])["explained_variance"] == 0.0


def test_a_metric_of_a_name_of_its_moments_is_any_losss_own() -> None:
    total = Total(Reduction.MEAN, value=6.0, weight=3.0)
    assert Sums(metrics={"value_error": total}).means() == {"loss": 0.0, "value_error": 2.0}


def test_the_linter_finds_nothing_in_it() -> None:
    findings = lint_loss(value_loss, loss_args())
    assert [str(f) for f in findings if f.result is not Result.PASS] == []
    assert len(findings) > 8
