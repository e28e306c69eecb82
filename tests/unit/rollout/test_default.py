from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.errors import BufferRLError, DeadlineError, EngineError, RolloutError
from buffer_rl.records.groups import GroupUid, RowId, Sample, SampleGroup, Status
from buffer_rl.rollout import default
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.testing.fake_buffer import FakeBuffer

RULE = "told_by_label"


async def roll(context: Any, buffer: FakeBuffer) -> Any:
    rollout = DefaultRollout(context.args)
    return await rollout(context.args, buffer.ticket.rollout_id, buffer, evaluation=buffer.ticket.evaluation)


def make_buffer(kit: Any, labels: list[str], wanted: int, *, num_samples: int = 2) -> FakeBuffer:
    groups = [kit.make_group(row, labels=[label] * num_samples) for row, label in enumerate(labels)]
    return FakeBuffer(groups, kit.make_ticket(wanted))


def rows(buffer: FakeBuffer) -> list[int]:
    return [uid.row for uid in buffer.finished_uids]


async def test_a_rollout_finishes_its_groups_with_rewards_and_metrics(kit: Any) -> None:
    engine = kit.ScriptedEngine(
        respond=lambda ids, params: kit.answer([3, 4, 5], finish_reason="length" if ids[-1] % 2 else "stop")
    )
    buffer = make_buffer(kit, ["1", "0", "3"], wanted=3)
    async with kit.opened(engine, custom_rm_path=kit.user(RULE)) as context:
        output = await roll(context, buffer)
    assert output.groups == []
    assert rows(buffer) == [0, 1, 2]
    metrics = output.metrics
    assert metrics["raw_reward"] == pytest.approx(4 / 3)
    assert metrics["raw_reward_std"] == pytest.approx((14 / 9) ** 0.5)  # of 1, 1, 0, 0, 3, 3
    assert (metrics["response_len/mean"], metrics["response_len/max"]) == (3.0, 3.0)
    assert metrics["generated_tokens"] == 18
    assert metrics["zero_std"] == 1.0
    # The step's own times, and tokens per second of them, are the driver's.
    assert {name for name in metrics if "/" in name} == {
        "perf/generate_time", "perf/reward_time", "response_len/mean", "response_len/max",
    }  # fmt: skip
    truncated = [sample.status == "truncated" for group in buffer.finished for sample in group]
    assert metrics["truncated_ratio"] == sum(truncated) / 6
    assert 0 < sum(truncated) < 6


async def test_dropped_groups_are_replaced_one_for_one(kit: Any) -> None:
    buffer = make_buffer(kit, ["1"] * 20, wanted=3)
    options = {"custom_rm_path": kit.user(RULE), "dynamic_sampling_filter_path": kit.user("keep_odd_rows")}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        output = await roll(context, buffer)
    assert rows(buffer) == [1, 3, 5]
    assert len(buffer.leased) == 6
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "even"), (2, "even"), (4, "even")]
    assert output.metrics["drop_even"] == 3.0


async def roll_in_random_order(kit: Any, buffer: FakeBuffer, seed: int) -> Any:
    engine = kit.ScriptedEngine(order=random.Random(seed))
    options = {"custom_rm_path": kit.user("slow_async"), "dynamic_sampling_filter_path": kit.user("keep_label")}
    async with kit.opened(engine, **options) as context:
        answering = asyncio.create_task(engine.let_go())
        try:
            await roll(context, buffer)
        finally:
            answering.cancel()
    return {sample.row_id: sample.tokens for group in buffer.finished for sample in group}


async def test_groups_are_reported_together_and_at_the_latest_when_enough_are_kept(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "REPORT_S", 1e9)  # no moment comes
    kept_before: list[int] = []

    class Buffer(FakeBuffer):
        async def afinish(self, group: SampleGroup, encoded: Any = None) -> None:
            kept_before.append(len(self.finished))
            await asyncio.sleep(0)
            await super().afinish(group, encoded)

    buffer = Buffer([kit.make_group(row) for row in range(3)], kit.make_ticket(3))
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user(RULE)) as context:
        async with asyncio.timeout(30):
            await roll(context, buffer)
    assert rows(buffer) == [0, 1, 2]
    assert kept_before == [0, 0, 0]


