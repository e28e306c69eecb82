"""The default rollout through the real engine client, against a real HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer_rl.engines.client import EngineClient
from buffer_rl.errors import BufferRLError, DeadlineError, EngineError
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.decoding import SglangRules
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from buffer_rl.testing.tiny import DEFAULT_CHARACTERS, make_char_tokenizer


def seeded(input_ids: list[int], seed: int) -> list[int]:
    return [3 + seed % 50, 3 + seed // 50 % 50, 1]


async def roll(
    kit: Any,
    engine: FakeEngine,
    *,
    wanted: int = 4,
    num_samples: int = 4,
    bad_prompt: str | None = None,
    vocab_size: int | None = None,
    **options: Any,
) -> FakeBuffer:
    groups = [kit.make_group(row, labels=["1"] * num_samples) for row in range(wanted + 4)]
    for sample in groups[1] if bad_prompt is not None else ():
        sample.prompt = bad_prompt
    buffer = FakeBuffer(groups, kit.make_ticket(wanted))
    client = EngineClient(engine.url, [engine.url], timeout_s=60.0, vocab_size=vocab_size)
    options = {"custom_rm_path": kit.user("slow_async"), **options}
    try:
        async with kit.opened(client, **options) as context:
            await DefaultRollout(context.args)(context.args, 0, buffer)
    finally:
        await client.aclose()
    return buffer


def tokens(buffer: FakeBuffer) -> dict[str, list[int]]:
    return {str(sample.row_id): sample.tokens for group in buffer.finished for sample in group}


async def test_a_rollout_over_http_gives_rows_that_convert(kit: Any) -> None:
    with FakeEngine(respond=seeded, version=2) as engine:
        buffer = await roll(kit, engine)
    assert len(engine.log.requests) == 16
    assert len({request["rid"] for request in engine.log.requests}) == 16
    assert len({request["sampling_params"]["sampling_seed"] for request in engine.log.requests}) == 16
    for group in buffer.finished:
        _, columns = GroupConverter(kit.make_args()).encode(group, False)
        assert columns["response_length"].tolist() == [3] * 4
        assert columns["weight_version"].tolist() == [2] * 4
        assert [row.tolist() for row in columns["rollout_log_probs"]] == [[-0.5] * 3] * 4


async def test_latencies_change_neither_tokens_nor_the_kept_set(kit: Any) -> None:
    results = []
    for factor in (7, 13):
        latency = {"latency": lambda body, f=factor: (sum(body["input_ids"]) * f + len(body["rid"])) % 11 / 1000}
        with FakeEngine(respond=seeded, **latency) as engine:
            results.append(tokens(await roll(kit, engine)))
    assert results[0] == results[1]


async def test_a_lost_request_is_repeated_with_equal_tokens(kit: Any) -> None:
    def lose_every_fifth(body: dict[str, Any], number: int) -> Fault | None:
        return Fault.RESET if number % 5 == 0 else None

    with FakeEngine(respond=seeded) as steady:
        expected = tokens(await roll(kit, steady))
    with FakeEngine(respond=seeded, fault=lose_every_fifth) as shaky:
        assert tokens(await roll(kit, shaky)) == expected
    assert len(shaky.log.requests) > 16


async def test_an_aborted_request_drops_its_group(kit: Any) -> None:
    with FakeEngine(respond=seeded, fault=lambda body, n: Fault.ABORT if n == 0 else None) as engine:
        buffer = await roll(kit, engine)
    assert [reason for _, reason in buffer.rejected] == ["aborted"]
    assert len(buffer.finished) == 4


async def test_garbage_from_the_engine_ends_the_rollout_and_its_other_requests(kit: Any) -> None:
    before = asyncio.all_tasks()
    answers_late = {"latency": lambda body: 0.0 if body["rid"].startswith("train_0:source:0:0/0") else 600.0}
    with FakeEngine(respond=seeded, fault=lambda body, n: Fault.GARBAGE, **answers_late) as engine:
        with pytest.raises(EngineError, match="not JSON"):
            await roll(kit, engine, max_infra_failures=0)
        async with asyncio.timeout(60):
            while engine.log.in_flight:  # noqa: ASYNC110 (counted in another thread)
                await asyncio.sleep(0.005)
    assert asyncio.all_tasks() == before


async def test_a_rollout_past_its_deadline_leaves_no_request_in_flight(kit: Any) -> None:
    with FakeEngine(respond=seeded, latency=lambda body: 600.0) as engine:
        with pytest.raises(DeadlineError, match="0 of 4 groups") as caught:
            await roll(kit, engine, rollout_timeout_s=0.5)
        assert isinstance(caught.value, BufferRLError)
        async with asyncio.timeout(60):
            while engine.log.in_flight:  # noqa: ASYNC110 (counted in another thread)
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("num_samples", [1, 4])
async def test_a_prompt_that_would_kill_the_engine_costs_its_group_and_nothing_else(kit: Any, num_samples: int) -> None:
    size = len(make_char_tokenizer()) - 1  # the model lacks a row for the last character
    with FakeEngine(respond=seeded, sglang=SglangRules(vocab_size=size)) as engine:
        bad_prompt = f"is {DEFAULT_CHARACTERS[-1]}"
        buffer = await roll(kit, engine, bad_prompt=bad_prompt, vocab_size=size, num_samples=num_samples)
        await roll(kit, engine)  # it lives
    assert [(group.uid.row, reason) for group, reason in buffer.quarantined] == [(1, "refused:400")]
    assert [uid.row for uid in buffer.finished_uids] == [0, 2, 3, 4]
    assert buffer.failures == {("data", buffer.quarantined[0][0].uid): 1}


@pytest.mark.slow
async def test_a_request_that_the_engine_has_for_a_while_after_its_abort_costs_nothing(kit: Any) -> None:
    def lose_every_fifth(body: dict[str, Any], number: int) -> Fault | None:
        return Fault.RESET if number % 5 == 0 else None

    rules = SglangRules(abort_s=0.3, disconnect_s=600.0)
    with FakeEngine(respond=seeded, fault=lose_every_fifth, sglang=rules) as engine:
        buffer = await roll(kit, engine)
    assert [uid.row for uid in buffer.finished_uids] == [0, 1, 2, 3]
    assert engine.log.num_posts >= 4 + 2  # the lost one is refused once at least
    assert (buffer.quarantined, buffer.failures) == ([], {})
