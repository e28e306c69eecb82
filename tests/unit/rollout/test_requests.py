"""Which samples share a request to the engines, and what one of them does to the others."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from typing import Any

import numpy as np
import pytest

from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.protocol import row_rid
from buffer_rl.errors import EngineError
from buffer_rl.records.groups import Sample, Status
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.generate import generate, sampling_params_for
from buffer_rl.rollout.production import generate_group, run_all
from buffer_rl.rollout.requests import (
    Requests,
    request_id,
    sampling_seed,
    shared_request_id,
)
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.testing.decoding import SglangRules
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.fake_engine import FakeEngine, Fault


def seeded(input_ids: list[int], seed: int) -> list[int]:
    return [3 + seed % 50, 3 + seed // 50 % 50, 1]


async def asked(
    kit: Any, num_samples: int, sglang: SglangRules | None = None, **options: Any
) -> tuple[FakeEngine, list[Sample]]:
    """An engine's log, and the samples of one group."""
    with FakeEngine(seeded, sglang=sglang) as engine:
        async with EngineClient(engine.url, [engine.url]) as client, kit.opened(client, **options) as context:
            group = kit.make_group(0, labels=["1"] * num_samples)
            params = sampling_params_for(context.args, False)
            await generate_group(kit.make_lease(context, group), params, RolloutStats())
    return engine, group.samples


@pytest.mark.parametrize(("num_samples", "num_posts"), [(1, 1), (2, 1), (16, 1), (17, 2), (34, 3)])
async def test_sixteen_samples_share_a_request_and_each_has_its_own_seed(
    kit: Any, num_samples: int, num_posts: int
) -> None:
    engine, samples = await asked(kit, num_samples)
    assert engine.log.num_posts == num_posts
    seeds = [body["sampling_params"]["sampling_seed"] for body in engine.log.requests]
    assert sorted(seeds) == sorted(sampling_seed(42, sample.uid, sample.sample_index) for sample in samples)
    for sample in samples:
        expected = seeded([], sampling_seed(42, sample.uid, sample.sample_index))
        assert sample.tokens[-sample.response_length :] == expected


async def test_samples_that_ask_later_or_otherwise_go_alone_under_the_seeds_that_they_have_together(kit: Any) -> None:
    together, samples = await asked(kit, 12)
    assert together.log.num_posts == 1
    apart, others = await asked(kit, 12, custom_generate_function_path=kit.user("one_at_a_time"))
    assert apart.log.num_posts == 12
    assert [sample.tokens for sample in others] == [sample.tokens for sample in samples]
    # Sample 5 has another temperature: 0 to 4 share a request, and what comes after the gap goes alone.
    odd, others = await asked(kit, 10, custom_generate_function_path=kit.user("fifth_is_warmer"))
    assert odd.log.num_posts == 1 + 5
    assert [sample.tokens for sample in others] == [sample.tokens for sample in samples[:10]]


async def test_a_further_response_goes_alone_under_an_id_of_its_own(kit: Any) -> None:
    engine, _ = await asked(kit, 2, custom_generate_function_path=kit.user("asks_twice"))
    assert engine.log.num_posts == 1 + 2
    assert len({body["rid"] for body in engine.log.requests}) == 4


async def test_a_seed_of_the_users_is_no_rows_and_goes_alone(kit: Any) -> None:
    engine, samples = await asked(kit, 3, custom_generate_function_path=kit.user("with_a_seed"))
    assert engine.log.num_posts == 3
    assert [sample.tokens[-3:] for sample in samples] == [seeded([], 77)] * 3


@pytest.mark.parametrize("function", [None, "as_built_in"])
async def test_rows_of_a_server_without_seeds_share_a_request_and_of_one_that_gives_all_the_same_go_alone(
    kit: Any, function: str | None
) -> None:
    options = {"custom_generate_function_path": kit.user(function)} if function else {}
    engine, samples = await asked(kit, 10, SglangRules(), **options)
    assert engine.log.num_posts == 1
    assert all("sampling_seed" not in body["sampling_params"] for body in engine.log.requests)
    assert len({tuple(sample.tokens) for sample in samples}) == 10
    engine, samples = await asked(kit, 10, SglangRules(deterministic=True), **options)
    assert engine.log.num_posts == 10
    for sample in samples:
        assert sample.tokens[-3:] == seeded([], sampling_seed(42, sample.uid, sample.sample_index))


async def test_samples_that_are_filled_together_are_those_that_ask_each_by_itself(kit: Any) -> None:
    _, together = await asked(kit, 17)
    _, apart = await asked(kit, 17, custom_generate_function_path=kit.user("as_built_in"))
    assert [vars(sample) for sample in together] == [vars(sample) for sample in apart]
    assert len({tuple(sample.tokens) for sample in together}) == 17