@settings(max_examples=40)
@given(keep=st.lists(st.booleans(), min_size=12, max_size=12), wanted=st.integers(1, 4), seed=st.integers(0, 10**6))
@pytest.mark.slow
def test_the_kept_set_does_not_depend_on_the_order_of_completion(
    kit: Any, keep: list[bool], wanted: int, seed: int
) -> None:
    labels = ["1" if kept else "0" for kept in keep] + ["1"] * wanted
    expected = [row for row, label in enumerate(labels) if label == "1"][:wanted]
    buffer = make_buffer(kit, labels, wanted)
    asyncio.run(roll_in_random_order(kit, buffer, seed))
    assert rows(buffer) == expected
    assert [uid.row for uid in buffer.leased] == list(range(expected[-1] + 1))


@settings(max_examples=10)
@given(seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_tokens_do_not_depend_on_the_order_of_completion(kit: Any, seeds: tuple[int, int]) -> None:
    tokens = [asyncio.run(roll_in_random_order(kit, make_buffer(kit, ["1"] * 6, 5), seed)) for seed in seeds]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 10


async def test_the_default_generate_never_exceeds_the_concurrency(kit: Any) -> None:
    engine = kit.ScriptedEngine(order=random.Random(0))
    async with kit.opened(engine, custom_rm_path=kit.user("slow_async"), rollout_concurrency=4) as context:
        answering = asyncio.create_task(engine.let_go())
        await roll(context, make_buffer(kit, ["1"] * 4, 4))
        answering.cancel()
    assert engine.most_waiting == 4


async def test_one_failed_reward_costs_its_group_and_nothing_else(kit: Any) -> None:
    groups = [kit.make_group(row, labels=["1", "2"]) for row in range(4)]
    groups[1] = kit.make_group(1, labels=["1", "nan"])
    buffer = FakeBuffer(groups, kit.make_ticket(3))
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user(RULE)) as context:
        output = await roll(context, buffer)
    assert rows(buffer) == [0, 2, 3]
    assert [(group.uid.row, reason) for group, reason in buffer.quarantined] == [(1, "reward_failed:invalid")]
    assert (output.metrics["drop_quarantined"], output.metrics["data_failures"]) == (1.0, 2.0)
    assert [uid.row for uid in buffer.leased].count(1) == 2


@pytest.mark.parametrize("behaviour", ["raise", "none", "die"])
async def test_a_reward_that_always_fails_ends_the_rollout_with_the_first_failure_in_full(
    kit: Any, behaviour: str
) -> None:
    buffer = make_buffer(kit, [behaviour] * 20, wanted=2, num_samples=1)
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user(RULE)) as context:
        with pytest.raises(RolloutError, match="rewards of 2 groups could not be computed") as caught:
            await roll(context, buffer)
    assert RULE in str(caught.value)
    assert "row source:" in str(caught.value)
    assert buffer.finished == []


@pytest.mark.parametrize(("behaviour", "kind", "timeout_s"), [("hang", "timeout", 0.5), ("die", "crash", 60.0)])
async def test_a_reward_that_always_loses_its_process_ends_the_rollout_after_two_groups(
    kit: Any, behaviour: str, kind: str, timeout_s: float
) -> None:
    buffer = make_buffer(kit, [behaviour] * 20, wanted=6, num_samples=1)
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user(RULE), rm_timeout_s=timeout_s) as context:
        with pytest.raises(RolloutError, match=rf"rewards of 2 groups could not be computed.*\({kind}\)"):
            await roll(context, buffer)


async def test_more_failures_of_the_data_than_the_budget_end_the_rollout_with_the_first(kit: Any) -> None:
    labels = ["1", *["nan"] * 20]
    options = {"custom_rm_path": kit.user(RULE), "max_data_failures": 5}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        buffer = make_buffer(kit, labels, wanted=2, num_samples=1)
        with pytest.raises(RolloutError, match=r"6 attempts .* of the data, and --max-data-failures is 5") as caught:
            await roll(context, buffer)
    assert "source:1:0" in str(caught.value)
    assert [group.uid.row for group, _ in buffer.quarantined] == [1, 2, 3]


async def test_a_filter_that_drops_everything_is_bounded_and_explained(kit: Any) -> None:
    buffer = make_buffer(kit, ["1"] * 30, wanted=2)
    options = {
        "custom_rm_path": kit.user("slow_async"),
        "dynamic_sampling_filter_path": kit.user("drop_all"),
        "dynamic_sampling_max_drops": 3,
        "rollout_batch_size": 2,
    }
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        with pytest.raises(RolloutError, match=r"7 dropped \(never_good_enough: 7\), 0 of 2 kept") as caught:
            await roll(context, buffer)
    assert caught.value.hint.startswith("the filter drops nearly everything")


