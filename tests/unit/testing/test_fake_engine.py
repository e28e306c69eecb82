from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from buffer_rl.engines.client import EngineClient, parse_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.testing.decoding import DecodeClock, Decoding, SglangRules, Slots
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from harness.processes import holds_within


def body(**more: Any) -> dict[str, Any]:
    return {"rid": "r", "input_ids": [4, 5, 6], "sampling_params": {"sampling_seed": 2}, "return_logprob": True, **more}


async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=payload) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
        return answer


async def test_it_answers_in_the_protocols_shape() -> None:
    with FakeEngine(respond=lambda ids, seed: [seed] * len(ids), version=9) as engine:
        answer = await post(engine.url, body())
    assert answer["output_ids"] == [2, 2, 2]
    assert answer["text"] == "2 2 2"
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert meta["output_token_logprobs"] == [[-0.5, 2, None]] * 3
    assert meta["weight_versions"] == [{"version": "9", "start": 0, "end": 3}]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 3, 3)
    assert engine.log.requests == [body()]


async def test_max_new_tokens_cuts_the_answer() -> None:
    with FakeEngine() as engine:
        answer = await post(engine.url, body(sampling_params={"max_new_tokens": 2}))
    assert answer["output_ids"] == [6, 5]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


@pytest.mark.parametrize("slots", [1, 2, None])
async def test_a_request_is_worked_on_when_it_has_a_slot(slots: int | None) -> None:
    begun: list[str] = []

    def latency(payload: dict[str, Any]) -> float:
        begun.append(payload["rid"])
        return 3600.0 if payload["rid"] == "endless" else 0.0

    with FakeEngine(latency=latency, slots=slots) as engine:
        async with EngineClient(engine.url, [engine.url]) as client:
            endless = asyncio.create_task(client.agenerate("endless", [4], {}))
            assert await asyncio.to_thread(holds_within, 60, lambda: begun == ["endless"])
            quick = asyncio.create_task(client.agenerate("quick", [4, 5], {}))
            assert await asyncio.to_thread(holds_within, 60, lambda: len(engine.log.requests) == 2)
            if slots == 1:
                assert begun == ["endless"]
            else:
                assert (await quick).output_ids == [5, 4]
                assert not endless.done()
            await client.abort(["endless"])
            assert (await endless).finish_reason == "abort"
            assert (await quick).output_ids == [5, 4]
    assert begun == ["endless", "quick"]


async def test_an_abort_reaches_a_request_that_waits_for_its_slot() -> None:
    with FakeEngine(latency=lambda payload: 3600.0, slots=1) as engine:
        async with EngineClient(engine.url, [engine.url]) as client:
            asked = [asyncio.create_task(client.agenerate(rid, [4], {})) for rid in ("first", "second")]
            assert await asyncio.to_thread(holds_within, 60, lambda: len(engine.log.requests) == 2)
            await client.abort([engine.log.requests[1]["rid"]])
            done, _ = await asyncio.wait(asked, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().finish_reason for task in done] == ["abort"]
            await client.abort()
            assert [result.finish_reason for result in await asyncio.gather(*asked)] == ["abort", "abort"]


