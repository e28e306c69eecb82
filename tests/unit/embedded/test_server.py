"""Every route over real HTTP: a server process, and the real router in front of it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from buffer_rl.embedded.launcher import launch
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.protocol import ROWS, row_seeds
from buffer_rl.engines.router import launch as launch_router
from buffer_rl.errors import EngineError
from buffer_rl.testing.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def fleet(engine_args, tmp_path_factory):
    with EngineFleet(engine_args(), str(tmp_path_factory.mktemp("run")), launch) as running:
        running.wait_ready()
        yield running


class Http:
    """JSON calls to one server; answers are (status, parsed body or text)."""

    def __init__(self, session, url):
        self.session, self.url = session, url

    async def get(self, path):
        async with self.session.get(self.url + path) as response:
            return response.status, self._parsed(await response.text())

    async def post(self, path, body=None, raw=None):
        async with self.session.post(self.url + path, data=raw or json.dumps(body or {})) as response:
            return response.status, self._parsed(await response.text())

    async def generate(self, ids, rid=None, **params):
        body = {"input_ids": ids, "sampling_params": {"ignore_eos": True, **params}, "return_logprob": True}
        status, answer = await self.post("/generate", body | ({"rid": rid} if rid else {}))
        assert status == 200, answer
        return answer

    async def until(self, condition, timeout_s=30.0):
        deadline = time.monotonic() + timeout_s
        while not condition(found := (await self.get("/server_info"))[1]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return found

    @staticmethod
    def _parsed(text):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text


@pytest.fixture
async def http(fleet, model_folder):
    """The engine, as it was started: running, idle, version 0."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Http(session, fleet.engine_urls[0])
        yield client
        await client.post("/abort_request", {"abort_all": True})
        await client.post("/continue_generation")
        update = {"model_path": model_folder("qwen3"), "weight_version": "0"}
        assert (await client.post("/update_weights_from_disk", update))[0] == 200


async def start_running(http, rid, **params):
    """A request that has some tokens and is paused in place. The task ends when the request is answered."""
    await http.post("/pause_generation", {"mode": "in_place"})
    task = asyncio.create_task(http.generate([5, 6, 7], rid, max_new_tokens=400, **params))
    await http.until(lambda info: info["num_waiting_requests"] == 1)
    while (await http.get("/server_info"))[1]["num_running_requests"] == 0:
        await http.post("/continue_generation")
        await http.post("/pause_generation", {"mode": "in_place"})
    return task


async def test_information_and_health(http, fleet):
    for path in ("/health", "/ready", "/health_generate"):
        assert (await http.get(path))[0] == 200
    for path in ("/model_info", "/get_model_info"):
        status, info = await http.get(path)
        assert status == 200
        assert (info["weight_version"], info["model_type"], info["is_generation"]) == ("0", "qwen3", True)
    for path in ("/server_info", "/get_server_info"):
        status, info = await http.get(path)
        assert (status, info["num_running_requests"], info["deterministic"]) == (200, 0, True)
    assert (await http.get("/nowhere"))[0] == 404


async def test_cpu_seconds_of_the_engines_steps_grow_with_what_is_generated(http):
    async def compute() -> float:
        return (await http.get("/server_info"))[1]["compute_cpu_s"]

    before = await compute()
    await http.generate([5, 6, 7], "one", max_new_tokens=4, sampling_seed=1)
    after = await compute()
    assert before < after == await compute()


async def test_the_answer_of_generate_has_sglangs_shape(http):
    answer = await http.generate([5, 6, 7], "my-rid", max_new_tokens=4, sampling_seed=1)
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert len(answer["output_ids"]) == len(answer["text"]) == 4
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("my-rid", 3, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in answer["output_ids"]]
    assert all(entry[0] < 0 for entry in meta["output_token_logprobs"])
    assert meta["output_token_logprobs_length"] == 4
    assert meta["e2e_latency"] > 0


async def test_text_in_and_no_log_probs_unless_asked(http):
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 2, "sampling_seed": 4}}
    status, answer = await http.post("/generate", body)
    assert status == 200
    assert answer["meta_info"]["prompt_tokens"] == 2
    assert "output_token_logprobs" not in answer["meta_info"]


