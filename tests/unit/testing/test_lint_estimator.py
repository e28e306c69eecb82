"""The linter of advantage estimators: what ships passes, and each of these wrong ones fails the named property."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffer_rl.kinds.marks import scoped
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.lint import Finding, Result, failures
from buffer_rl.testing.lint_estimator import lint_estimator
from harness.losses import loss_args

INFOS = PluginRegistry.from_flags(()).infos("advantage")


def findings_of(estimator: Any, **how: Any) -> dict[str, Finding]:
    return {finding.property: finding for finding in lint_estimator(estimator, loss_args(), **how)}


def fill(batch: TrainBatch, numbers: Any) -> None:
    """A number for each row, as that of each of its response tokens."""
    pairs = list(zip(batch.columns["response_length"], numbers, strict=True))
    batch.columns["advantages"] = [np.full(length, number, dtype=np.float32) for length, number in pairs]
    batch.columns["returns"] = list(batch.columns["advantages"])


def centred_by_group(batch: TrainBatch) -> np.ndarray:
    reward = np.asarray(batch.columns["reward"])
    means = {uid: reward[[row.uid == uid for row in batch.row_ids]].mean() for uid in {r.uid for r in batch.row_ids}}
    return reward - np.asarray([means[row.uid] for row in batch.row_ids])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [info.name for info in INFOS if info.distribution == "buffer-rl"])
def test_estimators_that_ship_hold_every_property(name: str, seed: int) -> None:
    found = findings_of(PluginRegistry.from_flags(()).resolve("advantage", name), seed=seed)
    assert {str(finding) for finding in found.values() if finding.result is not Result.PASS} == set()
    assert list(found) == ["form", "needs", "finite", "deterministic", "columns", "order", "scope"]


@scoped("group")
def reads_other_groups(args: Any, batch: TrainBatch) -> None:
    fill(batch, batch.columns["reward"] - np.mean(batch.columns["reward"]))


@scoped("row")
def reads_its_group(args: Any, batch: TrainBatch) -> None:
    fill(batch, centred_by_group(batch))


@scoped("row")
def writes_the_mask(args: Any, batch: TrainBatch) -> None:
    batch.columns["loss_mask"][0][:] = 0
    fill(batch, batch.columns["reward"])


@scoped("row")
def replaces_the_reward(args: Any, batch: TrainBatch) -> None:
    batch.columns["reward"] = 2 * np.asarray(batch.columns["reward"])
    fill(batch, batch.columns["reward"])


@scoped("row")
def removes_the_reward(args: Any, batch: TrainBatch) -> None:
    fill(batch, batch.columns.pop("reward"))


@scoped("row")
def is_of_the_wrong_length(args: Any, batch: TrainBatch) -> None:
    batch.columns["advantages"] = [np.zeros(length + 1) for length in batch.columns["response_length"]]
    batch.columns["returns"] = [np.zeros(length) for length in batch.columns["response_length"]]


@scoped("row")
def has_a_row_less(args: Any, batch: TrainBatch) -> None:
    fill(batch, batch.columns["reward"])
    batch.columns["returns"] = batch.columns["returns"][1:]


@scoped("row")
def sets_no_returns(args: Any, batch: TrainBatch) -> None:
    fill(batch, batch.columns["reward"])
    del batch.columns["returns"]


@scoped("row")
def is_random(args: Any, batch: TrainBatch) -> None:
    fill(batch, np.random.default_rng().normal(size=len(batch)))


@scoped("group")
def is_nan_for_a_group_of_one(args: Any, batch: TrainBatch) -> None:
    reward, uids = np.asarray(batch.columns["reward"]), [row.uid for row in batch.row_ids]
    alone = np.asarray([uids.count(uid) == 1 for uid in uids])
    fill(batch, np.where(alone, np.nan, reward))


@scoped("group")
def is_infinite_for_equal_rewards(args: Any, batch: TrainBatch) -> None:
    centred = centred_by_group(batch)
    with np.errstate(all="ignore"):
        fill(batch, np.where([row.uid.row == 1 for row in batch.row_ids], 0, 1 / np.abs(centred)))


def counts_rows(args: Any, batch: TrainBatch) -> None:
    fill(batch, np.arange(len(batch)))


@scoped("row")
def reads_an_undeclared_column(args: Any, batch: TrainBatch) -> None:
    fill(batch, [row.sum() for row in batch.columns["ref_log_probs"]])


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        (reads_other_groups, "scope"),
        (reads_its_group, "scope"),
        (writes_the_mask, "columns"),
        (replaces_the_reward, "columns"),
        (removes_the_reward, "columns"),
        (is_of_the_wrong_length, "form"),
        (has_a_row_less, "form"),
        (sets_no_returns, "form"),
        (is_random, "deterministic"),
        (is_nan_for_a_group_of_one, "finite"),
        (is_infinite_for_equal_rewards, "finite"),
        (counts_rows, "order"),
        (reads_an_undeclared_column, "needs"),
    ],
)
def test_a_wrong_estimator_fails_the_named_property(estimator: Any, name: str) -> None:
    found = findings_of(estimator)[name]
    assert found.result is Result.FAIL, found
    assert found.text


@pytest.mark.parametrize("estimator", [reads_other_groups, writes_the_mask, reads_an_undeclared_column])
def test_only_the_wrong_property_fails(estimator: Any) -> None:
    assert len(failures(findings_of(estimator).values())) == 1


def test_a_failure_shows_the_row_and_the_numbers() -> None:
    text = findings_of(is_nan_for_a_group_of_one)["finite"].text
    assert text == "advantages, row lint:1:0/0.0, token 0: expected a finite number, found nan"
    text = findings_of(is_of_the_wrong_length)["form"].text
    assert text == "advantages, row lint:0:0/0.0: expected the shape [4], found [5]"


def test_group_scope_may_compare_the_rows_of_a_prompt_and_rollout_scope_all() -> None:
    for scope, estimator in (("group", reads_its_group), ("rollout", reads_other_groups)):

        @scoped(scope)
        def estimate(args: Any, batch: TrainBatch, estimator: Any = estimator) -> None:
            estimator(args, batch)

        assert {finding.result for finding in findings_of(estimate).values()} == {Result.PASS}


def test_a_scope_that_could_be_declared_is_a_notice() -> None:
    def centred(args: Any, batch: TrainBatch) -> None:
        fill(batch, centred_by_group(batch))

    assert findings_of(centred)["scope"].result is Result.NOTICE


def test_columns_of_either_form_are_declared_or_asked_for_in_vain() -> None:
    @scoped("row", needs=("hue", "by_token", "by_row"))
    def idle(args: Any, batch: TrainBatch) -> None:
        tokens = [float(row.sum()) for row in batch.columns["by_token"]]
        fill(batch, np.asarray(tokens) * np.asarray(batch.columns["by_row"]).reshape(len(batch)))

    @scoped("row")
    def curious(args: Any, batch: TrainBatch) -> None:
        batch.columns.get("hue")
        fill(batch, batch.columns["reward"])

    for estimator in (idle, curious):
        found = findings_of(estimator)
        assert not failures(found.values())
        assert found["needs"].result is Result.NOTICE
        assert "'hue'" in found["needs"].text