async def test_a_slot_is_free_again_when_its_request_ends_in_any_way() -> None:
    slots, never = Slots(1), asyncio.Event()
    assert await slots.acquire(never) == 0.0
    waiting = [asyncio.create_task(slots.acquire(never)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    slots.release(7.0)  # the one that waits first is cancelled, so the next one has it
    assert await waiting[1] == 7.0
    slots.release(5.0)
    assert await waiting[2] == 5.0
    given_up = asyncio.create_task(slots.acquire(never))
    await asyncio.sleep(0)
    never.set()
    assert await given_up is None
    slots.release(9.0)
    assert await slots.acquire(asyncio.Event()) == 9.0


async def test_faults_are_scripted_by_request() -> None:
    script = [Fault.SERVER_ERROR, Fault.RESET, Fault.GARBAGE, Fault.ABORT, None]
    with FakeEngine(fault=lambda payload, number: script[number]) as engine:
        with pytest.raises(aiohttp.ClientResponseError, match="500"):
            await post(engine.url, body())
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await post(engine.url, body())
        with pytest.raises(ValueError, match="Expecting value"):
            await post(engine.url, body())
        assert (await post(engine.url, body()))["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await post(engine.url, body()))["output_ids"] == [6, 5, 4]
    assert len(engine.log.requests) == 5


async def test_a_client_that_goes_away_is_noticed() -> None:
    with FakeEngine(latency=lambda payload: 3600.0) as engine:
        asking = asyncio.create_task(post(engine.url, body()))
        while engine.log.in_flight == 0:  # noqa: ASYNC110 (counted in another thread)
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(60):
            while engine.log.disconnected == 0:  # noqa: ASYNC110 (counted in another thread)
                await asyncio.sleep(0.001)
    assert engine.log.answered == 0


async def test_new_weights_are_a_new_version() -> None:
    with FakeEngine(version=3) as engine:
        assert (await post(engine.url, body()))["meta_info"]["weight_version"] == "3"
        with EngineControlClient([engine.url]) as control:
            control.update_weights_from_disk("somewhere", 4)
            assert control.versions() == {engine.url: "4"}
        assert (await post(engine.url, body()))["meta_info"]["weight_version"] == "4"
    assert engine.log.updates == [{"model_path": "somewhere", "weight_version": "4"}]


async def test_the_clock_of_the_engine_stands_still_in_a_pause() -> None:
    seconds, never = [0.0], asyncio.Event()
    clock = DecodeClock(lambda: seconds[0])
    clock.pause()
    seconds[0] = 100.0
    assert clock.time() == 0.0
    waiting = asyncio.create_task(clock.reaches(5.0, never))
    await asyncio.sleep(0)
    assert not waiting.done()
    seconds[0] = 200.0
    clock.resume()
    clock.resume()
    assert clock.time() == 0.0
    seconds[0] = 205.0  # the end of the pause wakes who waits
    assert await waiting
    never.set()
    assert not await clock.reaches(6.0, never)


def test_spans_are_of_the_versions_that_drew_the_tokens_and_none_is_empty() -> None:
    row = Decoding()
    row.mark(1, 0.0)  # it waits for a slot: nothing of it is drawn
    row.begin(10.0, 8.0, 1)
    for version, now in ((2, 12.0), (3, 12.1), (3, 14.0), (4, 17.9)):
        row.mark(version, now)
    names = [(span["version"], span["start"], span["end"]) for span in row.spans(8, 8, 9)]
    assert names == [("1", 0, 2), ("3", 2, 7), ("4", 7, 8)]
    assert [span["version"] for span in row.spans(8, 2, 9)] == ["1"]
    assert row.spans(8, 0, 9) == []
    assert Decoding().spans(3, 3, 9) == [{"version": "9", "start": 0, "end": 3}]


@pytest.mark.slow
async def test_a_row_that_a_pause_holds_continues_with_the_new_weights_and_says_so() -> None:
    with FakeEngine(respond=lambda ids, seed: range(400), latency=lambda payload: 1.0) as engine:
        asked = asyncio.create_task(post(engine.url, body()))
        await arrived(engine)
        with EngineControlClient([engine.url]) as control:
            while not asked.done():
                await asyncio.to_thread(publish, control, engine.version + 1)
        result = parse_answer(await asked, engine.url)
        retractions = (await asked)["meta_info"]["num_retractions"]
    assert result.output_ids == list(range(400))
    versions = [span.version for span in result.spans]
    assert len(versions) > 1
    assert versions == sorted(set(versions))
    assert len(versions) - 1 <= retractions <= len(engine.log.pauses)


def publish(control: EngineControlClient, version: int) -> None:
    control.pause("retract")
    control.flush()
    control.update_weights_from_disk("somewhere", version)
    control.resume()


async def test_in_a_pause_nothing_is_answered_and_what_runs_or_comes_can_be_aborted() -> None:
    with FakeEngine() as engine, EngineControlClient([engine.url]) as control:
        await asyncio.to_thread(control.pause, "retract")
        waiting = [asyncio.create_task(post(engine.url, body(rid=rid))) for rid in ("a", "b")]
        await arrived(engine, 2)
        assert await call(f"{engine.url}/abort_request", "POST", {"rid": "a"}) == 200
        assert (await waiting[0])["meta_info"]["finish_reason"] == {"type": "abort"}
        assert not waiting[1].done()
        await asyncio.to_thread(control.update_weights_from_disk, "somewhere", 3)
        await asyncio.to_thread(control.resume)
        meta = (await waiting[1])["meta_info"]
        assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 3}]
        assert meta["num_retractions"] == 0


@pytest.mark.parametrize(("mode", "flushes"), [(None, False), ("in_place", False), ("retract", True), ("abort", True)])
async def test_the_cache_is_flushed_while_no_row_holds_it(mode: str | None, flushes: bool) -> None:
    begun: list[str] = []

    def latency(payload: dict[str, Any]) -> float:
        begun.append(payload["rid"])
        return 3600.0

    with FakeEngine(latency=latency) as engine, EngineControlClient([engine.url]) as control:
        asked = asyncio.create_task(post(engine.url, body()))
        assert await asyncio.to_thread(holds_within, 60, lambda: begun == ["r"])
        if mode is not None:
            await asyncio.to_thread(control.pause, mode)
        if mode == "abort":
            assert (await asked)["meta_info"]["finish_reason"] == {"type": "abort"}
        assert await call(f"{engine.url}/flush_cache", "POST", {}) == (200 if flushes else 400)
        await asyncio.to_thread(control.resume)
        await call(f"{engine.url}/abort_request", "POST", {"abort_all": True})
        await asked


async def test_new_weights_without_a_pause_leave_running_rows_their_version() -> None:
    with FakeEngine(latency=lambda payload: 3600.0, aborted_after=2) as engine:
        asked = asyncio.create_task(post(engine.url, body()))
        assert await asyncio.to_thread(holds_within, 60, lambda: bool(engine.log.requests))
        with EngineControlClient([engine.url]) as control:
            while (await asyncio.to_thread(flush_status, engine.url)) == 200:  # it has no slot yet
                pass
            await asyncio.to_thread(control.update_weights_from_disk, "somewhere", 5)
        await call(f"{engine.url}/abort_request", "POST", {"rid": "r"})
        meta = (await asked)["meta_info"]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
    assert meta["weight_version"] == "5"


def flush_status(url: str) -> int:
    return asyncio.run(call(f"{url}/flush_cache", "POST", {}))


async def status_of(url: str, payload: dict[str, Any]) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=payload) as response:
        return response.status, await response.text()


