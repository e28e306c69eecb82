"""A sample of several rows in conversion, rewards, filters and the Buffer: it counts once, with all its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.algo.rewards import shaped
from buffer_rl.buffer.columns import ColumnStore
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.queue import RequeueRule
from buffer_rl.buffer.selections import selection_metrics
from buffer_rl.records.groups import FilterDecision, Sample, SampleGroup, Status
from buffer_rl.rollout.baseline import baseline_of, set_baseline
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.production import score_group
from buffer_rl.rollout.stats import RolloutStats
from harness.agent_play import AgentEngine, context_of, make_args, roll, user
from harness.ledger_contents import count_states
from harness.local_buffer import local_client, local_state
from harness.tickets import close_rollout, schedule_of


async def fans_out(args: Any, sample: Sample, session: Any) -> float | None:
    """Three rows for the first sample, of which the second one goes on, and one for each of the others."""
    if sample.sample_index == 0:
        await session.chat(user("one"))
        first = await session.chat(user("two"))
        await session.chat([*user("two"), first, *user("on")])
        await session.chat(user("three"))
    else:
        await session.chat(user("go"))
    return float(sample.sample_index)


async def fanned_out(**options: Any) -> SampleGroup:
    fake, _ = await roll(fans_out, AgentEngine(), num_samples=3, **options)
    return fake.finished[0]


def encode(group: SampleGroup, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    return GroupConverter(make_args(**options)).encode(group, False)


async def test_each_row_is_a_part_with_the_reward_of_its_sample() -> None:
    group = await fanned_out()
    row_ids, columns = encode(group)
    assert [(row.sample_index, row.part) for row in row_ids] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    assert columns["raw_reward"].tolist() == [0, 0, 0, 1, 2]
    np.testing.assert_allclose(columns["reward"], [-1, -1, -1, 0, 1], atol=1e-4)  # over three samples, not five rows
    assert columns["response_length"].tolist() == [2, 2, 8, 2, 2]
    assert [int(mask.sum()) for mask in columns["loss_mask"]] == [2, 2, 4, 2, 2]
    assert columns["rollout_log_probs"][2].tolist() == [-0.5, -0.5, 0, 0, 0, 0, -0.5, -0.5]
    assert columns["weight_version"].tolist() == [3] * 5


async def test_lengths_are_of_all_rows_and_a_limit_is_that_of_the_sample() -> None:
    """Rows of 2, 2 and 8 tokens are a sample of 4; the other two samples have 2. In every schedule."""
    fake, metrics = await roll(fans_out, AgentEngine(), num_samples=3)
    group = fake.finished[0]
    expected = {"response_len/mean": pytest.approx(8 / 3), "response_len/max": 8.0, "truncated_ratio": 0.0}
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["generated_tokens"] == 12, "six answers of two tokens, and not what the user said between them"
    group[0].status = Status.TRUNCATED
    row_ids, columns = encode(group)
    store = ColumnStore()
    store.put(group.uid, row_ids, columns)
    of_step, stats = selection_metrics(store, [group.uid]), RolloutStats()
    stats.count_kept(group, [0.0, 1.0, 2.0])
    for name, value in (expected | {"truncated_ratio": pytest.approx(1 / 3)}).items():
        assert of_step[f"rollout/{name}"] == value
        assert stats.metrics_of_kept()[name] == value


async def test_the_row_of_the_answer_that_is_scored_comes_first() -> None:
    group = await fanned_out()
    _, columns = encode(group)
    tokenizer = AgentEngine().tokenizer
    texts = [tokenizer.decode(tokens) for tokens in columns["tokens"][:3]]
    assert texts == ["uthreeax<eos>", "uoneax<eos>", "utwoax<eos>uonax<eos>"]
    assert (group[0].messages[0], group[0].response) == (user("three")[0], "x")


async def test_an_evaluation_has_one_row_a_sample() -> None:
    row_ids, columns = GroupConverter(make_args()).encode(await fanned_out(), True)
    assert [(row.sample_index, row.part) for row in row_ids] == [(0, 0), (1, 0), (2, 0)]
    assert columns["reward"].tolist() == [0, 1, 2]


async def test_all_rows_of_a_masked_sample_are_masked_and_the_others_are_normalised_without_it() -> None:
    group = await fanned_out()
    group[0].remove_sample, group[0].reward = True, None
    _, columns = encode(group)
    assert [int(mask.sum()) for mask in columns["loss_mask"]] == [0, 0, 0, 2, 2]
    np.testing.assert_allclose(columns["reward"], [0, 0, 0, -0.70711, 0.70711], atol=1e-4)
    assert columns["weight_version"].tolist() == [-1, -1, -1, 3, 3]


async def test_penalties_of_length_count_sampled_tokens_once_and_not_what_was_read() -> None:
    options = {"length_penalty": 0.5, "rollout_max_response_len": 16}
    _, columns = encode(await fanned_out(), **options, advantage_estimator="ppo", normalize_advantages=False)
    expected = shaped(make_args(**options), np.array([0.0, 1.0, 2.0]), np.array([8, 2, 2]))
    assert columns["reward"].tolist() == pytest.approx(expected[[0, 0, 0, 1, 2]])


async def test_the_baseline_of_a_greedy_conversation_is_penalised_as_the_samples_are() -> None:
    args = make_args(length_penalty=0.5, rollout_max_response_len=16)
    group = await fanned_out()
    assert set_baseline(args, group, replace(group, samples=group[:1])) == ""
    expected = shaped(args, np.array([0.0]), np.array([8]))
    assert [baseline_of(sample) for sample in group] == pytest.approx([*expected] * 3)


async def unscored(args: Any, sample: Sample, session: Any) -> None:
    """The same without rewards of its own."""
    await fans_out(args, sample, session)


async def parts_of_each(args: Any, group: SampleGroup) -> list[float]:
    """A reward of a group: the number of further rows of each sample."""
    return [float(len(sample.parts)) for sample in group]


async def test_rewards_of_groups_see_one_sample_each() -> None:
    options = {"custom_rm_path": None, "custom_group_rm_path": f"{__file__}:parts_of_each"}
    fake, metrics = await roll(unscored, AgentEngine(), num_samples=3, **options)
    assert [sample.reward for sample in fake.finished[0]] == [2.0, 0.0, 0.0]
    assert metrics["raw_reward"] == pytest.approx(2 / 3)


async def drops_fans(args: Any, group: SampleGroup) -> FilterDecision:
    """A filter that keeps groups of three samples, of which the first one has two further rows."""
    return FilterDecision(keep=[len(sample.parts) for sample in group] == [2, 0, 0])


async def test_filters_see_one_sample_each() -> None:
    options = {"dynamic_sampling_filter_path": f"{__file__}:drops_fans"}
    fake, _ = await roll(fans_out, AgentEngine(), num_samples=3, more_groups=0, **options)
    assert (len(fake.finished), fake.rejected) == (1, [])


class Bench:
    """A Buffer of two rows, and a rollout of one step in which ``agent`` plays."""

    def __init__(self, folder: Path, agent: Any = fans_out) -> None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": user(f"p{i}"), "label": str(i)}) + "\n" for i in range(2)))
        self.agent = agent
        self.options = {
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 3,
            "prompt_data": str(path),
            "custom_rm_path": "harness.agent_play:one",
        }
        self.args = make_args(**self.options)
        rule, schedule = RequeueRule.from_args(self.args), schedule_of(0)
        self.state = local_state(self.args, Ledger.in_memory(), rule=rule, schedule=schedule)

    async def roll(self) -> Any:
        """The step's rows."""
        ticket = self.state.generate(0)
        buffer = local_client(self.state, ticket, GroupConverter(self.args))
        async with context_of(AgentEngine(version=0), self.agent, **self.options) as context:
            with context.active(buffer):
                await DefaultRollout(context.args)(context.args, 0, buffer)
        report = close_rollout(self.state, ticket)
        assert (report.drops, report.surplus) == ({}, 0)
        return self.state.get_data(0)


