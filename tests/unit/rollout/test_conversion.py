from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.buffer.columns import column_bytes, concat_columns
from buffer_rl.errors import RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import RowId, Sample, SampleGroup, Status, VersionSpan
from buffer_rl.rollout.conversion import GroupConverter


def scored(kit: Any, rewards: list[float], *, row: int = 0) -> SampleGroup:
    """Prompt tokens 5 6, response tokens 7 8 9, one sample a reward."""
    group: SampleGroup = kit.make_group(row, labels=["x"] * len(rewards))
    for sample, reward in zip(group, rewards, strict=True):
        sample.tokens, sample.response_length = [5, 6, 7, 8, 9], 3
        sample.rollout_log_probs = [-0.5, -1.0, -1.5]
        sample.weight_versions = [VersionSpan(4, 0, 1), VersionSpan(3, 1, 3)]
        sample.reward, sample.status = reward, Status.COMPLETED
    return group


def encode(kit: Any, group: SampleGroup, evaluation: bool = False, **options: Any) -> Any:
    return GroupConverter(kit.make_args(**options)).encode(group, evaluation)


def test_the_columns_of_a_group_have_their_shapes_types_and_values(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0])
    group[1].status = Status.TRUNCATED
    row_ids, columns = encode(kit, group)
    assert row_ids == [RowId(group.uid, 0), RowId(group.uid, 1)]
    assert [t.tolist() for t in columns["tokens"]] == [[5, 6, 7, 8, 9]] * 2
    assert columns["tokens"][0].dtype == np.int32
    assert columns["response_length"].tolist() == [3, 3]
    assert columns["response_length"].dtype == np.int32
    assert [m.tolist() for m in columns["loss_mask"]] == [[1, 1, 1]] * 2
    assert columns["loss_mask"][0].dtype == np.float32
    assert [p.tolist() for p in columns["rollout_log_probs"]] == [[-0.5, -1.0, -1.5]] * 2
    assert columns["raw_reward"].tolist() == [0.0, 1.0]
    # mean 0.5, sample standard deviation sqrt(0.5): (1 - 0.5) / sqrt(0.5) = 0.7071
    np.testing.assert_allclose(columns["reward"], [-0.70711, 0.70711], atol=1e-4)
    assert columns["truncated"].tolist() == [False, True]
    assert columns["weight_version"].tolist() == [3, 3]


def test_without_std_normalization_rewards_are_only_centred(kit: Any) -> None:
    _, columns = encode(kit, scored(kit, [0.0, 1.0, 5.0]), grpo_std_normalization=False)
    assert columns["reward"].tolist() == [-2.0, -1.0, 3.0]


def test_uneven_groups_are_normalised_one_by_one(kit: Any) -> None:
    for rewards in ([1.0, 2.0, 3.0, 4.0], [10.0, 12.0], [5.0, 6.0, 7.0]):
        _, columns = encode(kit, scored(kit, rewards))
        assert abs(float(columns["reward"].sum())) < 1e-5


def test_a_sample_that_fanned_out_counts_once(kit: Any) -> None:
    group = scored(kit, [4.0, 0.0, 2.0])
    group[1].sample_index, group[1].part = 0, 1  # rewards 4 and 0 belong to sample 0: its mean is 2
    group[2].sample_index = 1
    group[2].reward = 6.0
    row_ids, columns = encode(kit, group, grpo_std_normalization=False)
    assert row_ids == [RowId(group.uid, 0, 0), RowId(group.uid, 0, 1), RowId(group.uid, 1, 0)]
    assert columns["reward"].tolist() == [-2.0, -2.0, 2.0]
    assert columns["raw_reward"].tolist() == [4.0, 0.0, 6.0]


def test_each_estimator_gets_rewards_of_its_normalisation_in_which_a_sample_in_parts_counts_once(kit: Any) -> None:
    group = scored(kit, [4.0, 0.0, 5.0, 5.0])
    for sample, (index, part) in zip(group, [(0, 0), (0, 1), (1, 0), (2, 0)], strict=True):
        sample.sample_index, sample.part = index, part  # samples of 2, 5 and 5: mean 4
    for estimator, expected in {
        "dr_grpo": [-2, -2, 1, 1],
        "rloo": [-3, -3, 1.5, 1.5],
        "reinforce_plus_plus": [2, 2, 5, 5],
        "pass_at_k": [0, 0, 0, 0],  # the best of every pair is 5
    }.items():
        _, columns = encode(kit, group, advantage_estimator=estimator, pass_at_k=2)
        np.testing.assert_allclose(columns["reward"], expected, err_msg=estimator)
        assert columns["raw_reward"].tolist() == [4, 0, 5, 5]


def test_a_sample_without_a_reward_leaves_the_baseline_of_the_others(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0, 5.0])
    group[1].remove_sample, group[1].reward = True, None
    _, columns = encode(kit, group, advantage_estimator="rloo")
    assert columns["reward"].tolist() == [-5, 0, 5]


