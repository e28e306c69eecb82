"""What a group keeps in the queue: prompts alone, or its tokens, and which of them may be trained on."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from buffer_rl.buffer.codec import group_from_json, group_to_json
from buffer_rl.buffer.queue import RequeueRule, check_spans, check_versions, mask_older, oldest_version
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status, Ticket, VersionSpan

UID = GroupUid("s", 4, 1)
KEEP = RequeueRule(keep_tokens=True)


def responded(index: int, status: Status, *spans: tuple[int, int], **fields: Any) -> Sample:
    """A sample with a prompt of two tokens and ``spans`` of (version, number of tokens)."""
    ends = [sum(count for _, count in spans[: i + 1]) for i in range(len(spans))]
    length = ends[-1] if ends else 0
    return Sample(
        uid=UID,
        sample_index=index,
        prompt="p",
        tokens=[1, 2, *range(10, 10 + length)],
        response="x" * length,
        response_length=length,
        rollout_log_probs=[-0.25 * i for i in range(length)],
        weight_versions=[
            VersionSpan(version, end - count, end) for (version, count), end in zip(spans, ends, strict=True)
        ],
        status=status,
        **fields,
    )


def prompts(count: int) -> SampleGroup:
    return SampleGroup(
        uid=UID, samples=[Sample(uid=UID, sample_index=i, prompt="p") for i in range(count)], attempt=3, incarnation="i"
    )


def group_of(*samples: Sample) -> SampleGroup:
    return SampleGroup(uid=UID, samples=list(samples), attempt=3, incarnation="i")


def test_without_the_rule_prompts_go_back() -> None:
    done = group_of(responded(0, Status.COMPLETED, (1, 3), reward=1.0), responded(1, Status.ABORTED, (1, 2)))
    assert RequeueRule().on_requeue(done, prompts(2)) == prompts(2)
    assert KEEP.on_requeue(None, prompts(2)) == prompts(2)


def test_a_kept_group_has_its_done_and_aborted_samples_and_fresh_prompts_for_the_rest() -> None:
    done, aborted = responded(0, Status.COMPLETED, (1, 3), reward=1.0), responded(1, Status.ABORTED, (1, 2), (2, 1))
    never, failed = responded(2, Status.PENDING), responded(3, Status.FAILED, (1, 1))
    group = group_of(done, aborted, never, failed)
    before = copy.deepcopy(group)
    kept = KEEP.on_requeue(group, prompts(4))
    assert kept.samples[:2] == [done, aborted]
    assert kept.samples[2:] == prompts(4).samples[2:]
    assert (kept.attempt, oldest_version(kept)) == (3, 1)
    kept[0].tokens.append(99)
    assert group == before


def test_all_parts_of_a_done_sample_are_kept_and_those_of_an_unfinished_one_start_anew() -> None:
    parts = [responded(0, Status.COMPLETED, (1, 2), part=part) for part in range(2)]
    torn = [responded(1, Status.COMPLETED, (1, 2)), responded(1, Status.ABORTED, (1, 2), part=1)]
    kept = KEEP.on_requeue(group_of(*parts, *torn), prompts(2))
    assert [(s.sample_index, s.part, s.response_length) for s in kept] == [(0, 0, 2), (0, 1, 2), (1, 0, 0)]


@pytest.mark.parametrize(
    "breakage",
    [
        {"rollout_log_probs": None},
        {"rollout_log_probs": [-1.0]},
        {"rollout_log_probs": [-1.0, float("nan")]},
        {"weight_versions": []},
        {"weight_versions": [VersionSpan(1, 0, 1)]},
        {"weight_versions": [VersionSpan(1, 1, 2)]},
        {"loss_mask": [1]},
        {"rollout_kept_tokens": [b""]},
        {"tokens": [10, 11]},
    ],
)
def test_a_response_whose_fields_do_not_belong_together_starts_anew(breakage: dict[str, Any]) -> None:
    sample = responded(0, Status.ABORTED, (1, 2))
    assert KEEP.on_requeue(group_of(sample), prompts(1))[0].response_length == 2
    for name, value in breakage.items():
        setattr(sample, name, value)
    assert KEEP.on_requeue(group_of(sample), prompts(1)) == prompts(1)


@pytest.mark.parametrize("metadata", [{"tool": object()}, {"calls": {3: "a key of JSON is a text"}}])
def test_what_no_checkpoint_can_hold_is_queued_as_prompts(metadata: dict[str, Any]) -> None:
    sample = responded(0, Status.ABORTED, (1, 2), metadata=metadata)
    assert KEEP.on_requeue(group_of(sample), prompts(1)) == prompts(1)


def test_an_integer_of_more_than_64_bits_costs_no_tokens() -> None:
    sample = responded(0, Status.ABORTED, (1, 2), metadata={"answer": 2**64})
    assert KEEP.on_requeue(group_of(sample), prompts(1))[0].response_length == 2


def test_under_the_mask_a_complete_group_starts_anew_and_older_tokens_are_context() -> None:
    rule = RequeueRule(keep_tokens=True, mask_older=True)
    done, aborted = responded(0, Status.COMPLETED, (1, 3)), responded(1, Status.ABORTED, (1, 2), (2, 1))
    assert rule.on_requeue(group_of(done, responded(1, Status.TRUNCATED, (1, 1))), prompts(2)) == prompts(2)
    leased = rule.on_lease(rule.on_requeue(group_of(done, aborted), prompts(2)), version=2)
    assert [sample.loss_mask for sample in leased] == [[0, 0, 0], [0, 0, 1]]


def test_masking_older_tokens_leaves_the_masks_of_others() -> None:
    sample = responded(0, Status.ABORTED, (1, 2), (3, 2), loss_mask=[1, 1, 0, 1])
    mask_older(sample, 1)
    assert sample.loss_mask == [1, 1, 0, 1]
    mask_older(sample, 3)
    assert sample.loss_mask == [0, 0, 0, 1]


def ticket(*, mixes_versions: bool = False, max_staleness: int | None = 3) -> Ticket:
    return Ticket(
        rollout_id=1,
        evaluation=False,
        num_groups=1,
        version=1,
        incarnation="i",
        max_staleness=max_staleness,
        mixes_versions=mixes_versions,
    )


@pytest.mark.parametrize(
    ("at_lease", "mixes", "mask", "fits"),
    [
        (2, False, None, False),  # tokens of 1 are trained on
        (2, False, [0, 0, 1], True),
        (2, False, [0, 1, 1], False),
        (1, False, [1, 1, 0], True),
        (1, False, None, False),  # a token of 2 of a group that was leased at 1
        (0, False, None, False),
        (0, True, None, True),
        (1, True, None, True),
        (2, True, None, False),  # a token of 1 of a group that was leased at 2, far within the bound
        (2, True, [0, 0, 1], True),
        (3, True, None, False),
        (None, False, None, False),  # without a lease: the version of the ticket, which is 1
        (None, False, [1, 1, 0], True),
        (None, True, None, True),
    ],
)
def test_a_trained_token_is_of_the_version_at_the_lease_or_of_a_later_one_if_versions_mix(
    at_lease: int | None, mixes: bool, mask: list[int] | None, fits: bool
) -> None:
    group = group_of(responded(0, Status.COMPLETED, (1, 2), (2, 1), loss_mask=mask))
    asked = ticket(mixes_versions=mixes)
    if fits:
        check_versions(asked, group, at_lease)
        return
    expected = 1 if at_lease is None else at_lease
    with pytest.raises(RolloutError, match=rf"of weight version [12](\n|.)*expected: version {expected}") as caught:
        check_versions(asked, group, at_lease)
    assert "s:4:1/0.0" in caught.value.where


@pytest.mark.parametrize("unchecked", [ticket(max_staleness=None), replace(ticket(), evaluation=True)])
def test_versions_of_evaluations_and_of_runs_that_publish_nothing_are_not_checked(unchecked: Ticket) -> None:
    check_versions(unchecked, group_of(responded(0, Status.COMPLETED, (1, 2), (2, 1))), 9)


def test_a_removed_sample_is_not_trained_on_so_its_versions_do_not_matter() -> None:
    check_versions(ticket(), group_of(responded(0, Status.COMPLETED, (1, 2), remove_sample=True)), 7)


@pytest.mark.parametrize(
    ("spans", "mask", "fault"),
    [
        ([], None, None),  # nothing is known of its tokens
        ([(0, 5)], None, None),
        ([(0, 2), (2, 5)], None, None),
        ([(0, 2), (3, 5)], [1, 1, 0, 1, 1], None),  # a tool's answer
        ([(0, 2)], [1, 1, 0, 0, 0], None),
        ([(1, 5)], [0, 1, 1, 1, 1], None),
        ([(0, 2), (3, 5)], None, "tokens 2 to 3 are trained on"),
        ([(0, 2), (3, 5)], [1] * 5, "tokens 2 to 3 are trained on"),
        ([(1, 5)], None, "tokens 0 to 1 are trained on"),
        ([(0, 4)], None, "tokens 4 to 5 are trained on"),
        ([(0, 6)], None, "do not fit its 5 response tokens"),
        ([(0, 3), (2, 5)], None, "do not fit its 5 response tokens"),
        ([(2, 5), (0, 2)], None, "do not fit its 5 response tokens"),
        ([(0, 0), (0, 5)], None, "do not fit its 5 response tokens"),
        ([(-1, 5)], None, "do not fit its 5 response tokens"),
    ],
)
def test_version_spans_cover_the_tokens_that_an_engine_generated(
    spans: list[tuple[int, int]], mask: list[int] | None, fault: str | None
) -> None:
    sample = responded(0, Status.COMPLETED, (1, 5), loss_mask=mask)
    sample.weight_versions = [VersionSpan(1, *span) for span in spans]
    group = group_of(responded(1, Status.COMPLETED, (1, 2)), sample)
    if fault is None:
        check_versions(ticket(), group, 1)
        return
    for check in (check_spans, lambda group: check_versions(ticket(), group, 1)):
        with pytest.raises(RolloutError, match=fault) as caught:
            check(group)
        assert caught.value.where == "row s:4:1/0.0"
    sample.remove_sample = True
    check_spans(group)


def test_version_spans_of_another_type_are_named() -> None:
    sample = responded(0, Status.COMPLETED, (1, 2))
    sample.weight_versions = ["1"]  # type: ignore[list-item]
    with pytest.raises(RolloutError, match=r"weight_versions are \['1'\](\n|.)*expected: VersionSpan"):
        check_spans(group_of(sample))


def test_responses_survive_the_way_through_json_exactly() -> None:
    done = responded(0, Status.COMPLETED, (1, 3), reward={"a": 0.1, "b": [1]}, loss_mask=[1, 0, 1])
    aborted = responded(1, Status.ABORTED, (1, 2), (2, 1), train_metadata={"k": b"\x00"}, remove_sample=True)
    aborted.rollout_kept_tokens = [b"", b"\x05\0\0\0\xff\x01\0\0", b""]
    aborted.rollout_log_probs = [-1 / 3, -1e-300, -0.0]
    aborted.teacher_log_probs = [-1 / 7, -2e-300, 0.0]
    group = group_of(done, aborted, Sample(uid=UID, sample_index=2, prompt="p"))
    group.incarnation = ""
    assert group_from_json(orjson.loads(orjson.dumps(group_to_json(group)))) == group


def test_after_a_resume_tokens_of_versions_to_come_are_worth_nothing() -> None:
    group = group_of(responded(0, Status.ABORTED, (1, 2), (2, 1)))
    assert KEEP.on_restore(group, version=2) is group
    assert KEEP.on_restore(group, version=1) == prompts(1)
    assert RequeueRule().on_restore(group, version=2) == prompts(1)


def test_tokens_of_a_run_that_replayed_kept_tokens_go_on_in_such_a_run_alone() -> None:
    group = group_of(responded(0, Status.ABORTED, (1, 2)), Sample(uid=UID, sample_index=1, prompt="p"))
    replays = RequeueRule(keep_tokens=True, replays=True)
    assert replays.on_restore(group, version=1) == prompts(2)
    group[0].rollout_kept_tokens = [b"", b"\x05\0\0\0"]
    assert replays.on_restore(group, version=1) is group
    assert KEEP.on_restore(group, version=1) == prompts(2)


def test_tokens_without_experts_start_again_in_a_run_that_replays_experts() -> None:
    replays = RequeueRule(keep_tokens=True, replays_experts=True)

    def aborted(experts: Any) -> SampleGroup:
        return group_of(responded(0, Status.ABORTED, (1, 2), rollout_routed_experts=experts))

    fits = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    for experts in (None, np.zeros((4, 2, 2), dtype=np.uint8), 7, "text"):
        assert replays.on_requeue(aborted(experts), prompts(1)) == prompts(1)
        assert replays.on_restore(aborted(experts), version=1) == prompts(1)
        assert KEEP.on_restore(group := aborted(experts), version=1) is group
    queued = replays.on_requeue(aborted(fits), prompts(1))
    again = replays.on_restore(group_from_json(orjson.loads(orjson.dumps(group_to_json(queued)))), version=1)
    assert again[0].rollout_routed_experts.dtype == np.uint8
    assert np.array_equal(again[0].rollout_routed_experts, fits)


def test_the_reward_of_a_queued_group_is_the_mean_of_those_it_has() -> None:
    group = group_of(*(responded(i, Status.COMPLETED, (1, 1), reward=r) for i, r in enumerate((0.0, 1.0, None))))
    assert KEEP.reward(group) == 0.5
    for sample in group:
        sample.reward = {"acc": 3.0, "text": "x"}
    assert KEEP.reward(group) is None
    assert RequeueRule(reward_key="acc").reward(group) == 3.0
    assert RequeueRule(reward_key="text").reward(group) is None
    parts = [responded(0, Status.COMPLETED, (1, 1), reward=0.0, part=part) for part in range(4)]
    assert KEEP.reward(group_of(*parts, responded(1, Status.COMPLETED, (1, 1), reward=1.0))) == 0.5


def test_a_sample_that_was_given_up_starts_anew() -> None:
    given_up = responded(0, Status.ABORTED, (1, 2), remove_sample=True)
    (queued,) = KEEP.on_requeue(group_of(given_up), prompts(1))
    assert (queued.tokens, queued.remove_sample, queued.status) == ([], False, Status.PENDING)