@pytest.mark.parametrize(
    ("options", "finish_reason", "words"),
    [
        ({"rollout_max_prompt_len": 3}, "stop", "more tokens than --rollout-max-prompt-len"),
        ({}, "abort", "the generate function ends most groups as aborted"),
    ],
)
async def test_drops_without_a_filter_are_not_explained_by_one(
    kit: Any, options: Any, finish_reason: str, words: str
) -> None:
    buffer = make_buffer(kit, ["1"] * 30, wanted=2)
    engine = kit.ScriptedEngine(respond=lambda ids, params: kit.answer([], finish_reason=finish_reason))
    limits = {"dynamic_sampling_max_drops": 3, "rollout_batch_size": 2, "rm_type": "exact_match"}
    async with kit.opened(engine, **limits, **options) as context:
        with pytest.raises(RolloutError, match="7 dropped") as caught:
            await roll(context, buffer)
    assert words in caught.value.hint
    assert "filter" not in caught.value.hint


async def test_an_aborted_sample_without_reward_drops_its_group(kit: Any) -> None:
    first = [True]

    def respond(ids: list[int], params: dict[str, Any]) -> Any:
        if first:
            first.pop()
            return kit.answer([], finish_reason="abort")
        return kit.answer([3])

    buffer = make_buffer(kit, ["1"] * 3, wanted=2)
    async with kit.opened(kit.ScriptedEngine(respond=respond), custom_rm_path=kit.user("slow_async")) as context:
        output = await roll(context, buffer)
    assert rows(buffer) == [1, 2]
    assert output.metrics["drop_aborted"] == 1.0


async def roll_given_up(kit: Any, labels: list[str], **options: Any) -> tuple[FakeBuffer, Any, Any]:
    buffer = FakeBuffer([kit.make_group(0, labels=labels), kit.make_group(1, labels=["1"])], kit.make_ticket(1))
    options = {"custom_rm_path": kit.user("slow_async"), **options}
    generate = kit.user("gives_up_second_samples")
    async with kit.opened(kit.ScriptedEngine(), custom_generate_function_path=generate, **options) as context:
        output = await roll(context, buffer)
    _, columns = GroupConverter(context.args).encode(buffer.finished[0], False)
    return buffer, output, columns


@pytest.mark.parametrize("reward", ["0.5", "none"])
async def test_a_sample_that_is_given_up_is_masked_and_its_group_stays(kit: Any, reward: str) -> None:
    buffer, output, columns = await roll_given_up(kit, ["1", reward, "0"], grpo_std_normalization=False)
    assert rows(buffer) == [0]
    assert [mask.tolist() for mask in columns["loss_mask"]] == [[1, 1, 1], [0], [1, 1, 1]]
    # Normalised with its reward, where it has one; without it else. The mean is 0.5 both times.
    assert columns["reward"].tolist() == [0.5, 0.0, -0.5]
    assert columns["raw_reward"].tolist() == [1.0, 0.5, 0.0]
    assert [(len(ids), length) for ids, length in zip(columns["tokens"], columns["response_length"], strict=True)] == [
        (11, 3), (2, 1), (11, 3),
    ]  # fmt: skip
    assert [log_probs.tolist() for log_probs in columns["rollout_log_probs"]] == [[-0.5] * 3, [0.0], [-0.5] * 3]
    assert output.metrics["raw_reward"] == 0.5
    assert output.metrics["response_len/mean"] == 2.0  # 3, 0 and 3 tokens


async def test_a_filter_sees_the_samples_that_have_a_reward(kit: Any) -> None:
    keeps = {"dynamic_sampling_filter_path": kit.user("keeps_differing")}
    buffer, _, _ = await roll_given_up(kit, ["1", "none", "0"], **keeps)
    assert rows(buffer) == [0]


async def test_a_sample_that_is_lost_without_being_given_up_costs_its_group(kit: Any) -> None:
    buffer, output, _ = await roll_given_up(kit, ["1", "lost", "0"])
    assert rows(buffer) == [1]
    assert output.metrics["drop_aborted"] == 1.0


async def test_a_sample_counts_once_in_metrics_whatever_its_parts(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(0, labels=["1", "0 0 0 0"])], kit.make_ticket(1))
    async with kit.opened(custom_generate_function_path=kit.user("parts_by_label")) as context:
        metrics = (await roll(context, buffer)).metrics
    assert (metrics["raw_reward"], metrics["raw_reward_std"], metrics["truncated_ratio"]) == (0.5, 0.5, 0.5)
    assert (metrics["response_len/mean"], metrics["response_len/max"]) == ((1 + 2.5) / 2, 4.0)
    assert metrics["zero_std"] == 0.0


