"""Functions written for slime's documented signatures, run unchanged by the built-in rollout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import RolloutError
from buffer_rl.kinds.rollout import as_leased_group
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, QueueHeader, RolloutOutput, Sample, SampleGroup, Status, Ticket
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.user_functions import LogFunctions, UserFunction, choose_queued
from buffer_rl.rollout.user_rollout import run_user_rollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer
from harness.fake_client import client_of

FILE = Path(__file__).with_name("slime_style.py")


def ref(name: str) -> str:
    return f"{FILE}:{name}"


def make_groups(count: int) -> list[SampleGroup]:
    groups = []
    for row in range(count):
        uid = GroupUid("source", row, 0)
        samples = [
            Sample(uid=uid, sample_index=i, group_index=row, index=2 * row + i, prompt="ab", label="x")
            for i in range(2)
        ]
        groups.append(SampleGroup(uid=uid, samples=samples, attempt=4, incarnation="inc"))
    return groups


async def run(
    rollout: str | None = None, *, wanted: int = 2, evaluation: bool = False, **options: Any
) -> tuple[FakeBuffer, RolloutOutput, Any]:
    """One rollout; the buffer, the output, and the options."""
    defaults = {"rollout_batch_size": 2, "custom_generate_function_path": ref("custom_generate")}
    args = compose(CORE_SECTIONS)(**{**defaults, "custom_rm_path": ref("reward_func"), **options})
    ticket = Ticket(rollout_id=5, evaluation=evaluation, num_groups=wanted, version=5, incarnation="inc")
    buffer = FakeBuffer(make_groups(4), ticket)
    registry = PluginRegistry()
    function: Callable[..., Any] = registry.resolve("rollout", ref(rollout)) if rollout else DefaultRollout(args)
    context = RolloutContext.build(args, registry=registry, engine=None, tokenizer=make_char_tokenizer())
    try:
        with context.active():
            output = await run_user_rollout(function, args, client_of(buffer, context), where=f"train_5, {rollout}")
    finally:
        await context.aclose()
    for group in output.groups:
        if not group.foreign:  # which the fake never leased
            buffer.finish(group)
    return buffer, output, args


async def test_generate_reward_and_filter_run_under_the_built_in_rollout() -> None:
    buffer, output, args = await run(dynamic_sampling_filter_path=ref("check_differ"))
    assert [[sample.reward for sample in group] for group in buffer.finished] == [[0.0, 1.0]] * 2
    _, columns = GroupConverter.from_args(args, PluginRegistry()).encode(buffer.finished[0], False)
    assert columns["loss_mask"][0].tolist() == [1.0, 0.0, 1.0]
    assert output.metrics["raw_reward"] == 0.5


async def test_samples_of_another_packages_class_are_read() -> None:
    buffer, _, _ = await run(custom_generate_function_path=ref("generate_others"), custom_rm_path=None, rm_type="f1")
    parts = buffer.finished[0].samples
    assert [(part.sample_index, part.part) for part in parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(type(part), part.response, part.own, part.status) for part in parts} == {
        (Sample, "x", "kept", Status.COMPLETED)
    }
    _, output, _ = await run("rollout_of_others")
    assert [[sample.tokens for sample in group] for group in output.groups] == [[[3, 4, 7]] * 2] * 2
    assert all(group.foreign for group in output.groups)  # they do not say which lease they are of
    _, output, _ = await run("rollout_of_others", evaluation=True)
    assert output.metrics == {"eval/mine": 0.5, "eval/mine/response_len": 1.0}


async def test_a_filters_reason_is_counted_and_a_boolean_will_do() -> None:
    buffer, _, _ = await run(
        wanted=1, dynamic_sampling_filter_path=ref("check_bool"), custom_generate_function_path=ref("custom_generate")
    )
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "filtered")]
    with pytest.raises(RolloutError, match=r"zero_std_0\.5"):
        await run(
            custom_generate_function_path=ref("generate_segments"), dynamic_sampling_filter_path=ref("check_differ"),
            dynamic_sampling_max_drops=1,
        )  # fmt: skip


async def test_a_sample_may_become_several_segments() -> None:
    buffer, _, args = await run(custom_generate_function_path=ref("generate_segments"))
    row_ids, columns = GroupConverter.from_args(args, PluginRegistry()).encode(buffer.finished[0], False)
    assert [(row.sample_index, row.part) for row in row_ids] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert columns["response_length"].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("name", ["generate_rollout", "generate_rollout_keyword_only", "generate_rollout_output"])
async def test_a_rollout_function_may_return_plain_lists_of_samples(name: str) -> None:
    buffer, output, _ = await run(name)
    assert [group.uid.row for group in buffer.finished] == [0, 1]
    assert {(group.attempt, group.incarnation) for group in buffer.finished} == {(4, "inc")}
    assert [[sample.reward for sample in group] for group in buffer.finished] == [[0.0, 1.0]] * 2
    assert output.metrics.get("turns") == (2.0 if name.endswith("keyword_only") else None)


async def test_the_parts_of_a_sample_may_be_a_list_in_its_place() -> None:
    buffer, _, args = await run("generate_nested")
    row_ids, columns = GroupConverter.from_args(args, PluginRegistry()).encode(buffer.finished[1], False)
    assert [(row.uid.row, row.sample_index, row.part) for row in row_ids] == [(1, i, n) for i in (0, 1) for n in (0, 1)]
    assert columns["response_length"].tolist() == [1, 2, 1, 2]


async def test_a_rollout_without_metrics_has_those_of_its_samples() -> None:
    buffer, output, _ = await run("text_statuses")
    assert len(buffer.finished) == 2
    assert output.metrics == {
        "raw_reward": 0.5,
        "raw_reward_std": 0.5,
        "response_len/mean": 3.0,
        "response_len/max": 3.0,
        "truncated_ratio": 0.5,
        "zero_std": 0.0,
    }
    assert all(type(sample.status) is Status for group in buffer.finished for sample in group)
    _, output, _ = await run("own_reward_metric")
    assert (output.metrics["rollout/raw_reward"], output.metrics["truncated_ratio"]) == (9.0, 0.0)
    assert "raw_reward" not in output.metrics
    _, output, _ = await run("generate_rollout", loss_type="sft_loss")
    assert output.metrics.keys() == {"response_len/mean", "response_len/max"}
    _, output, _ = await run("eval_plain_lists", evaluation=True)
    of_set = {"eval/default": 0.5, "eval/default/response_len": 3.0, "eval/default/truncated": 0.0}
    assert output.metrics == of_set | {"eval/default/pass_at_2": 1.0}


async def test_an_unknown_status_of_a_rollout_is_named_with_its_row() -> None:
    with pytest.raises(RolloutError) as caught:
        await run("unknown_statuses")
    assert caught.value.where == "train_5, unknown_statuses, row source:1:0/0.0"
    assert "sample.status is 'done'" in str(caught.value)
    assert caught.value.expected == "pending, completed, truncated, aborted, failed"


async def test_the_segments_of_an_evaluated_sample_count_as_one() -> None:
    buffer, output, _ = await run("eval_segments", evaluation=True)
    assert output.metrics == {"eval/aime": 0.5, "eval/aime/truncated": 0.5, "eval/aime/response_len": 1.0}
    assert [[(s.sample_index, s.part) for s in group] for group in buffer.finished] == [
        [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]
    ] * 2


@pytest.mark.parametrize("name", ["eval_rollout", "eval_rollout_output"])
async def test_an_evaluation_may_return_rewards_by_data_set(name: str) -> None:
    buffer, output, _ = await run(name, evaluation=True)
    means = {"eval/aime": 0.5, "eval/aime/truncated": 0.0, "eval/aime/response_len": 3.0}
    assert output.metrics == (means | {"eval/turns": 3.0} if name.endswith("output") else means)
    assert [group.uid.row for group in buffer.finished] == [0, 1]
    assert {(group.attempt, group.incarnation) for group in buffer.finished} == {(4, "inc")}


async def test_an_evaluation_may_have_prompts_of_its_own() -> None:
    buffer, output, _ = await run("eval_own_prompts", evaluation=True, reward_key="acc")
    assert output.metrics == {"eval/mine": 0.5, "eval/mine/truncated": 0.5, "eval/mine/response_len": 4.0}
    assert buffer.finished == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("eval_without_rewards", "it returned {'scores': [1.0]}"),
        ("eval_with_a_number", "rewards is 0.5"),
        ("eval_with_text", "the reward is 'good'"),
        ("eval_own_prompts", "--reward-key names none"),
    ],
)
async def test_an_evaluation_that_says_something_else_names_the_data_set(name: str, problem: str) -> None:
    with pytest.raises(RolloutError) as caught:
        await run(name, evaluation=True)
    assert caught.value.where == f"train_5, {name}, data set 'mine'"
    assert problem in str(caught.value)
    assert "expected: {data set: {'rewards': [a number a sample]" in str(caught.value)


async def test_a_mapping_is_no_training_rollout() -> None:
    with pytest.raises(RolloutError, match=r"the rollout function returned \{'mine'"):
        await run("eval_own_prompts")


def test_a_buffer_filter_that_looks_at_no_sample_runs() -> None:
    headers = [QueueHeader(uid=GroupUid("s", row, 0), admitted=row, prompt_length=1) for row in range(3)]
    chosen = UserFunction("buffer_filter", "take_first", PluginRegistry().resolve("buffer_filter", ref("take_first")))
    assert choose_queued(chosen, None, 0, headers, 2) == [header.uid for header in headers[:2]]
    assert len(headers) == 3, "nothing is removed from the queue"


@pytest.mark.parametrize("name", ["take_best", "take_own"])
def test_a_buffer_filter_that_looks_at_samples_is_told_what_it_gets(name: str) -> None:
    headers = [QueueHeader(uid=GroupUid("s", row, 0), admitted=row, prompt_length=1) for row in range(3)]
    chosen = UserFunction("buffer_filter", name, PluginRegistry().resolve("buffer_filter", ref(name)))
    with pytest.raises(RolloutError) as caught:
        choose_queued(chosen, None, 0, headers, 2)
    assert caught.value.where == f"buffer_filter {name!r}, rollout 0"
    assert "expected: a list of some of the headers (buffer_rl.records.groups.QueueHeader)" in str(caught.value)


async def test_a_conversion_with_plural_names_is_told_the_right_ones() -> None:
    buffer, _, args = await run(custom_convert_samples_to_train_data_path=ref("to_columns"))
    with pytest.raises(RolloutError) as caught:
        GroupConverter.from_args(args, PluginRegistry()).encode(buffer.finished[0], False)
    message = str(caught.value)
    assert "samples_to_train_data" in caught.value.where
    assert "it returned a dict of tokens, response_lengths, rewards" in message
    assert "hint: the names are response_length, loss_mask and reward, not their plurals" in message


async def test_a_function_sees_all_samples_and_log_functions_run() -> None:
    paths = {
        "custom_rollout_log_function_path": ref("log_rollout_data"),
        "custom_eval_rollout_log_function_path": ref("log_eval_rollout_data"),
    }
    buffer, _, args = await run(rollout_all_samples_process_path=ref("read_all"), **paths)
    assert [group[0].metadata["seen"] for group in buffer.finished] == [2, 2]
    functions = LogFunctions(args, PluginRegistry())
    assert await functions.metrics(buffer.ticket, buffer.finished, {}, 1.0) == {"rollout/longest": 3.0}
    ticket = Ticket(rollout_id=5, evaluation=True, num_groups=2, version=5, incarnation="inc")
    assert await functions.metrics(ticket, buffer.finished, {}, 1.0) == {"eval/default/best": 1.0}


async def test_samples_in_one_list_are_groups_again() -> None:
    buffer, _, _ = await run("generate_flat")
    assert [group.uid.row for group in buffer.finished] == [0, 1]
    assert [[sample.sample_index for sample in group] for group in buffer.finished] == [[0, 1], [0, 1]]
    _, output, _ = await run("generate_flat_of_own", n_samples_per_prompt=2)
    assert [[sample.reward for sample in group] for group in output.groups] == [[0.0, 1.0], [2.0, 3.0]]
    assert [(group.foreign, group.uid.row) for group in output.groups] == [(True, 0), (True, 1)]
    with pytest.raises(RolloutError, match="4 samples without a uid"):
        await run("generate_flat_of_own", n_samples_per_prompt=3)


async def test_plain_lists_can_be_given_back() -> None:
    buffer, _, _ = await run("give_back_all_but_one")
    assert [group.uid.row for group in buffer.finished] == [0]
    assert [group.uid.row for group in buffer.returned] == [1]
    assert buffer.get_buffer_length() == 1


async def test_a_group_reward_a_sample_filter_and_a_post_process_run() -> None:
    buffer, _, args = await run(
        custom_group_rm_path=ref("group_reward_func"),
        custom_rm_path=None,
        rollout_sample_filter_path=ref("mask_wrong"),
        custom_reward_post_process_path=ref("centre"),
    )
    assert [sample.reward for sample in buffer.finished[0]] == [2.0, 1.0]
    assert [sample.remove_sample for sample in buffer.finished[0]] == [False, False]
    _, columns = GroupConverter.from_args(args, PluginRegistry()).encode(buffer.finished[0], False)
    assert columns["raw_reward"].tolist() == [2.0, 1.0]
    assert columns["reward"].tolist() == [1.0, 0.0]


def test_both_spellings_of_a_reference_lead_to_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILE.parent)
    registry = PluginRegistry()
    found = [registry.resolve("reward", f"slime_style{dot}reward_func") for dot in ".:"]
    assert found[0] is found[1]


def test_a_list_is_a_group_only_if_it_is_one_leased_group() -> None:
    first, second = make_groups(2)
    leased = {first.uid: first}
    assert as_leased_group(list(first), leased) == first
    for strange in ([], [first[0], second[0]], list(second), [Sample()], [first[0], None], tuple(first), None):
        assert as_leased_group(strange, leased) is None