async def test_batches_and_n_answer_with_lists(http):
    batch = await http.generate([[5, 6], [7]], max_new_tokens=3, sampling_seed=2)
    assert [len(a["output_ids"]) for a in batch] == [3, 3]
    many = await http.generate([5, 6], "r", max_new_tokens=8, n=3, sampling_seed=2)
    assert len({tuple(a["output_ids"]) for a in many}) == 3
    assert [a["meta_info"]["id"] for a in many] == ["r_0", "r_1", "r_2"]
    listed = await http.generate([[5, 6]] * 3, max_new_tokens=8, sampling_seed=2)
    assert [a["output_ids"] for a in listed] == [a["output_ids"] for a in many]
    both = await http.generate([[5, 6], [7]], "r", max_new_tokens=8, n=2, sampling_seed=2)
    assert [a["meta_info"]["prompt_tokens"] for a in both] == [2, 2, 1, 1]
    assert [a["output_ids"] for a in both[:2]] == [a["output_ids"] for a in many[:2]]


async def test_rows_of_a_request_have_the_tokens_and_log_probs_of_requests_of_their_own(fleet, http):
    cuts = [{"temperature": 0.8, "top_p": 0.7}, {"temperature": 1.3}, {"temperature": 0.0}, {"top_k": 9, "min_p": 0.01}]
    prompts = [[5, 6, 7], [9, 8], [5, 6, 7], [11]]
    params = [
        {"max_new_tokens": 20 + 3 * i, "ignore_eos": i % 2 == 0, "sampling_seed": 100 + i, **cut}
        for i, cut in enumerate(cuts)
    ]
    asked = list(zip(range(4), prompts, params, strict=True))
    async with EngineClient(fleet.router_url, fleet.engine_urls) as client:
        shared = await asyncio.gather(*(client.agenerate_rows(f"s{i}", ids, ROWS, own) for i, ids, own in asked))
        alone = await asyncio.gather(
            *(
                client.agenerate(f"a{i}.{row}", ids, {**own, "sampling_seed": seed})
                for i, ids, own in asked
                for row, seed in enumerate(row_seeds(own["sampling_seed"], ROWS))
            )
        )
    rows = [row for answers in shared for row in answers]
    assert [(row.output_ids, row.log_probs, row.text) for row in rows] == [
        (one.output_ids, one.log_probs, one.text) for one in alone
    ]
    assert len({tuple(row.output_ids) for row in shared[1]}) == ROWS  # they differ, unless they are greedy
    assert len({tuple(row.output_ids) for row in shared[2]}) == 1


async def test_rows_without_a_seed_differ(http):
    rows = await http.generate([[5, 6]] * 4, "r", max_new_tokens=12)
    assert len({tuple(row["output_ids"]) for row in rows}) == 4


async def test_an_abort_ends_the_rows_whose_ids_begin_so_and_the_answer_waits_for_all(http):
    await http.post("/pause_generation", {"mode": "in_place"})
    ask = http.generate([[5], [6], [7]], "list", max_new_tokens=3, sampling_seed=1)
    task = asyncio.create_task(ask)
    await http.until(lambda info: info["num_waiting_requests"] == 3)
    assert (await http.post("/abort_request", {"rid": "list_1"}))[0] == 200
    await http.until(lambda info: info["num_waiting_requests"] == 2)
    status, answer = await http.post("/generate", {"input_ids": [1], "rid": "list_2"})
    assert (status, "Duplicate request ID" in answer["error"]["message"]) == (400, True)
    assert not task.done()
    await http.post("/continue_generation")
    rows = await task
    assert [row["meta_info"]["finish_reason"]["type"] for row in rows] == ["length", "abort", "length"]
    assert [len(row["output_ids"]) for row in rows] == [3, 0, 3]
    await http.post("/pause_generation", {"mode": "in_place"})
    task = asyncio.create_task(http.generate([[5], [6], [7]], "list", max_new_tokens=3))
    other = asyncio.create_task(http.generate([5], "another", max_new_tokens=3))
    await http.until(lambda info: info["num_waiting_requests"] == 4)
    await http.post("/abort_request", {"rid": "list"})
    assert [row["meta_info"]["finish_reason"]["type"] for row in await task] == ["abort"] * 3
    await http.post("/continue_generation")
    assert len((await other)["output_ids"]) == 3