async def call(url: str, method: str = "GET", payload: dict[str, Any] | None = None) -> int:
    async with aiohttp.ClientSession() as session, session.request(method, url, json=payload) as response:
        return response.status


async def arrived(engine: FakeEngine, number: int = 1) -> None:
    assert await asyncio.to_thread(holds_within, 60, lambda: engine.log.num_posts == number)


async def test_as_sglang_it_refuses_an_id_until_the_request_that_has_it_is_gone_some_time_after_its_abort() -> None:
    rules = SglangRules(abort_s=0.2)
    with FakeEngine(latency=lambda payload: 600.0 if payload["input_ids"] == [4] else 0.0, sglang=rules) as engine:
        first = asyncio.create_task(post(engine.url, body(input_ids=[4])))
        await arrived(engine)
        status, text = await status_of(engine.url, body())
        assert (status, text) == (400, '{"error": {"message": "Duplicate request ID detected: r"}}')
        assert (await status_of(engine.url, body(input_ids=[[7], [8]])))[0] == 200  # its rows are r_0 and r_1
        assert await call(f"{engine.url}/abort_request", "POST", {"rid": "r"}) == 200
        assert (await status_of(engine.url, body()))[0] == 400
        assert (await first)["meta_info"]["finish_reason"] == {"type": "abort"}
        assert (await post(engine.url, body()))["output_ids"] == [6, 5, 4]