async def test_in_the_buffer_a_sample_weighs_the_same_however_many_rows_it_has(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    batch = await bench.roll()
    by_sample: dict[tuple[int, int], list[int]] = {}
    for place, row in enumerate(batch.row_ids):
        by_sample.setdefault((row.uid.row, row.sample_index), []).append(place)
    assert sorted(map(len, by_sample.values())) == [1, 1, 1, 1, 3, 3]
    for places in by_sample.values():
        masks = [batch.columns["loss_mask"][place] for place in places]
        assert {float(batch.columns["sample_parts"][place]) for place in places} == {len(places)}
        total = sum(float(mask.sum()) for mask in masks)
        assert {float(batch.columns["sample_total_tokens"][place]) for place in places} == {total}
        assert total == (8 if len(places) == 3 else 2)
        assert len({float(batch.columns["reward"][place]) for place in places}) == 1


async def test_the_ledger_counts_groups_of_agents_as_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    batch = await bench.roll()
    source = batch.row_ids[0].uid.source
    assert count_states(bench.state.ledger, source, 0, 2)[GroupState.FINISHED] == 2
    bench.state.commit(0, 1)
    bench.state.release(1)
    assert count_states(bench.state.ledger, source, 0, 2)[GroupState.TRAINED] == 2


async def test_a_hook_that_reads_the_fields_of_agents_does_not_make_an_agents_sample() -> None:
    """Else its length would be another one to penalties, and its reward the lowest."""
    options: dict[str, Any] = {"agent_path": None, "length_penalty": 1.0, "disable_rewards_normalization": True}
    uid = (await fanned_out()).uid
    rewards = []
    for reads in (False, True):
        sample = Sample(uid=uid, tokens=[3, 4, 5, 6], response_length=3, loss_mask=[1, 0, 1], reward=1.0)
        if reads:
            assert (sample.parts, sample.messages, sample.lowest_reward) == ([], [], False)
        rewards.append(encode(SampleGroup(uid=uid, samples=[sample]), **options)[1]["reward"].tolist())
        async with context_of(AgentEngine(), fans_out) as context:
            assert await score_group(context, SampleGroup(uid=uid, samples=[sample]), RolloutStats()) == []
        assert sample.reward == 1.0
    assert rewards[0] == rewards[1]
