from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import FilterDecision, GroupUid, Sample, SampleGroup, Status
from filter_hub.difficulty import between, window
from filter_hub.duplicates import at_least, distinct
from filter_hub.fallback import nonzero_or_some, with_fallback
from filter_hub.length import all_finished, at_most, mask_truncated, some_finished
from filter_hub.reward_deviation import nonzero

ARGS = SimpleNamespace(reward_key=None)
KEEP = FilterDecision(keep=True)
C, T = Status.COMPLETED, Status.TRUNCATED


def drop(reason: str) -> FilterDecision:
    return FilterDecision(keep=False, reason=reason)


def group(num: int = 2, row: int = 0, **columns: list[Any]) -> SampleGroup:
    uid = GroupUid("data", row, 0)
    num = len(next(iter(columns.values()))) if columns else num
    samples = [Sample(uid=uid, **{name: values[i] for name, values in columns.items()}) for i in range(num)]
    return SampleGroup(uid=uid, samples=samples)


@pytest.mark.parametrize(
    ("rewards", "decision"),
    [
        ([0.0, 1.0], KEEP),
        ([0.2, 0.2], KEEP),
        ([0.8, 0.8], KEEP),
        ([0.8, 0.8, 0.8], KEEP),  # their mean in floats is 0.8000000000000002
        ([0.0, 0.0, 0.0, 0.0, 1.0, 0.0], drop("too_hard")),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], drop("too_easy")),
        ([None, 0.0, 1.0], KEEP),
        ([None], drop("no_rewards")),
    ],
)
def test_the_difficulty_window_is_about_the_mean_reward(rewards: list[Any], decision: FilterDecision) -> None:
    assert window(ARGS, group(reward=rewards)) == decision


def test_a_difficulty_window_of_ones_own_includes_its_limits() -> None:
    assert between(-1.0, 0.0)(ARGS, group(reward=[-1.0, 1.0])) == KEEP
    assert between(0.1, 0.9)(ARGS, group(reward=[0.0, 0.1])) == drop("too_hard")
    for low, high in ((0.8, 0.2), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(ConfigError, match="low <= high"):
            between(low, high)


@pytest.mark.parametrize(
    ("responses", "num_distinct", "decision"),
    [
        (["a", "b"], 2, KEEP),
        (["a", "a ", "\na"], 2, drop("duplicates")),
        (["a", "a", "b"], 3, drop("duplicates")),
        (["a", "c", "b"], 3, KEEP),
        (["a"], 1, KEEP),
    ],
)
def test_repeated_answers_are_dropped(responses: list[str], num_distinct: int, decision: FilterDecision) -> None:
    scored = group(response=responses, reward=[0.0] * len(responses))
    assert at_least(num_distinct)(ARGS, scored) == decision
    if num_distinct == 2:
        assert distinct(ARGS, scored) == decision


def test_failed_samples_do_not_make_answers_distinct() -> None:
    assert distinct(ARGS, group(response=["a", "b"], reward=[1.0, None])) == drop("duplicates")
    with pytest.raises(ConfigError, match="num_distinct"):
        at_least(0)


@pytest.mark.parametrize(
    ("statuses", "some", "all_"),
    [([C, C], KEEP, KEEP), ([C, T], KEEP, drop("truncated")), ([T, T], drop("all_truncated"), drop("truncated"))],
)
def test_overlong_groups_are_dropped(statuses: list[Status], some: FilterDecision, all_: FilterDecision) -> None:
    assert some_finished(ARGS, group(status=statuses)) == some
    assert all_finished(ARGS, group(status=statuses)) == all_


def test_the_mean_length_has_a_limit_that_is_included() -> None:
    assert at_most(3)(ARGS, group(response_length=[2, 4])) == KEEP
    assert at_most(3)(ARGS, group(response_length=[3, 4])) == drop("overlong")
    with pytest.raises(ConfigError, match="num_tokens"):
        at_most(0)


def test_truncated_samples_are_masked_and_no_others() -> None:
    groups = [group(status=[C, T]), group(status=[T, C])]
    mask_truncated(ARGS, groups)
    assert [[s.remove_sample for s in g] for g in groups] == [[False, True], [True, False]]


def test_where_nothing_passes_about_one_in_32_is_kept_and_always_the_same_ones() -> None:
    equal = [group(row=row, reward=[1.0, 1.0]) for row in range(3200)]
    kept = [g.uid.row for g in equal if nonzero_or_some(ARGS, g).keep]
    assert 60 <= len(kept) <= 140  # 100 expected, 9.8 the standard deviation
    assert kept == [g.uid.row for g in reversed(equal) if nonzero_or_some(ARGS, g).keep][::-1]
    reasons = {nonzero_or_some(ARGS, g).reason for g in equal if g.uid.row not in kept}
    assert reasons == {"zero_std"}


def test_the_fallback_keeps_what_the_filter_keeps_and_never_a_group_without_rewards() -> None:
    every = with_fallback(window, keep_one_in=1)
    assert all(nonzero_or_some(ARGS, group(row=row, reward=[0.0, 1.0])).keep for row in range(100))
    assert every(ARGS, group(reward=[1.0, 1.0])) == KEEP
    assert every(ARGS, group(reward=[None, None])) == drop("no_rewards")
    with pytest.raises(ConfigError, match="keep_one_in"):
        with_fallback(window, keep_one_in=0)


def fanned_out(*parts: list[tuple[float, str]]) -> SampleGroup:
    """A group whose samples have these parts, each a reward and a response."""
    uid = GroupUid("data", 0, 0)
    rows = [(index, part, *own) for index, rows in enumerate(parts) for part, own in enumerate(rows)]
    return SampleGroup(
        uid=uid,
        samples=[
            Sample(uid=uid, sample_index=i, part=p, reward=reward, response=text, tokens=[1] * len(text))
            for i, p, reward, text in rows
        ],
    )


def test_a_sample_of_several_parts_counts_once_in_every_filter() -> None:
    lone_success = fanned_out([(1.0, "a")] * 6, [(0.0, "b")], [(0.0, "c")])  # a mean of 1/3, and of 3/4 over rows
    assert between(0.2, 0.5)(ARGS, lone_success) == KEEP
    assert nonzero(ARGS, fanned_out([(1.0, "a"), (0.0, "b")], [(0.0, "c"), (1.0, "d")])) == drop("zero_std")
    assert nonzero(ARGS, lone_success) == KEEP
    assert distinct(ARGS, fanned_out([(1.0, "a"), (1.0, "b")], [(0.0, "a"), (0.0, "b")])) == drop("duplicates")
    assert distinct(ARGS, lone_success) == KEEP


def test_the_mean_length_counts_a_sample_of_several_parts_once() -> None:
    group = fanned_out([(1.0, "a")] * 6, [(0.0, "b" * 9)])
    for sample in group:
        sample.response_length = len(sample.response)
    assert at_most(4)(ARGS, group) == drop("overlong")  # a mean of 5, and of 15/7 over rows
    assert at_most(5)(ARGS, group) == KEEP


def test_the_filter_of_slimes_name_takes_lists_of_parts() -> None:
    from buffer_rl_slime.rewards import check_reward_nonzero_std

    def entry(*rewards: float) -> list[Sample]:
        return [Sample(reward=reward) for reward in rewards]

    assert check_reward_nonzero_std(ARGS, [entry(1.0, 1.0), entry(0.0)]).keep
    assert not check_reward_nonzero_std(ARGS, [entry(1.0, 1.0), entry(1.0)]).keep
    assert not check_reward_nonzero_std(ARGS, fanned_out([(1.0, "a"), (0.0, "b")], [(0.5, "c")])).keep
