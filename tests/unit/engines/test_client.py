"""The client against a scripted engine: retries, deadlines, errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import MAX_RETRIES, EngineClient, parse_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.http import EngineFanOut
from buffer_rl.engines.protocol import EMBEDDED, RowSeeds, ServerInfo, row_seeds
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import Status, VersionSpan
from buffer_rl.testing.decoding import SglangRules
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from buffer_rl.weights.distributed import join_group
from harness.processes import holds_within

CLOSED_URL = "http://127.0.0.1:9"  # the port of the discard service, which the system gives to no process


def client_of(engine, **more):
    return EngineClient(engine.url, [engine.url], **more)


async def test_an_answer_arrives_whole():
    with FakeEngine(version=7, log_prob=-0.25) as engine:
        async with client_of(engine) as client:
            result = await client.agenerate("r", [1, 2, 3], {"max_new_tokens": 2})
            assert result.output_ids == [3, 2]
            assert result.log_probs == [-0.25, -0.25]
            assert (result.finish_reason, result.status) == ("length", Status.TRUNCATED)
            assert result.spans == [VersionSpan(7, 0, 2)]
            result = await client.agenerate("s", [1, 2], {"max_new_tokens": 9})
            assert (result.finish_reason, result.matched, result.status) == ("stop", 1, Status.COMPLETED)


@pytest.mark.parametrize("fault", [Fault.SERVER_ERROR, Fault.RESET])
async def test_a_lost_request_is_repeated_under_its_rid_after_an_abort(fault):
    with FakeEngine(fault=lambda body, number: fault if number == 0 else None) as engine:
        async with client_of(engine) as client:
            result = await client.agenerate("r7", [1, 2], {"sampling_seed": 5, "max_new_tokens": 9})
        assert result.output_ids == [2, 1]
        assert [body["rid"] for body in engine.log.requests] == ["r7", "r7"]
        assert engine.log.requests[0] == engine.log.requests[1]
        assert engine.log.aborted == [{"rid": "r7"}]


async def test_retries_are_bounded_and_the_error_says_where_and_what():
    with FakeEngine(fault=lambda body, number: Fault.SERVER_ERROR) as engine:
        async with client_of(engine, max_retries=1) as client:
            with pytest.raises(EngineError, match=r"HTTP 500.*scripted failure") as caught:
                await client.agenerate("r", [1], {})
        assert len(engine.log.requests) == 2
        assert engine.url in str(caught.value)


async def test_garbage_is_a_protocol_error_and_is_not_repeated():
    with FakeEngine(fault=lambda body, number: Fault.GARBAGE) as engine:
        async with client_of(engine) as client:
            with pytest.raises(EngineError, match="not JSON"):
                await client.agenerate("r", [1], {})
        assert len(engine.log.requests) == 1


async def test_status_404_is_not_repeated():
    with FakeEngine() as engine:
        async with EngineClient(f"{engine.url}/nowhere", [engine.url]) as client:
            with pytest.raises(EngineError, match="HTTP 404"):
                await client.agenerate("r", [1], {})
        assert engine.log.aborted == []


async def test_a_deadline_aborts_the_request_and_names_it():
    with FakeEngine(latency=lambda body: 60.0) as engine:
        async with client_of(engine, timeout_s=0.2) as client:
            with pytest.raises(DeadlineError, match="'slow'"):
                await client.agenerate("slow", [1], {})
        assert {"rid": "slow"} in engine.log.aborted


async def test_a_cancelled_call_is_not_swallowed():
    with FakeEngine(latency=lambda body: 60.0) as engine:
        async with client_of(engine) as client:
            task = asyncio.create_task(client.agenerate("r", [1], {}))
            while not engine.log.requests:  # noqa: ASYNC110 (the log belongs to another thread)
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


@pytest.mark.slow
async def test_a_request_that_the_engine_still_has_is_repeated_until_its_id_is_free():
    faults = [Fault.RESET, Fault.RESET, None, Fault.RESET, Fault.RESET, None]  # of those that it takes
    rules = SglangRules(abort_s=0.3, disconnect_s=600.0)
    with FakeEngine(fault=lambda body, number: faults.pop(0), sglang=rules) as engine:
        async with client_of(engine, max_retries=2) as client:
            result = await client.agenerate("r", [1, 2], {})
            num_posts = engine.log.num_posts
            rows = await client.agenerate_rows("s", [3, 4], 2, {})
    assert (result.output_ids, [row.output_ids for row in rows]) == ([2, 1], [[4, 3], [4, 3]])
    assert (num_posts > 3, engine.log.num_posts - num_posts > 3) == (True, True)  # some were refused
    assert engine.log.aborted[:2] == [{"rid": "r"}] * 2


async def test_a_request_that_was_lost_in_a_pause_is_repeated_until_the_pause_ends_however_often(monkeypatch):
    monkeypatch.setattr("buffer_rl.engines.client.BACKOFF_S", 0.01)
    monkeypatch.setattr("buffer_rl.engines.client.MAX_BACKOFF_S", 0.02)
    with FakeEngine(sglang=SglangRules(abort_s=0.0)) as engine, EngineControlClient([engine.url]) as control:
        await asyncio.to_thread(control.pause)
        async with client_of(engine, timeout_s=60.0) as client:
            task = asyncio.create_task(client.agenerate("r", [1, 2], {}))
            assert await asyncio.to_thread(holds_within, 60, lambda: engine.log.num_posts == 1)
            engine.cut_connections()
            assert await asyncio.to_thread(holds_within, 30, lambda: engine.log.num_posts > 2 * MAX_RETRIES)
            await asyncio.to_thread(control.resume)
            assert (await task).output_ids == [2, 1]
        await asyncio.to_thread(control.pause)
        async with client_of(engine, timeout_s=1.5) as client:
            task = asyncio.create_task(client.agenerate("s", [1, 2], {}))
            last = engine.log.num_posts
            assert await asyncio.to_thread(holds_within, 60, lambda: engine.log.num_posts > last)
            engine.cut_connections()
            with pytest.raises(DeadlineError, match="'s'"):
                await task


async def test_rows_share_a_request_and_are_answered_in_order():
    with FakeEngine(respond=lambda ids, seed: [*ids, seed]) as engine:
        async with client_of(engine) as client:
            rows = await client.agenerate_rows("r", [4, 5], 3, {"sampling_seed": 9, "max_new_tokens": 8})
    assert [row.output_ids for row in rows] == [[4, 5, seed] for seed in row_seeds(9, 3)]
    assert [body["rid"] for body in engine.log.requests] == ["r_0", "r_1", "r_2"]
    assert (engine.log.num_posts, engine.log.aborted) == (1, [])


@pytest.mark.parametrize("fault", [Fault.SERVER_ERROR, Fault.RESET])
async def test_lost_rows_are_repeated_together_under_their_ids_after_an_abort_of_all(fault):
    with FakeEngine(fault=lambda body, number: fault if number == 0 else None) as engine:
        async with client_of(engine) as client:
            rows = await client.agenerate_rows("r", [1, 2], 2, {"sampling_seed": 5})
    assert [row.output_ids for row in rows] == [[2, 1], [2, 1]]
    assert engine.log.requests[:2] == engine.log.requests[2:]
    assert (engine.log.num_posts, engine.log.aborted) == (2, [{"rid": "r_0"}, {"rid": "r_1"}])


async def test_a_deadline_aborts_all_rows_and_an_abort_of_some_leaves_the_others():
    with FakeEngine(latency=lambda body: 60.0 if body["rid"].endswith("_1") else 0.0) as engine:
        async with client_of(engine, timeout_s=1.5) as client:
            with pytest.raises(DeadlineError, match="'slow'"):
                await client.agenerate_rows("slow", [1], 3, {})
        assert engine.log.aborted == [{"rid": f"slow_{row}"} for row in range(3)]
        async with client_of(engine) as client:
            task = asyncio.create_task(client.agenerate_rows("r", [1], 2, {}))
            while len(engine.log.requests) < 5:  # noqa: ASYNC110 (the log belongs to another thread)
                await asyncio.sleep(0.01)
            await client.abort(["r_1"])
            assert [row.finish_reason for row in await task] == ["stop", "abort"]


@pytest.mark.parametrize("wrong", [[{}], {"output_ids": []}, [], "text"])
async def test_an_answer_with_another_number_of_rows_is_refused(wrong):
    async def answer(request):
        return web.json_response(wrong)

    app = web.Application()
    app.router.add_post("/generate", answer)
    async with TestServer(app) as server, EngineClient(str(server.make_url("/")), []) as client:
        with pytest.raises(EngineError, match="to a request of 2 rows"):
            await client.agenerate_rows("r", [1], 2, {})


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("o", RowSeeds.OWN),
        ("oo", RowSeeds.OWN),
        ("n", RowSeeds.NONE),
        ("on", RowSeeds.NONE),
        ("ons", RowSeeds.SHARED),
        ("os", RowSeeds.SHARED),
    ],
)
async def test_how_rows_draw_is_what_holds_for_all_engines(engines, expected):
    rules = {"o": None, "n": SglangRules(), "s": SglangRules(deterministic=True)}
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(FakeEngine(sglang=rules[kind])).url for kind in engines]
        async with EngineClient("", [*urls, CLOSED_URL]) as client:
            assert await asyncio.gather(client.row_seeds(), client.row_seeds()) == [expected] * 2


async def test_how_rows_draw_is_asked_again_where_no_engine_answered():
    with FakeEngine() as engine:
        urls = [CLOSED_URL]
        async with EngineClient("", urls) as client:
            with pytest.raises(EngineError, match="no engine answers"):
                await client.row_seeds()
            client._engines = client_of(engine)._engines
            assert await client.row_seeds() is RowSeeds.OWN


@pytest.mark.parametrize("num_rows", [0, 1, 17])
async def test_a_request_has_two_to_sixteen_rows(num_rows):
    async with EngineClient("http://127.0.0.1:9", []) as client:
        with pytest.raises(EngineError, match=f"{num_rows} rows"):
            await client.agenerate_rows("r", [1], num_rows, {})


async def test_more_than_one_answer_a_request_is_refused():
    async with EngineClient("http://127.0.0.1:9", []) as client:
        with pytest.raises(EngineError, match="one answer"):
            await client.agenerate("r", [1], {"n": 2})


@pytest.mark.parametrize(("prompt", "wrong"), [([], "empty"), ([3, -1, 9], "id -1"), ([0, 10, 4], "id 10"), ([9], "")])
async def test_token_ids_are_checked_before_a_request_is_sent(prompt, wrong):
    with FakeEngine(sglang=SglangRules(vocab_size=10)) as engine:
        async with client_of(engine, vocab_size=10) as client:
            for ask in (client.agenerate("r", prompt, {}), client.agenerate_rows("s", prompt, 2, {})):
                if not wrong:
                    await ask
                    continue
                with pytest.raises(EngineError, match=wrong) as caught:
                    await ask
                assert caught.value.status == 400
        assert engine.log.num_posts == (0 if wrong else 2)


async def test_the_size_of_the_vocabulary_is_that_of_the_models_embedding(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 6}}')
    with FakeEngine() as engine:
        urls = {"router_url": engine.url, "engine_urls": [engine.url]}
        args = compose(CORE_SECTIONS)(generate_timeout_s=10.0, hf_checkpoint=str(tmp_path), **urls)
        async with EngineClient.from_args(args) as client:
            assert (await client.agenerate("r", [5], {})).output_ids == [5]
            with pytest.raises(EngineError, match="0 to 5"):
                await client.agenerate("r", [6], {})


async def test_control_reaches_every_engine_and_failures_name_each_url():
    with FakeEngine(version=3) as first, FakeEngine(version=4) as second:
        async with EngineClient("", [first.url, second.url]) as client:
            await client.abort()
            await client.abort(["a", "b"])
        with EngineControlClient([first.url, second.url]) as control:
            control.pause("retract")
            control.resume()
            control.flush()
            assert control.versions() == {first.url: "3", second.url: "4"}
            with pytest.raises(EngineError) as caught:  # the scripted engine has no such route
                control.begin_weight_update()
        for engine in (first, second):
            assert engine.log.aborted == [{"abort_all": True}, {"rid": "a"}, {"rid": "b"}]
            assert engine.url in str(caught.value)
        assert "HTTP 404" in str(caught.value)


def test_one_dead_engine_among_living_ones_is_named():
    dead = CLOSED_URL
    with FakeEngine() as engine:
        control = EngineControlClient([engine.url, dead])
        with control, pytest.raises(EngineError) as caught:
            control.flush()
    assert dead in str(caught.value)
    assert engine.url not in str(caught.value)


async def test_an_abort_passes_over_an_engine_out_of_reach_and_reaches_the_others():
    with FakeEngine() as engine:
        async with EngineClient("", [CLOSED_URL, engine.url]) as client:
            await client.abort(["a", "b"])
            await client.abort()
    assert engine.log.aborted == [{"rid": "a"}, {"rid": "b"}, {"abort_all": True}]


async def test_an_abort_that_an_engine_refuses_is_an_error():
    with FakeEngine() as engine:
        async with EngineClient("", [f"{engine.url}/nowhere"]) as client:
            with pytest.raises(EngineError, match="HTTP 404"):
                await client.abort()


async def test_without_engines_of_its_own_a_call_asks_the_router_for_them_each_time():
    listed: list[str] = []

    async def workers(request):
        return web.json_response({"workers": [{"id": url, "url": url} for url in listed]})

    app = web.Application()
    app.router.add_get("/workers", workers)
    with FakeEngine(version=1) as first, FakeEngine(version=2) as second:
        async with TestServer(app) as router, EngineClient(str(router.make_url("/")), []) as client:
            engines = EngineFanOut(lambda: [], 60.0, router_url=client.router_url)
            listed[:] = [first.url]
            assert list(await engines.server_info()) == [first.url]
            listed[:] = [second.url]
            assert list(await engines.server_info()) == [second.url]
            await client.abort(["r"])
            await engines.close()
    assert (first.log.aborted, second.log.aborted) == ([], [{"rid": "r"}])


async def test_a_router_that_lists_no_workers_is_an_error():
    with FakeEngine() as engine:
        async with EngineClient(engine.url, []) as client:
            with pytest.raises(EngineError, match="HTTP 404"):
                await client.abort(["r"])


async def test_engines_that_have_died_do_not_fail_a_call_that_another_one_answers():
    dead = CLOSED_URL

    async def answering(*urls, gone):
        engines = EngineFanOut(lambda: urls, 60.0, is_gone=lambda url, error: url in gone)
        try:
            return list(await engines.ask("/model_info"))
        finally:
            await engines.close()

    with FakeEngine(version=3) as engine:
        assert await answering(engine.url, dead, gone=[dead]) == [engine.url]
        with pytest.raises(EngineError) as caught:
            await answering(engine.url, dead, gone=[])
        assert dead in str(caught.value)
        with pytest.raises(EngineError):
            await answering(dead, gone=[dead])


def test_synchronous_control_works_without_and_within_an_event_loop():
    with FakeEngine(version=2) as engine:
        control = EngineControlClient([engine.url], timeout_s=10)
        control.pause()
        control.flush()
        control.resume()
        assert control.versions() == {engine.url: "2"}

        async def inside():
            return control.versions()

        assert asyncio.run(inside()) == {engine.url: "2"}
    with control, pytest.raises(EngineError):
        control.flush()


def good_answer():
    return {
        "output_ids": [4],
        "text": "x",
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 4},
            "output_token_logprobs": [[-1.0, 4, None]],
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        },
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.pop("output_ids"),
        lambda a: a["meta_info"].pop("output_token_logprobs"),
        lambda a: a["meta_info"].update(finish_reason={"type": "tired"}),
        lambda a: a["meta_info"].update(output_token_logprobs=[[-1.0, 5, None]]),
        lambda a: a["meta_info"].update(output_token_logprobs=[]),
        lambda a: a["meta_info"].update(output_token_sampling_logprobs=[-1.0, -2.0]),
        lambda a: a["meta_info"].update(weight_versions=[{"version": "0", "start": "a", "end": 1}]),
        lambda a: a["meta_info"].update(weight_versions=[{"version": "0", "start": 0}]),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_an_error(change):
    assert parse_answer(good_answer(), "u").output_ids == [4]
    broken = good_answer()
    change(broken)
    with pytest.raises(EngineError):
        parse_answer(broken, "u")


def test_with_kept_tokens_the_log_probabilities_are_those_over_them():
    answer = good_answer()
    answer["meta_info"].update(output_token_sampling_mask=[[4, 9]], output_token_sampling_logprobs=[-0.25])
    result = parse_answer(answer, "u")
    assert (result.log_probs, [memoryview(ids).cast("i").tolist() for ids in result.kept]) == ([-0.25], [[4, 9]])


async def test_kept_tokens_are_asked_for_where_a_server_sends_them(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 6}')
    cut = {"hf_checkpoint": str(tmp_path), "rollout_top_k": 2, "replay_kept_tokens": True}
    for changes, expected in (({"router": "smg"}, [True, None, None]), ({"router": "sglang"}, [None] * 3)):
        with FakeEngine() as engine:
            args = compose(CORE_SECTIONS)(generate_timeout_s=10.0, router_url=engine.url, **cut, **changes)
            async with EngineClient.from_args(args) as client:
                for top_k in ({"top_k": 2}, {"top_k": -1}, {}):
                    await client.agenerate(f"r{top_k}", [5], top_k)
        assert [request.get("return_sampling_mask") for request in engine.log.requests] == expected


def versioned(num_tokens, *spans):
    answer = good_answer() | {"output_ids": list(range(num_tokens))}
    answer["meta_info"]["output_token_logprobs"] = [[-1.0, token, None] for token in range(num_tokens)]
    versions = [{"version": str(version), "start": start, "end": end} for version, start, end in spans]
    answer["meta_info"]["weight_versions"] = versions
    return answer


@pytest.mark.parametrize(
    ("num_tokens", "spans", "read"),
    [
        (3, [(4, 0, 3)], [(4, 0, 3)]),
        (3, [(4, 0, 1), (6, 1, 3)], [(4, 0, 1), (6, 1, 3)]),
        (0, [], []),
        (0, [(4, 0, 0)], []),  # SGLang's answer to a request that was aborted in its queue
        (3, [(4, 0, 0), (5, 0, 3)], [(5, 0, 3)]),
        (3, [("default", 0, 3)], [(-1, 0, 3)]),  # what SGLang calls weights that it was started with
    ],
)
def test_version_spans_that_cover_the_tokens_are_read(num_tokens, spans, read):
    result = parse_answer(versioned(num_tokens, *spans), "u")
    assert [(span.version, span.start, span.end) for span in result.spans] == read


@pytest.mark.parametrize(
    ("num_tokens", "spans"),
    [
        (3, []),
        (3, [(4, 0, 0)]),
        (3, [(4, 0, 2)]),
        (3, [(4, 1, 3)]),
        (3, [(4, 0, 1), (5, 2, 3)]),
        (3, [(4, 0, 2), (5, 1, 3)]),
        (3, [(5, 1, 3), (4, 0, 1)]),
        (3, [(4, 0, 4)]),
        (3, [(4, 0, 3), (5, 3, 2)]),
        (0, [(4, 0, 1)]),
    ],
)
def test_version_spans_that_do_not_cover_the_tokens_are_refused_with_what_came(num_tokens, spans):
    with pytest.raises(EngineError, match=rf"weight_versions .* of {num_tokens} output tokens") as caught:
        parse_answer(versioned(num_tokens, *spans), "http://engine")
    assert caught.value.where == "http://engine"
    assert "cover every output token once" in caught.value.expected
    for _, start, end in spans:
        assert f"'start': {start}, 'end': {end}" in caught.value.what


def test_an_engine_that_never_answers_a_call_to_join_a_group_is_given_up_at_the_deadline_of_that_call():
    with FakeEngine() as answers, socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            EngineControlClient([answers.url, url], timeout_s=60) as control,
            pytest.raises(EngineError, match=r"no answer within 0\.2 s"),
        ):
            join_group(control, "127.0.0.1", 1, {url: 2}, name="w", timeout_s=0.2)


@pytest.mark.parametrize(
    ("answer", "info"),
    [
        (
            {"version": "0.5.23", "tp_size": 4, "dp_size": 2, "device": "cuda"},
            ServerInfo(tp_size=4, dp_size=2, device="cuda"),
        ),
        ({"engine": "buffer_rl.embedded", "tp_size": 1}, ServerInfo(engine=EMBEDDED)),
        (
            {"engine": "buffer_rl.embedded", "imitates": "sglang"},
            ServerInfo(engine=EMBEDDED, imitates="sglang"),
        ),
    ],
)
def test_a_server_is_what_it_says_of_itself(answer, info):
    assert ServerInfo.parse(answer, "http://engine") == info
    assert info.is_ours is (info == ServerInfo(engine=EMBEDDED))


@pytest.mark.parametrize("answer", [None, [], {"tp_size": "two"}, {"dp_size": None}])
def test_what_is_no_answer_of_a_server_is_an_error(answer):
    with pytest.raises(EngineError, match="not what a server says of itself"):
        ServerInfo.parse(answer, "http://engine")


async def test_sampling_parameters_that_json_cannot_hold_are_the_fault_of_the_request() -> None:
    async with EngineClient("http://127.0.0.1:1", ["http://127.0.0.1:1"]) as client:
        for params in ({"stop": ["\ud800"]}, {"stop": {1, 2}}):
            with pytest.raises(EngineError, match="cannot be sent as JSON") as caught:
                await client.agenerate("r", [1], params)
            assert caught.value.status == 400
