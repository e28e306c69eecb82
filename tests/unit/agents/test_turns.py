"""Rows of turns, with literal ids, and for random trees of turns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.agents.turns import Row, Turn, rows, turn_digest
from buffer_rl.buffer.queue import check_spans
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status, VersionSpan

UID = GroupUid(source="5c1f0a9be3d2", row=17, epoch=0)


def turn(prompt: Sequence[int], output: Sequence[int], ordinal: int = 0, version: int = 3, **fields: object) -> Turn:
    """Its log-probabilities are -1, -2, ..."""
    known = {
        "log_probs": tuple(-1.0 - number for number in range(len(output))),
        "spans": (VersionSpan(version, 0, len(output)),) if output else (),
        "digest": turn_digest(prompt, {}),
        **fields,
    }
    return Turn(prompt_ids=tuple(prompt), output_ids=tuple(output), ordinal=ordinal, **known)  # type: ignore[arg-type]


def test_a_turn_that_goes_on_behind_another_extends_its_row() -> None:
    (row,) = rows([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6, 7, 8], version=4, finish_reason="length")])
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.response_length == 6
    assert row.loss_mask == [1, 1, 0, 1, 1, 1]
    assert row.rollout_log_probs == [-1.0, -2.0, 0.0, -1.0, -2.0, -3.0]
    assert row.weight_versions == [VersionSpan(3, 0, 2), VersionSpan(4, 3, 6)]
    assert row.status is Status.TRUNCATED
    assert [each.output_ids for each in row.turns] == [(3, 4), (6, 7, 8)]


def test_a_turn_with_another_prompt_opens_a_row_whose_prompt_it_is() -> None:
    first, second = rows([turn([1, 2], [3]), turn([1, 9, 3, 4], [5])])
    assert (first.tokens, first.response_length, first.loss_mask) == ([1, 2, 3], 1, [1])
    assert (second.tokens, second.response_length, second.loss_mask) == ([1, 9, 3, 4, 5], 1, [1])


def test_the_longest_row_is_extended_and_the_others_stay_as_they_are() -> None:
    short, long = turn([1], [2], ordinal=1), turn([1], [2, 3])
    found = rows([short, long, turn([1, 2, 3, 4], [5])])
    assert sorted(row.tokens for row in found) == [[1, 2], [1, 2, 3, 4, 5]]


def test_of_two_equal_rows_the_first_in_the_order_of_turns_is_extended() -> None:
    twins = [turn([1], [2]), turn([1], [2], ordinal=1)]
    first, second = rows([*twins, turn([1, 2, 3], [4])])
    assert ([each.ordinal for each in first.turns], [each.ordinal for each in second.turns]) == ([0, 0], [1])
    assert (first.tokens, second.tokens) == ([1, 2, 3, 4], [1, 2])


def test_turns_of_equal_prompt_length_are_ordered_by_digest_not_by_completion() -> None:
    turns = [turn([1, number], [7]) for number in range(9)]
    order = sorted(range(9), key=lambda number: turns[number].digest)
    assert order != list(range(9))
    assert [row.tokens[1] for row in rows(turns)] == order == [row.tokens[1] for row in rows(reversed(turns))]


def test_a_turn_without_tokens_makes_no_row_and_extends_none() -> None:
    empty = turn([1, 2], [], finish_reason="abort")
    assert rows([empty]) == rows([]) == []
    (row,) = rows([turn([1], [2]), turn([1, 2, 3], [], finish_reason="length")])
    assert (row.tokens, row.status) == ([1, 2], Status.COMPLETED)


def test_two_turns_of_one_identity_are_refused_since_one_of_them_would_be_trained_twice() -> None:
    with pytest.raises(RolloutError, match="two turns have one identity"):
        rows([turn([1], [2]), turn([1], [3])])


def test_kept_tokens_of_observations_are_empty_and_one_turn_without_them_leaves_the_row_without() -> None:
    first, second = turn([1], [2], kept=(b"ab",)), turn([1, 2, 3], [4], kept=(b"cd",))
    assert rows([first, second])[0].rollout_kept_tokens == [b"ab", b"", b"cd"]
    assert rows([first, turn([1, 2, 3], [4])])[0].rollout_kept_tokens is None
    assert rows([turn([1], [2]), second])[0].rollout_kept_tokens is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_ids": ()}, "it has no prompt"),
        ({"log_probs": (-1.0,)}, "1 log_probs, 0 kept, 2 output tokens"),
        ({"kept": (b"",)}, "2 log_probs, 1 kept, 2 output tokens"),
        ({"kept": ()}, "2 log_probs, 0 kept, 2 output tokens"),
        ({"experts": np.zeros((3, 1, 1))}, r"experts of 3 tokens for 1 \+ 2"),
        ({"spans": (VersionSpan(1, 0, 1),)}, "do not tile 2 output tokens"),
        ({"finish_reason": "tool_calls"}, "unknown finish reason 'tool_calls'"),
    ],
)
def test_a_turn_that_does_not_fit_together_is_refused(fields: dict[str, object], problem: str) -> None:
    known = {"prompt_ids": (1,), "output_ids": (2, 3), "log_probs": (-1.0, -1.0), "digest": "ab" * 32, **fields}
    with pytest.raises(RolloutError, match=problem) as caught:
        Turn(**known)  # type: ignore[arg-type]
    assert "turn abababababab/0" in str(caught.value)


def test_the_digest_of_a_turn_is_that_of_its_prompt_and_parameters() -> None:
    digest = turn_digest([1, 2], {"temperature": 1.0, "top_p": 0.9})
    assert digest == turn_digest((1, 2), {"top_p": 0.9, "temperature": 1.0})
    others = [turn_digest([1, 3], {"temperature": 1.0, "top_p": 0.9}), turn_digest([1, 2], {"temperature": 1.0})]
    assert len({digest, *others}) == 3


def test_a_row_becomes_a_part_of_its_sample_and_passes_the_check_of_version_spans() -> None:
    prompt = Sample(uid=UID, sample_index=1, label="5", metadata={"level": 2})
    found = rows([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])])
    (sample,) = (row.sample(prompt, part) for part, row in enumerate(found, start=2))
    assert (str(sample.row_id), sample.label, sample.metadata) == (f"{UID}/1.2", "5", {"level": 2})
    assert (sample.tokens, sample.loss_mask, sample.status) == ([1, 2, 3, 4, 5, 6], [1, 1, 0, 1], Status.COMPLETED)
    assert (sample.prompt_length, sample.effective_response_length, sample.oldest_version) == (2, 3, 3)
    check_spans(SampleGroup(uid=UID, samples=[sample]))


@st.composite
def trees(draw: st.DrawFn) -> list[Turn]:
    """Turns as agents make them: a prompt of its own, or the tokens of another turn and some more, or a prompt that was
    sent before; few token ids, so that unrelated prompts meet too."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 12))):
        prompt = draw(ids)
        if turns and draw(st.booleans()):
            parent = draw(st.sampled_from(turns))
            prompt = [*parent.prompt_ids, *parent.output_ids, *draw(st.lists(st.integers(0, 2), max_size=2))]
        output = draw(st.lists(st.integers(0, 2), max_size=3))
        ordinal = sum(each.prompt_ids == tuple(prompt) for each in turns)
        turns.append(turn(prompt, output, ordinal, version=len(turns), log_probs=(-float(len(turns)),) * len(output)))
    return turns