async def test_without_a_seed_deterministic_answers_follow_the_rid(http):
    first, again, other = [(await http.generate([5], rid, max_new_tokens=20))["output_ids"] for rid in ("x", "x", "y")]
    assert first == again != other


async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_tokens(http):
    params = {"max_new_tokens": 30, "sampling_seed": 9, "skip_special_tokens": False, "stop_token_ids": []}
    plain = await http.generate([5, 6], **params)
    text, ids = plain["text"], plain["output_ids"]
    # Every token but the three special ones is one character, so tokens and text can be counted off together.
    widths = [1 if token > 2 else len(("<pad>", "<eos>", "<unk>")[token]) for token in ids]
    stop = text[10:12]
    end = text.index(stop) + 2
    needed = next(n for n in range(31) if sum(widths[:n]) >= end)
    cut = await http.generate([5, 6], stop=[stop, "never seen"], **params)
    assert cut["text"] == text[: end - 2]
    assert cut["output_ids"] == ids[:needed]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = await http.generate([5, 6], stop=stop, no_stop_trim=True, **params)
    assert kept["text"] == text[: sum(widths[:needed])]


async def test_a_special_token_is_a_stop_string_and_the_text_follows_the_options(http):
    params = {"max_new_tokens": 400, "sampling_seed": 9}
    plain = await http.generate([5, 6], **params)
    end = plain["output_ids"].index(1)  # <eos>, which is ignored here
    for more in ({}, {"no_stop_trim": True}, {"skip_special_tokens": False}):
        answer = await http.generate([5, 6], stop=["<eos>"], **params, **more)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "<eos>"}
        assert answer["output_ids"] == plain["output_ids"][: end + 1]
        assert "<eos>" not in answer["text"]
    raw = await http.generate([5, 6], stop=["<eos>"], no_stop_trim=True, skip_special_tokens=False, **params)
    assert raw["text"] == answer["text"] + "<eos>"


async def test_a_stop_token_is_cut_from_the_text_and_kept_in_the_tokens(http):
    params = {"max_new_tokens": 30, "temperature": 0}
    plain = await http.generate([5, 6], **params)
    stop = plain["output_ids"][0]
    answer = await http.generate([5, 6], ignore_eos=False, stop_token_ids=[stop], **params)
    assert answer["output_ids"] == [stop]
    assert answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    ignored = await http.generate([5, 6], stop_token_ids=[stop], **params)
    assert ignored["output_ids"] == plain["output_ids"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_ids": [5], "sampling_params": {"max_tokens": 3}}, "max_tokens"),
        ({"input_ids": [5], "sampling_params": {"top_p": 3}}, "top_p"),
        ({"input_ids": [5], "colour": "blue"}, "colour"),
        ({"input_ids": [5], "return_routed_experts": True}, "'return_routed_experts' is not supported"),
        ({"input_ids": [5], "return_hidden_states": True}, "'return_hidden_states' is not supported"),
        ({"input_ids": [5], "session_params": {"id": "s"}}, "'session_params' is not supported"),
        ({"input_ids": [5], "lora_path": "a"}, "never been loaded: a"),
        ({"input_ids": [5], "lora_path": ["a"]}, "'lora_path' must be the name of an adapter"),
        ({"input_ids": [5], "bootstrap_room": 0}, "'bootstrap_room' is not supported"),
        ({"input_ids": [5], "sampling_params": {"custom_params": {"a": 1}}}, "'custom_params' is not supported"),
        ({"input_ids": [5], "sampling_params": {"stop_regex": "a+"}}, "'stop_regex' is not supported"),
        ({"input_ids": [5], "return_logprob": "yes"}, "return_logprob"),
        ({"input_ids": [[5], [6]], "return_logprob": [True]}, "return_logprob"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], []]}, "empty"),
        ({"input_ids": [99]}, r"\[0, 99\)"),
        ({"input_ids": [-1]}, r"\[0, 99\)"),
        ({"input_ids": [1.5]}, "whole"),
        ({"input_ids": [[5, 1], [5, 1.0]]}, "whole"),
        ({"input_ids": [[5, 1], [5, True]]}, "whole"),
        ({"input_ids": [[5], [99]]}, r"\[0, 99\)"),
        ({"input_ids": [[5], [5]], "sampling_params": [{"max_new_tokens": 512}, {}]}, "context length"),
        ({}, "must be given"),
        ({"input_ids": [5] * 512}, "context length"),
        ({"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 13}}, "context length"),
        ({"input_ids": [5], "rid": 7}, "rid"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "rid"),
        ([], "JSON object"),
    ],
)
async def test_a_wrong_request_is_400_and_says_what_is_wrong(http, body, named):
    status, answer = await http.post("/generate", raw=json.dumps(body))
    assert status == 400
    assert re.search(named, answer["error"]["message"])


