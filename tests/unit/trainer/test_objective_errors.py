"""What a loss of one's own may do wrong, and what its author then reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from buffer_rl.errors import ConfigError, DataError, PluginError, TrainError
from buffer_rl.kinds.marks import loss_unit, scoped
from buffer_rl.kinds.token_loss import NEW_FORM, LossInputs, Metric, Sums, TokenLoss
from buffer_rl.records.groups import Topology, TrainBatch
from buffer_rl.trainer.steps import NonFiniteGuard, StepReport, take_step
from harness.losses import objective_of, outcome, rows_of

Loss = Callable[[Any, LossInputs], Any]
LOG_PROBS = [[-1.0, -2.0, -3.0], [-1.0, -0.5]]


def batch() -> TrainBatch:
    """Rows of three and two tokens."""
    return rows_of(loss_mask=[[1, 1, 1], [1, 0]], advantages=[[1, 1, 1], [-1, -1]], reward=[1, -1])


def problem_of(loss: Loss | str) -> PluginError:
    """The error of a step with the loss."""
    with pytest.raises(PluginError) as caught:
        outcome(objective_of(custom_loss_function_path=loss), batch(), LOG_PROBS)
    return caught.value


@pytest.mark.parametrize(
    "line",
    ["from buffer_rl.contracts import LossOutputs", "from buffer_rl.algo.aggregation import aggregate"],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_that_imports_what_the_earlier_form_needed_is_shown_the_new_one(
    line: str, inside: bool, tmp_path: Path
) -> None:
    file = tmp_path / "earlier.py"
    file.write_text(
        f"{line}\ndef mine(args, inputs): ...\n" if not inside else f"def mine(args, inputs):\n    {line}\n"
    )
    error = problem_of(f"{file}:mine")
    assert f"{file}:mine" in error.where
    assert NEW_FORM.splitlines()[0] in error.what
    assert "TokenLoss(values" in str(error)


def test_a_loss_that_returns_what_it_divided_itself_is_shown_the_new_form() -> None:
    def scalar(args: Any, inputs: LossInputs) -> Any:
        return inputs.log_probs.mean()

    def with_loss(args: Any, inputs: LossInputs) -> Any:
        return SimpleNamespace(loss=inputs.log_probs.mean(), metrics={})

    def divided(args: Any, inputs: LossInputs) -> Any:
        return TokenLoss(inputs.log_probs.mean())

    for loss in (scalar, with_loss, divided):
        error = problem_of(loss)
        assert loss.__name__ in error.where
        assert error.hint == NEW_FORM
        assert "TokenLoss" in error.expected


def wrong_shapes() -> dict[str, Callable[[LossInputs], Any]]:
    """What each error names, with what a loss returns."""
    return {
        "the values are a tensor of shape [1, 3]": lambda inputs: TokenLoss(inputs.log_probs[:1]),
        "the values are [": lambda inputs: TokenLoss([0.0, 0.0]),
        "the values are None": lambda inputs: TokenLoss(None),
        "no gradient": lambda inputs: TokenLoss(inputs.log_probs.detach()),
        "the weights are a tensor of shape [2], not": lambda inputs: TokenLoss(
            inputs.log_probs, weights=inputs.loss_mask[:, 0]
        ),
        "the weights are 2.0": lambda inputs: TokenLoss(inputs.log_probs, weights=2.0),
        "the metric 'mine' is a tensor of shape [], not a number": lambda inputs: TokenLoss(
            inputs.log_probs, metrics={"mine": torch.zeros(())}
        ),
        "the metric 'mine' is 2.5": lambda inputs: TokenLoss(inputs.log_probs, metrics={"mine": Metric(2.5)}),
        "the metric 'mine' has the reduction 'median', not one of mean, max, min, loss": lambda inputs: TokenLoss(
            inputs.log_probs, metrics={"mine": Metric(inputs.log_probs, "median")}
        ),
        "the metric 'mine' has the reduction 'loss' and the shape [2], not that of the values": lambda inputs: (
            TokenLoss(inputs.log_probs, metrics={"mine": Metric(inputs.log_probs.sum(-1), "loss")})
        ),
        "the shape [2, 3], not that of the values": lambda inputs: TokenLoss(
            inputs.log_probs.sum(-1), metrics={"mine": Metric(inputs.log_probs, "loss")}
        ),
    }


@pytest.mark.parametrize("hint", wrong_shapes())
def test_a_wrong_return_value_is_named_with_the_right_shapes(hint: str) -> None:
    error = problem_of(lambda args, inputs: wrong_shapes()[hint](inputs))
    assert hint in error.hint
    if hint.startswith(("the values", "the weights")):
        assert "values [2, 3] or [2]" in error.expected


def test_metrics_that_are_no_mapping_are_named() -> None:
    assert "metrics={name" in problem_of(lambda args, inputs: TokenLoss(inputs.log_probs, None, [1])).expected


def test_what_a_loss_raises_names_it() -> None:
    def broken(args: Any, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(inputs.log_probs / inputs.total_tokens)  # type: ignore[attr-defined]

    error = problem_of(broken)
    assert "broken" in error.where
    assert "AttributeError: there is no total_tokens any more: a loss returns a number for each token" in error.what


@pytest.mark.parametrize("name", ["loss", "kl_loss", "lr", "grad_norm"])
def test_a_loss_cannot_give_the_frameworks_own_metrics(name: str) -> None:
    error = problem_of(lambda args, inputs: TokenLoss(inputs.log_probs, metrics={name: inputs.log_probs}))
    assert error.hint == f"{name!r} is the framework's own"


def test_a_loss_that_declares_no_unit_that_there_is_is_refused() -> None:
    @loss_unit("groups")
    def misspelt(args: Any, inputs: LossInputs) -> TokenLoss:
        raise AssertionError("it is not called")

    @scoped("group")
    def earlier(args: Any, inputs: LossInputs) -> TokenLoss:
        raise AssertionError("it is not called")

    for loss, what in ((misspelt, "there is no unit 'groups'"), (earlier, "the loss declares a scope")):
        with pytest.raises(ConfigError, match=what) as caught:
            objective_of(custom_loss_function_path=loss)
        assert "loss_unit('group')" in caught.value.hint


def test_a_declared_column_that_is_absent_is_named_with_those_that_are_there() -> None:
    @loss_unit("token", needs=("difficulty", "old_log_probs"))
    def mine(args: Any, inputs: LossInputs) -> TokenLoss:
        raise AssertionError("it is not called")

    error = problem_of(mine)
    assert "it needs the column 'difficulty'" in error.what
    assert error.expected == "a column beside advantages, loss_mask, response_length, reward, tokens"
    assert "--custom-convert-samples-to-train-data-path" in error.hint


def test_a_column_that_is_absent_and_not_declared_is_named() -> None:
    objective = objective_of(custom_loss_function_path=lambda args, inputs: TokenLoss(inputs["difficulty"]))
    with pytest.raises(TrainError, match="the rows have no difficulty"):
        outcome(objective, batch(), LOG_PROBS)
    for options, missing in ({"use_kl_loss": True}, "ref_log_probs"), ({"use_rollout_logprobs": True}, "rollout_log_p"):
        with pytest.raises(TrainError, match=f"no {missing}"):
            outcome(objective_of(**options), batch(), LOG_PROBS)


def test_an_estimator_needs_the_columns_that_it_declares() -> None:
    @scoped("group", needs=("old_log_probs", "difficulty"))
    def mine(args: Any, batch: TrainBatch) -> None:
        raise AssertionError("it is not called")

    rows = batch()
    given = rows.columns.pop("advantages")
    for absent in ("difficulty", "old_log_probs"):
        with pytest.raises(PluginError, match=f"it needs the column '{absent}'"):
            objective_of(custom_advantage_function_path=mine).compute_advantages(rows)
        rows.columns[absent] = given
    with pytest.raises(PluginError, match="it needs the column 'baseline_reward'") as caught:
        objective_of(advantage_estimator="remax").compute_advantages(rows)
    assert "the default rollout function gives it" in caught.value.hint


def test_an_estimator_that_replaces_a_column_is_refused_as_only_some_schedules_would_see_it() -> None:
    def masks(args: Any, batch: TrainBatch) -> None:
        zeros = [np.zeros_like(row) for row in batch.columns["loss_mask"]]
        batch.columns |= {"advantages": zeros, "returns": zeros, "loss_mask": zeros}

    rows = batch()
    del rows.columns["advantages"]
    with pytest.raises(PluginError) as caught:
        objective_of(custom_advantage_function_path=masks).compute_advantages(rows)
    assert caught.value.what == "it replaced the column 'loss_mask'"
    assert caught.value.hint == "set one of another name"


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({}, "it did not set the column advantages"),
        ({"advantages": [[0.0] * 3, [0.0] * 2]}, "it did not set the column returns"),
        ({"advantages": [[0.0] * 2] * 2}, "the column advantages has row 0 of shape (2,), not (3,)"),
        ({"advantages": [[0.0] * 3]}, "the column advantages has 1 rows, not 2 rows"),
        ({"advantages": ["x"]}, "the column advantages holds no rows of numbers: "),
    ],
)
def test_what_an_estimator_did_not_set_rightly_is_what_the_error_says(columns: dict[str, Any], what: str) -> None:
    rows = batch()
    del rows.columns["advantages"]
    with pytest.raises(PluginError) as caught:
        objective_of(
            custom_advantage_function_path=lambda args, batch: batch.columns.update(columns)
        ).compute_advantages(rows)
    assert caught.value.what.startswith(what)
    assert caught.value.where.endswith(rows.task)
    assert "per row [response_length] float32" in caught.value.expected


def test_advantages_that_are_there_are_kept_and_are_the_returns_too_where_these_are_absent() -> None:
    rows = batch()
    given = rows.columns["advantages"]
    objective_of(custom_advantage_function_path=lambda args, batch: 1 / 0).compute_advantages(rows)
    assert rows.columns["returns"] is rows.columns["advantages"] is given


@pytest.mark.parametrize("negative", [[-1.0, -1, -1], [2, 2, -1]])
def test_negative_weights_are_refused_but_where_they_are_masked(negative: list[float]) -> None:
    def mine(args: Any, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(inputs.log_probs, weights=torch.tensor([negative] * 2) * inputs.loss_mask[:1])

    assert "put the sign into the values" in problem_of(mine).hint
    fine = batch()
    fine.columns["loss_mask"] = [np.array(row, dtype=np.float32) for row in ([0, 0, 0], [0, 0])]
    assert outcome(objective_of(custom_loss_function_path=mine), fine, LOG_PROBS).sums.divisor == 0


class Backend:
    """A trainer whose answers are given."""

    topology = Topology(dp_rank=0, dp_size=1)

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def optimizer_step(self, scale: float) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("sums", "answer", "what"),
    [
        (None, {}, "accumulate of the trainer returned None"),
        (1.5, {}, "accumulate of the trainer returned 1.5"),
        (Sums(divisor=1.0), None, "optimizer_step of the trainer returned None"),
        (Sums(divisor=1.0), {"grad_norm": 1.0}, r"optimizer_step of the trainer returned \{'grad_norm': 1.0\}"),
    ],
)
def test_a_backend_that_answers_otherwise_is_named(tmp_path: Path, sums: Any, answer: Any, what: str) -> None:
    with pytest.raises(TrainError, match=what):
        take_step(cast("Any", Backend(answer)), sums, NonFiniteGuard(tmp_path, 0, 3), StepReport(), batch, 0)


def foreign(mask: list[int]) -> TrainBatch:
    """Two rows; no engine sampled the second one, of which tokens are trained on as ``mask`` says."""
    nan = float("nan")
    return rows_of(
        loss_mask=[[1, 1], mask],
        advantages=[[1, 1], [-1, -1]],
        rollout_log_probs=[[-1, -1], [nan, nan]],
        reward=[1, -1],
        response_length=[2, 2],
    )


def from_the_engine(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.advantages * (inputs.log_probs - inputs.rollout_log_probs).exp())


def if_there_are_some(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-(inputs.log_probs - inputs.get("rollout_log_probs")).exp())


def own_weights(args: Any, inputs: LossInputs) -> torch.Tensor:
    return (inputs.log_probs - inputs["rollout_log_probs"]).exp()


@pytest.mark.parametrize(
    "options",
    [
        {"custom_loss_function_path": from_the_engine},
        {"custom_loss_function_path": if_there_are_some},
        {"custom_loss_function_path": loss_unit("token", needs=("rollout_log_probs",))(lambda args, inputs: None)},
        {"use_tis": True, "custom_tis_function_path": own_weights},
        {"use_rollout_logprobs": True},
    ],
)
def test_a_loss_and_a_correction_read_no_column_of_a_row_that_lacks_it(options: dict[str, Any]) -> None:
    log_probs = [[-1.0, -2.0], [-1.0, -0.5]]
    with pytest.raises(DataError, match="reads rollout_log_probs, and this row has none") as caught:
        outcome(objective_of(**options), foreign([1, 1]), log_probs)
    assert "data:0:0/1" in caught.value.where
    if "needs" not in vars(options.get("custom_loss_function_path", object)):
        found = outcome(
            objective_of(**options), foreign([0, 0]), log_probs
        )  # of a token that is masked nothing is read
        assert np.isfinite(found.means["loss"])


@pytest.mark.parametrize(
    "read",
    [
        lambda columns: columns["rollout_log_probs"],
        lambda columns: columns.get("rollout_log_probs"),
    ],
)
def test_an_estimator_reads_no_column_of_a_row_that_lacks_it(read: Callable[[Any], Any]) -> None:
    def estimator(args: Any, batch: TrainBatch) -> None:
        assert batch.columns.get("absent", 7) == 7
        batch.columns["advantages"] = batch.columns["returns"] = [np.asarray(row) * 2 for row in read(batch.columns)]

    objective = objective_of(custom_advantage_function_path=estimator)
    batch = foreign([1, 1])
    del batch.columns["advantages"]
    with pytest.raises(DataError, match="reads rollout_log_probs, and this row has none") as caught:
        objective.compute_advantages(batch)
    assert "data:0:0/1" in caught.value.where
    whole = batch.select([0])
    objective.compute_advantages(whole)
    assert whole.columns["advantages"][0].tolist() == [-2, -2]