def test_long_responses_are_punished_before_the_normalisation(kit: Any) -> None:
    group = scored(kit, [1.0, 1.0])
    group[0].tokens, group[0].response_length, group[0].rollout_log_probs = [5, 6, 7], 1, [-0.5]
    options = {"rollout_max_response_len": 4, "overlong_buffer_len": 2, "overlong_penalty_factor": 0.5}
    _, columns = encode(kit, group, grpo_std_normalization=False, **options)
    assert columns["raw_reward"].tolist() == [1, 1]
    assert columns["reward"].tolist() == [0.125, -0.125]  # 3 tokens, one beyond 4 - 2: 1 - 0.5 * 1 / 2 = 0.75


def test_rewards_are_shaped_before_the_normalisation_and_shown_raw(kit: Any) -> None:
    options = {"reward_clip": [1.0], "reward_scale": 4.0, "length_penalty": 1.0, "rollout_max_response_len": 6}
    group = scored(kit, [3.0, -5.0])
    group[0].tokens, group[0].response_length, group[0].rollout_log_probs = [5, 6, 7], 1, [-0.5]
    _, columns = encode(kit, group, grpo_std_normalization=False, **options)
    assert columns["raw_reward"].tolist() == [3, -5]
    # 4 - 1 / 6 and -4 - 3 / 6: their mean is -1 / 3
    np.testing.assert_allclose(columns["reward"], [4 - 1 / 6 + 1 / 3, -4 - 1 / 2 + 1 / 3], rtol=1e-6)


def test_a_removed_sample_keeps_its_row_with_a_mask_of_zeros(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0])
    group[0].remove_sample = True
    group[1].loss_mask = [0, 1, 1]
    _, columns = encode(kit, group)
    assert [m.tolist() for m in columns["loss_mask"]] == [[0, 0, 0], [0, 1, 1]]


def test_log_probs_and_versions_may_be_absent_from_a_whole_group(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0])
    for sample in group:
        sample.rollout_log_probs, sample.weight_versions = None, []
    _, columns = encode(kit, group)
    assert "rollout_log_probs" not in columns
    assert columns["weight_version"].tolist() == [-1, -1]


def test_the_teachers_log_probs_of_samples_become_a_column(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0])
    assert "teacher_log_probs" not in encode(kit, group)[1]
    group[0].teacher_log_probs = [-1.0, -2.0, -0.5]
    with pytest.raises(RolloutError, match="it has no teacher_log_probs, but others of its group have"):
        encode(kit, group)
    group[1].remove_sample = True
    _, columns = encode(kit, group)
    assert [row.tolist() for row in columns["teacher_log_probs"]] == [[-1.0, -2.0, -0.5], [0.0, 0.0, 0.0]]


def test_the_reward_key_chooses_from_a_mapping(kit: Any) -> None:
    group = scored(kit, [0.0, 0.0])
    group[0].reward, group[1].reward = {"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 9.0}
    _, columns = encode(kit, group, reward_key="a")
    assert columns["raw_reward"].tolist() == [1.0, 3.0]


def test_an_evaluation_group_has_raw_rewards_and_no_tokens(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0])
    group[0].response_length, group[0].tokens = 0, [5, 6]
    _, columns = encode(kit, group, evaluation=True)
    assert columns["reward"].tolist() == [0.0, 1.0]
    assert columns["response_length"].tolist() == [0, 3]
    assert "tokens" not in columns


def _break(sample: Sample, field: str, value: Any) -> None:
    setattr(sample, field, value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss_mask", [1, 1], "loss_mask has 2 entries"),
        ("loss_mask", [1, 1, 2], "loss_mask holds something else"),
        ("rollout_log_probs", [-1.0], "rollout_log_probs has 1 entries"),
        ("rollout_log_probs", [-1.0, float("nan"), -1.0], r"rollout_log_probs\[1\] is nan"),
        ("rollout_log_probs", None, "no rollout_log_probs"),
        ("rollout_log_probs", ["a", "b", "c"], "no numbers"),
        ("response_length", 0, "0 tokens"),
        ("response_length", 6, "there are 5 tokens"),
        ("tokens", [5, 6, 7, 8, 2**31], "int32|tokens go from"),
        ("tokens", [5, 6, 7, 8, -1], "tokens go from -1"),
        ("tokens", [5, 6, 7, 8, 1.5], "float64"),
        ("reward", None, "no reward was set"),
        ("reward", float("inf"), "its reward is inf"),
        ("reward", float("nan"), "its reward is nan"),
        ("reward", "1.0 or so", "cannot be used"),
        ("reward", 1e39, "finite in float32"),
        ("reward", {"a": 1.0}, "--reward-key"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_row(kit: Any, field: str, value: Any, message: str) -> None:
    group = scored(kit, [0.0, 1.0], row=5)
    _break(group[1], field, value)
    with pytest.raises(RolloutError, match=message) as caught:
        encode(kit, group)
    assert "source:5:0/1.0" in str(caught.value)


def test_a_foreign_uid_a_repeated_row_and_an_empty_group_are_refused(kit: Any) -> None:
    foreign, repeated, empty = (scored(kit, [0.0, 1.0]) for _ in range(3))
    foreign[1].uid = kit.make_group(9).uid
    repeated[1].sample_index = 0
    empty.samples = []
    for group, message in ((foreign, "source:9:0"), (repeated, "two samples"), (empty, "no samples")):
        with pytest.raises(RolloutError, match=message):
            encode(kit, group)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9))