async def test_fields_that_ask_for_nothing_pass(http):
    empty = {"session_params": {}, "modalities": [], "lora_path": "", "return_routed_experts": False, "stream": False}
    numbers = {"logprob_start_len": -1, "top_logprobs_num": 0, "routed_experts_start_len": 0, "priority": None}
    params = {"max_new_tokens": 1, "custom_params": {}, "logit_bias": None, "json_schema": "", "stop_regex": []}
    body = {"input_ids": [5], "rid": "r", "log_metrics": True, **empty, **numbers, "sampling_params": params}
    status, answer = await http.post("/generate", body)
    assert (status, len(answer["output_ids"])) == (200, 1)


async def test_log_probs_are_given_to_the_prompts_that_asked(http):
    body = {"input_ids": [[5], [6]], "return_logprob": [False, True], "sampling_params": {"max_new_tokens": 1}}
    status, answers = await http.post("/generate", body)
    assert status == 200
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [False, True]


async def test_what_the_router_would_drop_is_refused_and_the_rest_arrives(fleet, engine_args):
    with FakeEngine() as engine:
        log = str(Path(fleet.engines[0].process.log_path).with_name("dropping_router.log"))
        router = launch_router(engine_args(), log)
        try:
            router.wait_ready(60)
            router.add(engine.url)
            async with EngineClient(router.url, [engine.url]) as client:
                forwarded = {
                    "max_new_tokens": 3, "min_new_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
                    "min_p": 0.1, "n": 1, "sampling_seed": 2, "stop": ["a"], "stop_token_ids": [3], "ignore_eos": True,
                    "skip_special_tokens": False, "no_stop_trim": True, "frequency_penalty": 0.5,
                    "presence_penalty": 0.5, "repetition_penalty": 1.5,
                }  # fmt: skip
                for grammar in ("json_schema", "regex", "ebnf"):
                    await client.agenerate(grammar, [5], forwarded | {grammar: "x"})
                    assert engine.log.requests[-1]["sampling_params"] == forwarded | {grammar: "x"}
                neutral = {"custom_params": {}, "stop_regex": None, "spaces_between_special_tokens": False}
                await client.agenerate("neutral", [5], neutral)
                for name in ("custom_params", "logit_bias", "stop_regex", "structural_tag", "max_tokens"):
                    with pytest.raises(
                        EngineError, match=f"does not forward the sampling parameter '{name}'"
                    ) as caught:
                        await client.agenerate(name, [5], {name: {"a": 1}})
                    assert caught.value.status == 400
                async with client._http.session().post(
                    f"{router.url}/generate", json={"input_ids": [5], "sampling_params": {"stop_regex": "a"}}
                ) as response:
                    assert response.status == 200
                assert len(engine.log.requests) == 5
                assert "stop_regex" not in engine.log.requests[-1]["sampling_params"]
        finally:
            router.stop()


async def test_a_body_that_is_not_json_is_400(http):
    for path in ("/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk"):
        assert (await http.post(path, raw="{"))[0] == 400


async def test_a_response_may_fill_the_context_exactly(http):
    answer = await http.generate([5] * 500, max_new_tokens=12, sampling_seed=0)
    assert len(answer["output_ids"]) == 12


async def test_a_rid_in_flight_cannot_be_used_again_until_it_is_answered(http):
    await http.post("/pause_generation", {"mode": "in_place"})
    task = asyncio.create_task(http.generate([5], "twin", max_new_tokens=2))
    await http.until(lambda info: info["num_waiting_requests"] == 1)
    status, answer = await http.post("/generate", {"input_ids": [5], "rid": "twin"})
    assert status == 400
    assert "twin" in answer["error"]["message"]
    await http.post("/abort_request", {"rid": "twin"})
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    await http.post("/continue_generation")
    assert len((await http.generate([5], "twin", max_new_tokens=2))["output_ids"]) == 2