def key_of(text: str) -> str:
    return format(zlib.crc32(text.encode()), "08x")


async def test_all_turns_of_a_group_have_one_routing_key_and_those_of_a_session_its_own(kit: Any) -> None:
    engine, samples = await asked(kit, 3, custom_generate_function_path=kit.user("asks_twice"))
    assert engine.log.routing_keys == [key_of(str(samples[0].uid))] * (1 + 3)
    engine, samples = await asked(kit, 20)
    assert engine.log.routing_keys == [key_of(str(samples[0].uid))] * 2
    engine, samples = await asked(kit, 2, custom_generate_function_path=kit.user("in_sessions"))
    assert sorted(engine.log.routing_keys) == sorted([key_of("session 0"), key_of("session 1")] * 2)


async def test_samples_of_one_session_share_a_request(kit: Any) -> None:
    with FakeEngine(seeded) as engine:
        async with EngineClient(engine.url, [engine.url]) as client, kit.opened(client) as context:
            group = kit.make_group(0, labels=["1"] * 6)
            for sample in group:
                sample.session_id = f"of {sample.sample_index // 4}"
            params = sampling_params_for(context.args, False)
            await generate_group(kit.make_lease(context, group), params, RolloutStats())
    assert engine.log.num_posts == 1 + 2  # rows 4 and 5 have no place in a request of their own
    assert sorted(engine.log.routing_keys) == sorted([key_of("of 0"), key_of("of 1"), key_of("of 1")])


async def test_evaluation_shares_requests(kit: Any) -> None:
    with FakeEngine(seeded) as engine:
        client = EngineClient(engine.url, [engine.url])
        async with client, kit.opened(client, custom_rm_path=kit.user("length")) as context:
            groups = [kit.make_group(row, labels=["1"] * 4) for row in range(3)]
            await evaluate(context, FakeBuffer(groups, kit.make_ticket(3, evaluation=True)))
    assert (engine.log.num_posts, len(engine.log.requests)) == (3, 12)


async def test_an_id_is_a_prefix_of_no_other_but_those_of_rows_of_the_same_request(kit: Any) -> None:
    rids = []
    group = kit.make_group(0)
    async with kit.opened() as context:
        lease = kit.make_lease(context, group)
    for index in (0, 1, 16, 17, 19, 160):
        sample = group[0].changed(sample_index=index)
        rids += [request_id(lease, sample), request_id(lease, sample, 1)]
        if index % 16 == 0:
            rids += [row_rid(shared_request_id(lease, sample), row) for row in range(16)]
    assert len(set(rids)) == len(rids)
    prefixes = [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]
    assert len(prefixes) == 3 * len(range(10, 16))  # of three requests, row 1 with the rows 10 to 15
    assert all(a.endswith("_1") and b.rpartition("_")[0] == a.removesuffix("_1") for a, b in prefixes)


class Asking:
    """Tasks that generate the samples of a group of three, of which sample 1 has no end."""

    def __init__(self, kit: Any, engine: FakeEngine, context: Any) -> None:
        self.engine, self.requests = engine, Requests()
        params = sampling_params_for(context.args, False)
        group = kit.make_group(0, labels=["1"] * 3)
        lease = kit.make_lease(context, group, requests=self.requests)
        self.tasks = [asyncio.create_task(generate(context.args, sample, params, lease)) for sample in group]

    async def begun(self) -> None:
        async with asyncio.timeout(60):
            while not self.engine.log.in_flight:  # noqa: ASYNC110 (the log belongs to another thread)
                await asyncio.sleep(0.005)


def endless(body: dict[str, Any]) -> float:
    return 600.0 if body["rid"].endswith("_1") else 0.0


async def test_a_sample_that_is_cancelled_ends_no_other_and_the_last_one_ends_the_request(kit: Any) -> None:
    before = asyncio.all_tasks()
    with FakeEngine(seeded, latency=endless) as engine:
        async with EngineClient(engine.url, [engine.url]) as client, kit.opened(client) as context:
            asking = Asking(kit, engine, context)
            await asking.begun()
            asking.tasks[0].cancel()
            await asyncio.wait(asking.tasks[:1])
            assert not any(task.done() for task in asking.tasks[1:])
            await client.abort()
            assert [(await task).status.value for task in asking.tasks[1:]] == ["aborted", "completed"]
            assert engine.log.disconnected == 0
            asking = Asking(kit, engine, context)
            await asking.begun()
            for task in asking.tasks:
                task.cancel()
            await asyncio.wait(asking.tasks)
            assert asyncio.all_tasks() == before | {asyncio.current_task()}
            async with asyncio.timeout(60):
                while engine.log.in_flight:  # noqa: ASYNC110 (counted in another thread)
                    await asyncio.sleep(0.005)
    assert engine.log.disconnected == 1


