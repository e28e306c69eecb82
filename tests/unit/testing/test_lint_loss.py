"""The linter of losses: what the framework ships passes, and each of these wrong losses fails the named property."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from buffer_rl.errors import ConfigError
from buffer_rl.kinds.marks import loss_unit
from buffer_rl.kinds.token_loss import LossInputs, Metric, TokenLoss
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.lint import Finding, Result, failures
from buffer_rl.testing.lint_loss import lint_loss
from harness.losses import built_in_losses, loss_args

EXAMPLES = ("examples/losses/gspo.py:gspo", "examples/losses/weighted.py:weighted")


NOTICES = {
    "cispo": {"gradient": "fine for a loss with a stop-gradient"},
    "gspo_token": {"gradient": "fine for a loss with a stop-gradient"},
    "decoupled_ppo": {"needs": "'prox_log_probs'"},
}
"""What is said of losses by design; none of it is a failure."""


def findings_of(loss: Any, **how: Any) -> dict[str, Finding]:
    return {finding.property: finding for finding in lint_loss(loss, loss_args(), **how)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reference", [*built_in_losses(), *EXAMPLES])
def test_losses_that_ship_hold_every_property(reference: str, seed: int) -> None:
    loss = PluginRegistry.from_flags(()).resolve("loss", reference)
    found = lint_loss(loss, loss_args(), seed=seed)
    noticed = {finding.property: str(finding) for finding in found if finding.result is not Result.PASS}
    assert noticed.keys() == NOTICES.get(reference, {}).keys()
    assert all(part in noticed[name] for name, part in NOTICES.get(reference, {}).items())
    assert {"micro-batches", "ranks", "order", "padding", "masked", "unit", "gradient"} <= {f.property for f in found}


@loss_unit("group")
def pairwise(args: Any, inputs: LossInputs) -> TokenLoss:
    """Each row against the mean of its prompt, as losses of preferences do."""
    sums = (inputs.log_probs * inputs.loss_mask).sum(-1)
    same = torch.tensor([[float(one.uid == other.uid) for other in inputs.row_ids] for one in inputs.row_ids])
    return TokenLoss(-torch.nn.functional.logsigmoid(sums - same @ sums / same.sum(-1)))


@loss_unit("row")
def pairwise_by_row(args: Any, inputs: LossInputs) -> TokenLoss:
    return pairwise(args, inputs)


@loss_unit("token")
def divides_by_rows(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.advantages * inputs.log_probs / len(inputs.row_ids))


@loss_unit("row")
def reads_the_next_row(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.advantages.roll(1, 0) * inputs.log_probs)


@loss_unit("row")
def counts_masked_tokens(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.log_probs.exp().sum(-1))  # exp(0) is 1


@loss_unit("row")
def infinite_where_masked(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss((inputs.advantages / inputs.log_probs).sum(-1))


@loss_unit("row")
def divides_by_the_width(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_probs / inputs.log_probs.shape[1])


@loss_unit("token")
def reads_an_undeclared_column(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_probs * inputs["difficulty"][:, None])


@loss_unit("token")
def reads_earlier_tokens(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_probs.cumsum(-1))


@loss_unit("token")
def counts_the_tokens_of_its_row(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_probs / inputs.loss_mask.sum(-1, keepdim=True).clamp(min=1))


@loss_unit("token")
def gives_a_number_a_row(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_probs.sum(-1))


@loss_unit("token")
def has_no_gradient(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_probs.detach() + 0 * inputs.log_probs)


@loss_unit("token")
def has_an_infinite_metric(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_probs, metrics={"worst": Metric(inputs.log_probs.exp().sub(1).log(), "max")})


@loss_unit("token")
def writes_the_mask(args: Any, inputs: LossInputs) -> TokenLoss:
    inputs.loss_mask[inputs.advantages < 0] = 0
    return TokenLoss(-inputs.log_probs)


@loss_unit("token")
def is_a_scalar(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.log_probs.mean())


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (pairwise_by_row, "micro-batches"),
        (pairwise_by_row, "unit"),
        (pairwise_by_row, "ranks"),
        (divides_by_rows, "micro-batches"),
        (divides_by_rows, "ranks"),
        (reads_the_next_row, "order"),
        (reads_the_next_row, "unit"),
        (counts_masked_tokens, "masked"),
        (infinite_where_masked, "finite"),
        (divides_by_the_width, "padding"),
        (reads_an_undeclared_column, "needs"),
        (reads_earlier_tokens, "unit"),
        (reads_earlier_tokens, "fan-out"),
        (counts_the_tokens_of_its_row, "unit"),
        (counts_the_tokens_of_its_row, "fan-out"),
        (gives_a_number_a_row, "unit"),
        (has_no_gradient, "gradient"),
        (has_an_infinite_metric, "finite"),
        (writes_the_mask, "form"),
        (is_a_scalar, "form"),
    ],
)
def test_a_wrong_loss_fails_the_named_property(loss: Any, name: str) -> None:
    found = findings_of(loss)[name]
    assert found.result is Result.FAIL, found
    assert found.text


def test_a_failure_shows_the_row_and_the_numbers() -> None:
    """A micro-batch of one row in place of thirteen: thirteen times the gradient."""
    text = findings_of(divides_by_rows)["micro-batches"].text
    assert text.startswith("the gradient by log_probs, row lint:0:0/0.0, token 0: expected ")
    expected, found = (float(text.partition(word)[2].split(",")[0]) for word in ("expected ", "found "))
    assert found == pytest.approx(13 * expected, rel=1e-4)


def test_only_the_wrong_property_fails() -> None:
    assert [finding.property for finding in failures(findings_of(reads_an_undeclared_column).values())] == ["needs"]


def test_a_loss_that_compares_the_rows_of_a_prompt_passes_with_the_unit_group() -> None:
    assert not failures(findings_of(pairwise).values())


def test_a_stop_gradient_is_a_notice_and_no_failure() -> None:
    @loss_unit("token")
    def cispo(args: Any, inputs: LossInputs) -> TokenLoss:
        ratio = (inputs.log_probs - inputs.old_log_probs).exp().detach()
        return TokenLoss(-ratio * inputs.advantages * inputs.log_probs)

    found = findings_of(cispo)
    assert not failures(found.values())
    assert found["gradient"].result is Result.NOTICE
    assert "fine for a loss with a stop-gradient" in found["gradient"].text


def test_a_loss_of_float32_alone_is_compared_with_wider_differences() -> None:
    @loss_unit("token")
    def single(args: Any, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(-inputs.advantages * inputs.log_probs.float().exp())

    assert findings_of(single)["gradient"].result is Result.PASS


def test_columns_that_are_declared_or_asked_for_in_vain_are_notices() -> None:
    @loss_unit("token", needs=("difficulty", "hue"))
    def idle(args: Any, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(-inputs.log_probs * inputs["difficulty"])  # a number a token

    @loss_unit("token")
    def curious(args: Any, inputs: LossInputs) -> TokenLoss:
        inputs.get("hue")
        return TokenLoss(-inputs.log_probs)

    for loss in (idle, curious):
        found = findings_of(loss)
        assert not failures(found.values())
        assert found["needs"].result is Result.NOTICE
        assert "'hue'" in found["needs"].text


def test_a_count_of_the_whole_response_is_a_notice() -> None:
    @loss_unit("row")
    def by_length(args: Any, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(-inputs.log_probs.sum(-1) / inputs["response_length"].clamp(min=1))

    found = findings_of(by_length)
    assert not failures(found.values())
    assert found["masked"].result is Result.NOTICE


def test_a_critic_gets_its_gradient_and_its_earlier_values() -> None:
    @loss_unit("token")
    def value_loss(args: Any, inputs: LossInputs) -> TokenLoss:
        kept = inputs["values"] + (inputs.values - inputs["values"]).clamp(-0.2, 0.2)
        return TokenLoss(torch.maximum((inputs.values - inputs["returns"]) ** 2, (kept - inputs["returns"]) ** 2))

    assert {finding.result for finding in findings_of(value_loss).values()} == {Result.PASS}


def test_an_unknown_unit_raises() -> None:
    with pytest.raises(ConfigError, match="no unit 'batch'"):
        findings_of(type("Loss", (), {"unit": "batch", "__call__": lambda self, args, inputs: None})())


@loss_unit("token")
def leaves_a_token_out(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss((-inputs.advantages * inputs.log_probs)[:, :-1])


@loss_unit("token")
def raises(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss({}["nothing"])


def test_a_wrong_form_is_told_with_what_was_expected_or_the_line_that_raised() -> None:
    cut = str(lint_loss(leaves_a_token_out, loss_args())[0]).splitlines()
    assert len(cut) == 3
    assert cut[1].endswith("expected: buffer_rl.kinds.token_loss.TokenLoss with values [13, 5] or [13]")
    assert cut[2].endswith("hint: the values are a tensor of shape [13, 4]")
    raised = str(lint_loss(raises, loss_args())[0]).splitlines()
    assert raised[0].endswith("it raised KeyError: 'nothing'")
    assert raised[2].strip() == f'File "{__file__}", line {raises.__code__.co_firstlineno + 2}, in raises'
    assert "to do" not in str(raised)
