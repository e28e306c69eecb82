"""What plugins may return."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from buffer_rl.errors import RewardError, RolloutError
from buffer_rl.kinds.reward import check_filter_decision, check_reward
from buffer_rl.kinds.rollout import check_rollout_output
from buffer_rl.records.groups import FilterDecision, GroupUid, RolloutOutput, Sample, SampleGroup


def group(row: int) -> SampleGroup:
    uid = GroupUid("data", row, 0)
    return SampleGroup(uid=uid, samples=[Sample(uid=uid)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (True, 1.0),
        (False, 0.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        ({"score": 1, "length": np.float64(0.5)}, {"score": 1.0, "length": 0.5}),
    ],
)
def test_finite_numbers_are_rewards(value: Any, expected: Any) -> None:
    checked = check_reward(value, where="here")
    assert checked == expected
    assert type(checked) is type(expected)


def test_a_tensor_of_no_dimensions_is_a_reward() -> None:
    import torch

    assert check_reward(torch.tensor(0.5), where="here") == 0.5
    with pytest.raises(RewardError):
        check_reward(torch.tensor([0.5]), where="here")


@pytest.mark.parametrize(
    "value",
    [None, math.nan, math.inf, -math.inf, "1.0", b"1", [1.0], (1.0,), 1j, Decimal(1), 10**400, np.array([1.0]),
     np.float32("nan"), {}, {"score": None}, {"score": math.nan}, {1: 1.0}, {"score": {"more": 1.0}}, object()],
)  # fmt: skip
def test_everything_else_is_a_named_reward_error(value: Any) -> None:
    with pytest.raises(RewardError) as caught:
        check_reward(value, where="data:3:0/1.0")
    assert str(caught.value).startswith("data:3:0/1.0")
    assert caught.value.expected


def test_a_forgotten_return_is_hinted_at_and_long_values_are_cut() -> None:
    with pytest.raises(RewardError, match="without a return statement"):
        check_reward(None, where="here")
    with pytest.raises(RewardError) as caught:
        check_reward("x" * 10_000, where="here")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [True, np.bool_(True), FilterDecision(keep=True)])
def test_a_boolean_is_a_decision(value: Any) -> None:
    assert check_filter_decision(value, where="here") == FilterDecision(keep=True)


def test_a_decision_keeps_its_reason() -> None:
    decision = FilterDecision(keep=False, reason="zero_std_1.0")
    assert check_filter_decision(decision, where="here") == decision
    assert check_filter_decision(False, where="here") == FilterDecision(keep=False)


@pytest.mark.parametrize("value", [None, 1, 0, "yes", (True, ""), FilterDecision(keep=None), FilterDecision(keep=1)])  # type: ignore[arg-type]
def test_a_decision_is_never_guessed(value: Any) -> None:
    with pytest.raises(RolloutError, match="here: the filter returned"):
        check_filter_decision(value, where="here")


def test_a_bare_list_of_groups_is_an_output() -> None:
    groups = [group(0), group(1)]
    assert check_rollout_output(groups, where="here") == RolloutOutput(groups=groups)
    assert check_rollout_output([], where="here") == RolloutOutput()
    output = RolloutOutput(groups=groups, metrics={"turns": np.float32(2.0)})  # type: ignore[dict-item]
    checked = check_rollout_output(output, where="here")
    assert checked.groups == groups
    assert checked.metrics == {"turns": 2.0}
    assert type(checked.metrics["turns"]) is float
    text = RolloutOutput(metrics={"source": "mine", "turns": 1.0})  # type: ignore[dict-item]
    assert check_rollout_output(text, where="here").metrics == {"turns": 1.0}
    foreign = [Sample(), Sample()]  # without uids: no lease gave them
    assert check_rollout_output([foreign, foreign], where="here").groups == [SampleGroup(samples=foreign)] * 2


def test_samples_in_one_list_become_their_groups() -> None:
    leased = {lease.uid: lease for lease in (group(0), group(1))}
    one, two = (list(lease) for lease in leased.values())
    mixed = [two[0], *one, *two[1:]]
    found = check_rollout_output(mixed, where="here", leased=leased)
    assert [(lease.uid, list(lease)) for lease in found.groups] == [(two[0].uid, two), (one[0].uid, one)]
    foreign = [Sample(response=str(number)) for number in range(6)]
    groups = check_rollout_output(foreign, where="here", group_size=3).groups
    assert [[sample.response for sample in each] for each in groups] == [["0", "1", "2"], ["3", "4", "5"]]
    both = check_rollout_output([*foreign[:2], *one], where="here", leased=leased, group_size=2).groups
    assert [list(each) for each in both] == [one, foreign[:2]]
    with pytest.raises(RolloutError, match=r"(?s)here: .* 6 samples .* multiple of --n-samples-per-prompt, which is 4"):
        check_rollout_output(foreign, where="here", group_size=4)
    with pytest.raises(RolloutError, match="a list of groups"):
        check_rollout_output(foreign, where="here")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "RolloutOutput"),
        ("groups", "returned 'groups'"),
        (group(0), "returned SampleGroup"),
        ([list(group(0))], "entry 0 of the returned groups"),
        ([[]], "entry 0 of the returned groups"),
        ([group(0), Sample()], "entry 1 of the returned groups"),
        ([group(2), group(2)], "data:2:0 was returned twice"),
        (RolloutOutput(metrics={"name": [1.0]}), "the metric 'name'"),  # type: ignore[dict-item]
        (RolloutOutput(metrics=None), "the metrics are None"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_trained_on_is_a_rollout_error(value: Any, problem: str) -> None:
    with pytest.raises(RolloutError, match=r"^here") as caught:
        check_rollout_output(value, where="here")
    assert problem in str(caught.value)