async def test_an_error_of_the_request_reaches_each_sample_under_its_own_name(kit: Any) -> None:
    with FakeEngine(seeded, fault=lambda body, number: Fault.GARBAGE) as engine:
        async with EngineClient(engine.url, [engine.url]) as client, kit.opened(client) as context:
            asking = Asking(kit, engine, context)
            errors = await asyncio.gather(*asking.tasks, return_exceptions=True)
    assert engine.log.num_posts == 1
    assert all(isinstance(error, EngineError) for error in errors)
    assert [f"row source:0:0/{i}.0," in str(error) for i, error in enumerate(errors)] == [True] * 3


async def test_a_stop_aborts_every_row_of_a_request_and_its_finished_rows_are_whole(kit: Any) -> None:
    with FakeEngine(seeded, latency=endless, aborted_after=1) as engine:
        async with EngineClient(engine.url, [engine.url]) as client, kit.opened(client) as context:
            asking = Asking(kit, engine, context)
            await asking.begun()
            await asking.requests.stop(client, lambda: [task for task in asking.tasks if not task.done()])
            samples = [task.result() for task in asking.tasks]
    assert {body["rid"] for body in engine.log.aborted} == {body["rid"] for body in engine.log.requests}
    assert [(sample.status.value, sample.response_length) for sample in samples] == [
        ("completed", 3), ("aborted", 1), ("completed", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(("concurrency", "num_posts"), [(30, 8), (16, 8), (7, 8 * (1 + 9))])
async def test_samples_that_share_a_request_begin_together_where_places_are_few(
    kit: Any, concurrency: int, num_posts: int
) -> None:
    # Of 16 samples with 7 places, 0 to 6 share a request; 7 to 15 begin too late.
    rng = random.Random(0)
    with FakeEngine(seeded, latency=lambda body: rng.random() / 100) as engine:
        client = EngineClient(engine.url, [engine.url])
        async with client, kit.opened(client, rollout_concurrency=concurrency) as context:
            groups = [kit.make_group(row, labels=["1"] * 16) for row in range(8)]
            params, ticket, requests = sampling_params_for(context.args, False), kit.make_ticket(8), Requests()
            leases = [kit.make_lease(context, group, ticket, requests) for group in groups]
            await run_all(generate_group(lease, params, RolloutStats()) for lease in leases)
            assert context.places.free == concurrency
    assert len(engine.log.requests) == 8 * 16
    assert engine.log.num_posts == num_posts


async def test_samples_that_are_cancelled_before_they_begin_free_their_places(kit: Any) -> None:
    with FakeEngine(seeded, latency=lambda body: 600.0) as engine:
        client = EngineClient(engine.url, [engine.url])
        async with client, kit.opened(client, rollout_concurrency=12) as context:
            params, ticket, requests = sampling_params_for(context.args, False), kit.make_ticket(8), Requests()
            for num_turns in range(8):
                groups = [kit.make_group(row, labels=["1"] * 8) for row in range(2)]
                tasks = [
                    asyncio.create_task(generate_group(lease, params, RolloutStats()))
                    for lease in (kit.make_lease(context, group, ticket, requests) for group in groups)
                ]
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                assert context.places.free == 12


@pytest.mark.parametrize("num_samples", [1, 2])
async def test_a_function_that_swallows_its_cancellation_does_not_outlive_the_groups_deadline(
    kit: Any, num_samples: int
) -> None:
    async def stubborn(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        sample.status = Status.COMPLETED
        return sample

    async with kit.opened(kit.ScriptedEngine()) as context:
        context.generate = stubborn
        group = kit.make_group(0, labels=["1"] * num_samples)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await generate_group(kit.make_lease(context, group), {}, RolloutStats())


async def test_metadata_need_not_compare_for_samples_to_share_a_request(kit: Any) -> None:
    with FakeEngine(seeded) as engine:
        async with EngineClient(engine.url, [engine.url]) as client, kit.opened(client) as context:
            group = kit.make_group(0, labels=["1"] * 4)
            for sample in group:
                sample.metadata["features"] = np.arange(3)
            params = sampling_params_for(context.args, False)
            await generate_group(kit.make_lease(context, group), params, RolloutStats())
    assert engine.log.num_posts == 1