def trained(row: Row) -> list[tuple[int, float]]:
    pairs = zip(row.tokens[-row.response_length :], row.rollout_log_probs, row.loss_mask, strict=True)
    return [(token, log_prob) for token, log_prob, mask in pairs if mask]


@given(trees())
def test_each_sampled_token_is_trained_exactly_once_and_nothing_else(turns: list[Turn]) -> None:
    found = rows(turns)
    sampled = Counter((t, p) for each in turns for t, p in zip(each.output_ids, each.log_probs, strict=True))
    assert Counter(pair for row in found for pair in trained(row)) == sampled
    assert sum(len(row.turns) for row in found) == sum(bool(each.output_ids) for each in turns)


@given(trees())
def test_each_turn_lies_behind_its_own_prompt_with_its_own_versions(turns: list[Turn]) -> None:
    for row in rows(turns):
        spans = [(span.version, span.start) for span in row.weight_versions]
        prompt_length = len(row.tokens) - row.response_length
        for each, (version, start) in zip(row.turns, spans, strict=True):
            assert tuple(row.tokens[: prompt_length + start]) == each.prompt_ids
            assert tuple(row.tokens[prompt_length + start :][: len(each.output_ids)]) == each.output_ids
            assert each is turns[version]
        samples = [row.sample(Sample(uid=UID), 0)]
        check_spans(SampleGroup(uid=UID, samples=samples))


@given(trees(), st.randoms(use_true_random=False))
def test_the_order_of_completion_has_no_influence(turns: list[Turn], chance: random.Random) -> None:
    shuffled = chance.sample(turns, len(turns))
    assert rows(shuffled) == rows(turns)


@given(trees())
def test_a_row_is_extended_wherever_one_can_be(turns: list[Turn]) -> None:
    """No row's first prompt begins with another row that was complete before it."""
    found = rows(turns)
    for row in found:
        first = row.turns[0]
        for other in found:
            shorter = [each for each in other.turns if each.order < first.order]
            if shorter:
                done = (*shorter[-1].prompt_ids, *shorter[-1].output_ids)
                assert first.prompt_ids[: len(done)] != done


def test_a_row_has_the_experts_of_the_first_turn_that_held_each_token() -> None:
    def numbered(first: int, count: int) -> np.ndarray:
        return np.arange(first, first + count, dtype=np.uint8).reshape(-1, 1, 1)

    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    first = turn([1, 2], [3, 4], experts=numbered(10, 3), spans=spans)
    second, branch = turn([1, 2, 3, 4, 5], [6], experts=numbered(20, 5)), turn([1, 9], [7], experts=numbered(30, 2))
    found = {tuple(row.tokens): row for row in rows([second, first, branch])}
    one = found[1, 2, 3, 4, 5, 6].sample(Sample(uid=UID), 0)
    # Token 4 was sampled in the first turn, and is computed for the token behind it in the second.
    assert one.rollout_routed_experts.reshape(-1).tolist() == [10, 11, 12, 23, 24]
    assert one.experts_recomputed == 1
    other = found[1, 9, 7].sample(Sample(uid=UID), 1)
    assert other.rollout_routed_experts.reshape(-1).tolist() == [30, 31]
    assert "experts_recomputed" not in vars(other)
    parts = {"experts": numbered(43, 2), "experts_start": 3, "base": first}
    goes_on, fork = turn([1, 2, 3, 4, 5], [6], **parts), turn([1, 2, 3, 4, 8], [9], **parts)
    for row in rows([first, goes_on, fork]):
        assert row.rollout_routed_experts is not None
        assert row.rollout_routed_experts.reshape(-1).tolist() == [10, 11, 12, 43, 44]
    for turns in ([first, turn([1, 2, 3, 4], [5])], [turn([1, 2], [3, 4]), second]):
        assert rows(turns)[0].rollout_routed_experts is None