@pytest.mark.parametrize("row", [True, False])
async def test_as_sglang_the_id_of_a_lost_request_is_taken_until_an_abort_or_for_a_second(row: bool) -> None:
    rules = SglangRules(disconnect_s=600.0, abort_s=0.0)
    lost = body(input_ids=[[4], [5]]) if row else body()
    with FakeEngine(fault=lambda payload, number: Fault.RESET if number == 0 else None, sglang=rules) as engine:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await post(engine.url, lost)
        assert (await status_of(engine.url, lost))[0] == 400
        assert await call(f"{engine.url}/abort_request", "POST", {"rid": "r"}) == 200
        assert (await status_of(engine.url, lost))[0] == (400 if row else 200)  # it aborts the ids of rows that it has
        for rid in ("r_0", "r_1"):
            assert await call(f"{engine.url}/abort_request", "POST", {"rid": rid}) == 200
        assert (await status_of(engine.url, lost))[0] == 200
    rules = SglangRules(disconnect_s=0.0)
    with FakeEngine(fault=lambda payload, number: Fault.RESET if number == 0 else None, sglang=rules) as engine:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await post(engine.url, lost)
        assert (await status_of(engine.url, lost))[0] == 200


async def test_as_sglang_it_keeps_what_arrives_in_a_pause_whatever_is_aborted() -> None:
    with FakeEngine(sglang=SglangRules(abort_s=0.0, disconnect_s=0.0)) as engine:
        assert await call(f"{engine.url}/ready") == 200
        await call(f"{engine.url}/pause_generation", "POST", {"mode": "retract"})
        assert await call(f"{engine.url}/ready") == 503
        waiting = asyncio.create_task(post(engine.url, body()))
        gone = asyncio.create_task(post(engine.url, body(rid="gone")))
        await arrived(engine, 2)
        gone.cancel()
        await asyncio.wait([gone])
        assert await call(f"{engine.url}/abort_request", "POST", {"abort_all": True}) == 200
        for rid in ("r", "gone"):
            assert (await status_of(engine.url, body(rid=rid)))[0] == 400
        assert not waiting.done()
        await call(f"{engine.url}/continue_generation", "POST", {})
        assert (await waiting)["output_ids"] == [6, 5, 4]
        assert (await status_of(engine.url, body(rid="gone")))[0] == 200


@pytest.mark.parametrize("prompt", [[], [-1], [4, 20], [[4], []], [[4], [20]]])
async def test_as_sglang_it_dies_of_a_token_that_it_has_no_row_for_and_of_an_empty_prompt(prompt: list[Any]) -> None:
    with FakeEngine(latency=lambda payload: 600.0, sglang=SglangRules(vocab_size=20), back_after_s=0.0) as engine:
        other = asyncio.create_task(post(engine.url, body(rid="other", input_ids=[19])))
        await arrived(engine)
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(engine.url, body(input_ids=prompt))
        with pytest.raises(aiohttp.ClientConnectionError):
            await other
        with pytest.raises(aiohttp.ClientConnectionError):
            await call(f"{engine.url}/health")


async def test_as_sglang_a_seed_says_nothing_unless_inference_is_deterministic_and_rows_are_equal_then() -> None:
    rows = body(input_ids=[[4], [4]])
    answers = []
    for deterministic in (False, True):
        with FakeEngine(lambda ids, seed: [seed], sglang=SglangRules(deterministic=deterministic)) as engine:
            answers.append([row["output_ids"] for _ in range(2) for row in await post(engine.url, rows)])
    assert answers == [[[1], [2], [3], [4]], [[2]] * 4]


async def test_server_info_says_what_it_is_told_to() -> None:
    with FakeEngine(server_info={"context_length": 64}) as engine:
        async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/server_info") as response:
            assert (await response.json())["context_length"] == 64