async def test_groups_that_a_filter_drops_count_in_the_mean_over_all(kit: Any) -> None:
    groups = [kit.make_group(0, labels=["0", "0"]), kit.make_group(1, labels=["1", "0"])]
    options = {"custom_rm_path": kit.user("slow_async"), "dynamic_sampling_filter_path": kit.user("keeps_differing")}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        metrics = (await roll(context, FakeBuffer(groups, kit.make_ticket(1)))).metrics
    assert (metrics["raw_reward"], metrics["raw_reward_all"], metrics["scored_groups"]) == (0.5, 0.25, 2.0)
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user("slow_async")) as context:
        metrics = (await roll(context, make_buffer(kit, ["1"], 1))).metrics
    assert "raw_reward_all" not in metrics, "without a filter there is one mean"


@pytest.mark.parametrize("kind", ["generate", "reward"])
async def test_a_status_may_be_text_and_must_be_one(kit: Any, kind: str) -> None:
    paths = {"custom_rm_path": kit.user("length"), "custom_generate_function_path": kit.user("status_from_label")}
    if kind == "reward":
        paths = {"custom_rm_path": kit.user("reward_that_sets_a_status")}
    groups = [kit.make_group(0, labels=["aborted", "completed"]), kit.make_group(1, labels=["truncated", "completed"])]
    buffer = FakeBuffer(groups, kit.make_ticket(1))
    async with kit.opened(kit.ScriptedEngine(), **paths) as context:
        output = await roll(context, buffer)
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "aborted")]
    assert output.metrics["truncated_ratio"] == 0.5
    assert all(type(sample.status) is Status for sample in buffer.finished[0])
    wrong = FakeBuffer([kit.make_group(7, labels=["completed", "done"])], kit.make_ticket(1))
    async with kit.opened(kit.ScriptedEngine(), **paths, max_data_failures=0) as context:
        with pytest.raises(RolloutError, match=r"sample\.status is 'done'") as caught:
            await roll(context, wrong)
    assert f"{kind} '" in str(caught.value)
    assert "row source:7:0/1.0" in str(caught.value)
    assert "pending, completed, truncated, aborted, failed" in str(caught.value)


@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_generate_function_that_asks_for_it_knows_whether_it_is_an_evaluation(
    kit: Any, evaluation: bool
) -> None:
    for function, noted in (("notes_evaluation", evaluation), ("passes_keywords_on", "not received")):
        buffer = FakeBuffer([kit.make_group(0)], kit.make_ticket(1, evaluation=evaluation))
        options = {"custom_generate_function_path": kit.user(function), "custom_rm_path": kit.user("slow_async")}
        async with kit.opened(kit.ScriptedEngine(), **options) as context:
            await roll(context, buffer)
        assert [sample.metadata for sample in buffer.finished[0]] == [{"evaluation": noted}] * 2


async def test_the_first_error_is_raised_and_every_other_request_is_cancelled(kit: Any) -> None:
    engine = kit.ScriptedEngine(order=random.Random(1))

    def respond(ids: list[int], params: dict[str, Any]) -> Any:
        raise EngineError("the engine died", where="engine 0")

    engine.respond = respond
    before = asyncio.all_tasks()
    async with kit.opened(engine, custom_rm_path=kit.user("slow_async"), max_infra_failures=0) as context:
        answering = asyncio.create_task(engine.let_go())
        with pytest.raises(EngineError, match="the engine died"):
            await roll(context, make_buffer(kit, ["1"] * 4, wanted=4))
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        assert asyncio.all_tasks() == before
    assert len(engine.calls) == 8
    # A request answered in the same turn of the loop is done; nobody waits for the rest.
    assert all(turn.done() for turn in engine.waiting)


async def test_cancelling_a_rollout_leaves_no_tasks_and_no_reward_process_at_work(kit: Any) -> None:
    before = asyncio.all_tasks()
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user(RULE)) as context:
        await context.scorer.score(kit.make_group(99, labels=["1"]).samples)  # the process stands
        pool = context.scorer.pool
        rolling = asyncio.create_task(roll(context, make_buffer(kit, ["hang"] * 3, wanted=3)))
        while not rolling.done() and len(pool.live) == len(pool.idle):  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        assert asyncio.all_tasks() == before
        assert kit.pids(context) == []