def test_groups_of_any_size_join_into_one_batch(rewards: list[float]) -> None:
    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.options.section import compose

    converter = GroupConverter(compose(CORE_SECTIONS)())
    blocks = []
    for row in range(2):
        group = SampleGroup(uid=_uid(row), samples=[])
        for i, reward in enumerate(rewards):
            group.samples.append(
                Sample(uid=_uid(row), sample_index=i, tokens=[1] * (i + 2), response_length=i + 1, reward=reward)
            )
        blocks.append(converter.encode(group, False)[1])
    joined = concat_columns(blocks)
    assert len(joined["reward"]) == 2 * len(rewards)
    assert np.isfinite(np.asarray(joined["reward"])).all()
    assert [len(mask) for mask in joined["loss_mask"]] == [int(n) for n in joined["response_length"]]


def _uid(row: int) -> Any:
    from buffer_rl.records.groups import GroupUid

    return GroupUid("s", row, 0)


def encode_with(kit: Any, group: SampleGroup, **paths: str) -> Any:
    args = kit.make_args(**{name: kit.user(function) for name, function in paths.items()})
    return GroupConverter.from_args(args, PluginRegistry()).encode(group, False)[1]


def test_a_post_process_replaces_the_normalisation(kit: Any) -> None:
    group = scored(kit, [5.0, -1.0, 7.0])
    columns = encode_with(kit, group, custom_reward_post_process_path="rank_rewards")
    assert columns["raw_reward"].tolist() == [5.0, -1.0, 7.0]
    assert columns["reward"].tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("function", "words"), [("too_few_rewards", "2 finite numbers"), ("raising_post_process", "no rank today")]
)
def test_a_bad_post_process_is_named_with_its_group(kit: Any, function: str, words: str) -> None:
    with pytest.raises(RolloutError, match=words) as caught:
        encode_with(kit, scored(kit, [0.0, 1.0]), custom_reward_post_process_path=function)
    assert function in caught.value.where
    assert "source:0:0" in caught.value.where


def test_a_conversion_of_the_user_makes_the_columns(kit: Any) -> None:
    columns = encode_with(kit, scored(kit, [3.0, 4.0]), custom_convert_samples_to_train_data_path="last_token_only")
    assert columns["response_length"].tolist() == [1, 1]
    assert [mask.tolist() for mask in columns["loss_mask"]] == [[1.0], [1.0]]
    assert columns["tokens"][1].dtype == np.int32
    assert columns["reward"].tolist() == [3.0, 4.0]
    assert columns["note"] == ["x", "x"]
    assert column_bytes(columns["note"]) > 0, "what decides whether it stays in the Buffer takes plain values too"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("no_loss_mask", "at least loss_mask"),
        ("wrong_mask", "a loss_mask of 2"),
        ("weighted_mask", "loss_mask holds something else"),
    ],
)
def test_columns_that_cannot_be_trained_on_are_refused(kit: Any, function: str, words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        encode_with(kit, scored(kit, [0.0, 1.0]), custom_convert_samples_to_train_data_path=function)


def test_the_version_of_a_row_is_the_oldest_of_the_tokens_that_are_trained_on(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0, 2.0])
    for sample in group:
        sample.weight_versions = [VersionSpan(2, 0, 1), VersionSpan(5, 1, 3)]
    group[1].loss_mask = [0, 1, 1]  # an earlier turn that is context
    group[2].remove_sample = True
    _, columns = encode(kit, group)
    assert columns["weight_version"].tolist() == [2, 5, -1]


def test_rows_have_their_newest_version_too_if_a_step_may_mix_versions(kit: Any) -> None:
    group = scored(kit, [0.0, 1.0, 2.0])
    group[0].weight_versions = [VersionSpan(3, 0, 3)]
    group[1].weight_versions = [VersionSpan(4, 0, 2), VersionSpan(6, 2, 3)]
    group[2].weight_versions = []
    assert "newest_weight_version" not in encode(kit, group)[1]
    args = kit.make_args(schedule="async")
    _, columns = GroupConverter.from_args(args, PluginRegistry()).encode(group, False)
    assert columns["weight_version"].tolist() == [3, 4, -1]
    assert columns["newest_weight_version"].tolist() == [3, 6, -1]
    assert columns["newest_weight_version"].dtype == np.int32