async def test_an_aborted_request_keeps_its_partial_output(http):
    whole = await http.generate([5, 6, 7], "long", max_new_tokens=400)
    task = await start_running(http, "long")
    assert (await http.get("/health"))[0] == 200
    assert (await http.get("/health_generate"))[0] == 200
    assert (await http.post("/flush_cache"))[0] == 400
    assert (await http.post("/abort_request", {"rid": "somebody else"}))[0] == 200
    assert not task.done()
    assert (await http.post("/abort_request", {"rid": "long"}))[0] == 200
    answer = await task
    count = len(answer["output_ids"])
    assert 0 < count < 400
    assert answer["output_ids"] == whole["output_ids"][:count]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await http.post("/flush_cache"))[0] == 200


async def test_pause_with_abort_answers_everything_and_new_requests_wait(http):
    task = await start_running(http, "a")
    assert (await http.post("/pause_generation", {"mode": "abort"}))[1]["status"] == "ok"
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    later = asyncio.create_task(http.generate([5], "b", max_new_tokens=2))
    await http.until(lambda info: info["num_waiting_requests"] == 1)
    assert not later.done()
    await http.post("/continue_generation")
    assert len((await later)["output_ids"]) == 2


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_tokens_after_an_update_carry_the_new_version(http, mode, model_folder):
    task = await start_running(http, "v")
    paused = (await http.post("/pause_generation", {"mode": mode}))[1]
    update = {"model_path": model_folder("qwen3", 1), "weight_version": "8", "flush_cache": mode == "retract"}
    status, answer = await http.post("/update_weights_from_disk", update)
    assert (status, answer["success"], answer["num_paused_requests"]) == (200, True, 1)
    await http.post("/continue_generation")
    meta = (await task)["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("0", 0, "8", 400)
    assert 0 < first["end"] == second["start"]
    assert paused["retracted_tokens"] == (meta["prompt_tokens"] + first["end"] if mode == "retract" else 0)
    assert meta["weight_version"] == "8"
    assert meta["num_retractions"] == int(mode == "retract")
    assert (await http.get("/model_info"))[1]["weight_version"] == "8"


async def test_new_weights_answer_differently_and_old_ones_as_before(http, model_folder):
    outputs = []
    for seed in (0, 1, 0):
        update = {"model_path": model_folder("qwen3", seed), "weight_version": str(seed)}
        assert (await http.post("/update_weights_from_disk", update))[0] == 200
        outputs.append((await http.generate([5, 6], max_new_tokens=20, temperature=0))["output_ids"])
    assert outputs[0] == outputs[2] != outputs[1]


async def test_weights_that_are_not_finite_fail_each_request_by_name_until_others_are_loaded(
    http, model_folder, tmp_path
):
    before = await http.generate([5, 6], max_new_tokens=8, temperature=0)
    broken = tmp_path / "broken"
    shutil.copytree(model_folder("qwen3"), broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    update = {"model_path": str(broken), "weight_version": "6"}
    assert (await http.post("/update_weights_from_disk", update))[0] == 200
    bodies = [{"rid": f"r{i}", "input_ids": [5, 6 + i % 2], "return_logprob": True} for i in range(4)]
    for body, (status, answer) in zip(
        bodies, await asyncio.gather(*(http.post("/generate", body) for body in bodies)), strict=True
    ):
        assert status == 500
        assert re.search(rf"request '{body['rid']}': .* is nan; .*version 6.* not finite", answer["error"]["message"])
    assert (await http.get("/health"))[0] == 200
    status, text = await http.get("/health_generate")
    assert (status, "not finite" in text) == (503, True)
    update = {"model_path": model_folder("qwen3"), "weight_version": "7"}
    assert (await http.post("/update_weights_from_disk", update))[0] == 200
    after = await http.generate([5, 6], max_new_tokens=8, temperature=0)
    assert after["output_ids"] == before["output_ids"]
    assert (await http.get("/health_generate"))[0] == 200


async def test_a_refused_update_changes_nothing(http, model_folder, tmp_path):
    before = await http.generate([5, 6], max_new_tokens=20, temperature=0)
    damaged = tmp_path / "damaged"
    shutil.copytree(model_folder("qwen3", 1), damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for path, named in (
        (str(tmp_path / "missing"), "config.json is missing"),
        (str(damaged), "cannot load"),
        (model_folder("llama"), "another model"),
    ):
        status, answer = await http.post("/update_weights_from_disk", {"model_path": path, "weight_version": "9"})
        assert (status, answer["success"]) == (400, False)
        assert named in answer["message"]
    assert (await http.post("/update_weights_from_disk", {"weight_version": "9"}))[0] == 400
    assert (await http.get("/model_info"))[1]["weight_version"] == "0"
    after = await http.generate([5, 6], max_new_tokens=20, temperature=0)
    assert after["output_ids"] == before["output_ids"]


async def test_memory_held_in_place_cannot_be_flushed_by_an_update(http, model_folder):
    task = await start_running(http, "held")
    update = {"model_path": model_folder("qwen3", 1), "weight_version": "9"}
    status, answer = await http.post("/update_weights_from_disk", update)
    assert (status, answer["success"]) == (400, False)
    assert "retract" in answer["message"]
    await http.post("/continue_generation")
    assert (await task)["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 400}]


async def test_an_update_without_a_pause_lets_running_requests_finish_first(http, model_folder):
    task = await start_running(http, "r")
    update = {"model_path": model_folder("qwen3", 1), "weight_version": "3"}
    await http.post("/continue_generation")
    status, _ = await http.post("/update_weights_from_disk", update)
    assert status == 200
    assert [span["version"] for span in (await task)["meta_info"]["weight_versions"]] == ["0"]
    assert (await http.generate([5], max_new_tokens=2))["meta_info"]["weight_version"] == "3"


async def test_an_unknown_pause_mode_and_an_empty_abort_are_400(http):
    assert (await http.post("/pause_generation", {"mode": "nap"}))[0] == 400
    assert (await http.post("/abort_request", {}))[0] == 400


async def test_a_client_that_goes_away_ends_its_request(http):
    await http.post("/pause_generation", {"mode": "in_place"})
    task = asyncio.create_task(http.generate([5], "gone", max_new_tokens=2))
    await http.until(lambda info: info["num_waiting_requests"] == 1)
    task.cancel()
    left = await http.until(lambda info: info["num_waiting_requests"] == 0)
    assert left["num_running_requests"] == 0


async def test_through_the_router_the_same_answers_arrive_for_the_same_seeds(fleet, http):
    direct = await http.generate([5, 6, 7], max_new_tokens=30, sampling_seed=77, temperature=0.9)
    async with EngineClient(fleet.router_url, fleet.engine_urls) as client:
        params = {"max_new_tokens": 30, "sampling_seed": 77, "temperature": 0.9, "ignore_eos": True}
        results = await asyncio.gather(*(client.agenerate(f"r{i}", [5, 6, 7], params) for i in range(20)))
        for result in results:
            assert result.output_ids == direct["output_ids"]
            assert result.log_probs == [entry[0] for entry in direct["meta_info"]["output_token_logprobs"]]
            assert result.text == direct["text"]


async def test_through_the_router_a_client_that_goes_away_ends_its_request(fleet, http):
    async with EngineClient(fleet.router_url, fleet.engine_urls) as client:
        with EngineControlClient(fleet.engine_urls) as control:
            control.pause("in_place")
        task = asyncio.create_task(client.agenerate("gone", [5], {"max_new_tokens": 2}))
        await http.until(lambda info: info["num_waiting_requests"] == 1)
        task.cancel()
        left = await http.until(lambda info: info["num_waiting_requests"] == 0)
        assert left["num_running_requests"] == 0


async def test_the_router_leaves_a_paused_engine_alone(fleet, http):
    async with EngineClient(fleet.router_url, fleet.engine_urls) as client:
        with EngineControlClient(fleet.engine_urls) as control:
            control.pause("retract")
            task = asyncio.create_task(client.agenerate("patient", [5], {"max_new_tokens": 2}))
            await http.until(lambda info: info["num_waiting_requests"] == 1)
            control.flush()
            control.resume()
        assert len((await task).output_ids) <= 2


def test_logs_hold_neither_requests_nor_probes(fleet):
    log = Path(fleet.engines[0].process.log_path).read_text()
    assert "Invalid HTTP request" not in log
    assert "generate" not in log