async def test_the_deadline_of_the_rollout_says_how_far_it_came(kit: Any) -> None:
    engine = kit.ScriptedEngine(order=random.Random(0))  # nobody lets its requests go
    async with kit.opened(engine, custom_rm_path=kit.user("slow_async"), rollout_timeout_s=0.2) as context:
        with pytest.raises(DeadlineError, match="0 of 2 groups were finished"):
            await roll(context, make_buffer(kit, ["1"] * 2, wanted=2))
    assert engine.cancelled == 4


async def test_a_buffer_that_gives_too_few_groups_is_an_error(kit: Any) -> None:
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user("slow_async")) as context:
        with pytest.raises(RolloutError, match="asked for 3 groups, the buffer gave 2"):
            await roll(context, make_buffer(kit, ["1"] * 2, wanted=3))


async def test_a_generate_function_may_fan_out_or_be_synchronous(kit: Any) -> None:
    for function, expected in (("two_parts", 4), ("sync_generate", 2)):
        buffer = make_buffer(kit, ["1"], wanted=1)
        async with kit.opened(custom_generate_function_path=kit.user(function)) as context:
            await roll(context, buffer)
        row_ids = [sample.row_id for sample in buffer.finished[0]]
        assert len(set(row_ids)) == expected
        assert row_ids[0] == RowId(GroupUid("source", 0, 0), 0, 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [("broken_generate", "ZeroDivisionError: generate bug"), ("forgets_status", "status pending")],
)
async def test_a_broken_generate_function_is_named_with_its_row(kit: Any, function: str, message: str) -> None:
    async with kit.opened(custom_generate_function_path=kit.user(function), max_data_failures=1) as context:
        with pytest.raises(RolloutError, match=message) as caught:
            await roll(context, make_buffer(kit, ["1"], wanted=1))
    assert function in str(caught.value)
    assert "row source:0:0/" in str(caught.value)


async def test_a_broken_filter_ends_the_rollout(kit: Any) -> None:
    options = {"custom_rm_path": kit.user("slow_async"), "dynamic_sampling_filter_path": kit.user("broken_filter")}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        with pytest.raises(BufferRLError, match="IndexError: filter bug"):
            await roll(context, make_buffer(kit, ["1"] * 2, wanted=2))


async def test_a_prompt_that_is_too_long_is_rejected_before_the_engine_is_asked(kit: Any) -> None:
    engine = kit.ScriptedEngine()
    buffer = FakeBuffer([kit.make_group(row) for row in (100, 7, 8)], kit.make_ticket(2))
    async with kit.opened(engine, custom_rm_path=kit.user("slow_async"), rollout_max_prompt_len=8) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    assert rows(buffer) == [7, 8]
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(100, "prompt_too_long")]
    assert not any(":100:" in rid for rid, _, _ in engine.calls)
    assert any("prompt_too_long" in name and value == 1 for name, value in output.metrics.items())


async def test_a_sample_filter_sees_the_whole_rollout_before_any_group_is_done(kit: Any) -> None:
    buffer = make_buffer(kit, ["1", "0", "3"], wanted=3)
    options = {"custom_rm_path": kit.user(RULE), "rollout_sample_filter_path": kit.user("drop_second_samples")}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        await roll(context, buffer)
    removed = [[sample.remove_sample for sample in group] for group in buffer.finished]
    assert removed == [[False, False], [False, True], [False, True]]


async def test_a_broken_sample_filter_ends_the_rollout_by_name(kit: Any) -> None:
    buffer = make_buffer(kit, ["1", "0"], wanted=2)
    options = {"custom_rm_path": kit.user(RULE), "rollout_sample_filter_path": kit.user("raising_sample_filter")}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        with pytest.raises(RolloutError, match="no such sample") as caught:
            await roll(context, buffer)
    assert "raising_sample_filter" in caught.value.where
    assert buffer.finished == []


@given(st.permutations(range(6)))
def test_metrics_do_not_depend_on_the_order_in_which_groups_are_done(order: list[int]) -> None:
    def metrics(rows: list[int]) -> dict[str, float]:
        stats = RolloutStats()
        for row in rows:
            uid = GroupUid("s", row, 0)
            group = SampleGroup(uid=uid, samples=[Sample(uid=uid, response_length=row + 1)] * 2)
            stats.count_kept(group, [0.1 * row, 1 / (row + 3)])
        return {name: value for name, value in stats.metrics().items() if not name.startswith("perf/")}

    assert metrics(order) == metrics(list(range(6)))
