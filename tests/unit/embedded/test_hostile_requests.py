"""Requests that no client of good will sends: each is answered, with 400 if it is wrong, and the engine goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.embedded.loader import LoadedModel, LoadOptions, load_tokenizer
from buffer_rl.embedded.routes import build_app
from buffer_rl.embedded.service import EngineService

VOCAB = 99
NUMBERS = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "sampling_seed")
LISTS = ("stop", "stop_token_ids", "logit_bias", "custom_params")
PATHS = (
    *("/generate", "/v1/chat/completions", "/v1/completions", "/abort_request", "/pause_generation"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk", "/begin_weight_update"),
    *("/update_weights_from_tensor", "/init_weights_update_group", "/update_weights_from_distributed"),
    *("/destroy_weights_update_group", "/weights_checker"),
)


class InProcess:
    """An engine over the tiny model, and its routes, in an event loop that only runs during a call."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        model = LoadedModel(LoadOptions(model_path=folder))
        self.service = EngineService(model, load_tokenizer(folder), max_running_requests=8, weight_version="0")
        self.loop = asyncio.new_event_loop()
        self._app = build_app(self.service)
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.service.start()

    def close(self) -> None:
        self.service.stop()
        self.loop.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and answer. body: its JSON text, or what becomes it."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.loop.run_until_complete(asyncio.wait_for(self.ask(path, raw), 60))

    async def ask(self, path: str, raw: bytes) -> tuple[int, Any]:
        """As ``post``, in the loop."""
        unread, sent = [{"type": "http.request", "body": raw, "more_body": False}], []

        async def receive() -> Any:
            return unread.pop() if unread else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await self._app(scope, receive, send)
        answer = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(answer) if answer.startswith((b"{", b"[")) else answer

    def restore(self) -> None:
        """End what a command may have begun."""
        for path in ("/abort_request", "/continue_generation", "/resume_memory_occupation"):
            self.post(path, {"abort_all": True})
        if self.service.scheduler.lacks:
            assert self.post("/update_weights_from_disk", {"model_path": self._folder})[0] == 200

    def generate(self, **params: Any) -> tuple[int, Any]:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True, **params}}
        return self.post("/generate", body)


@pytest.fixture(scope="module")
def engine(model_folder: Callable[..., str]) -> Iterator[InProcess]:
    running = InProcess(model_folder("qwen3"))
    yield running
    running.close()


big = st.sampled_from([2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**300, 1e308, 1e-320, 5e-324])
number = st.one_of(big, big.map(lambda value: -value), st.integers(-200, 200), st.floats(allow_nan=False, width=32))
token = st.one_of(number, st.integers(-VOCAB, 2 * VOCAB))
value = st.recursive(
    st.one_of(number, st.none(), st.booleans(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
params = st.one_of(
    st.dictionaries(st.sampled_from(NUMBERS), number, max_size=4),
    st.fixed_dictionaries({"stop_token_ids": st.lists(token, max_size=3), "min_new_tokens": st.just(2)}),
    st.dictionaries(st.sampled_from((*NUMBERS, *LISTS)), value, max_size=3),
)


@settings(max_examples=50)
@given(params)
def test_no_sampling_parameter_ends_the_engine(engine: InProcess, params: dict[str, Any]) -> None:
    status, answer = engine.generate(**params)
    assert status in (200, 400), answer
    assert engine.service.failure is None


@settings(max_examples=60)
@given(
    st.sampled_from(PATHS),
    st.one_of(
        value,
        st.dictionaries(
            st.sampled_from(
                (
                    *("input_ids", "text", "rid", "sampling_params", "logprob_start_len", "top_logprobs_num"),
                    *("token_ids_logprob", "return_logprob", "messages", "prompt", "max_tokens", "logprobs", "tools"),
                    *("chat_template_kwargs", "mode", "tags", "model_path", "weight_version", "selector", "action"),
                    *("serialized_named_tensors", "load_format", "group_name", "names", "dtypes", "shapes", "stop"),
                )
            ),
            value,
            max_size=5,
        ),
    ),
)
def test_no_json_value_at_any_route_is_an_error_of_the_server(engine: InProcess, path: str, body: Any) -> None:
    status, answer = engine.post(path, body)
    assert status < 500, answer
    assert engine.service.failure is None
    engine.restore()


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(("role", "content", "tool_calls", "type", "text", "function")), value), value)
def test_no_message_of_a_chat_is_an_error_of_the_server(engine: InProcess, message: dict[str, Any], call: Any) -> None:
    message = {"role": "user", "content": [{"type": "text"}, call], **message}
    called = {"role": "assistant", "content": "a", "tool_calls": [call, {"function": {"name": "f", "arguments": call}}]}
    for one in (message, called):
        status, answer = engine.post("/v1/chat/completions", {"messages": [one], "max_tokens": 1})
        assert status in (200, 400), answer
    assert engine.service.failure is None


@pytest.mark.parametrize("path", PATHS)
def test_json_that_is_nested_deeply_is_400_at_every_route(engine: InProcess, path: str) -> None:
    for levels in (200, 900, 100_000):
        nested = b"[" * levels + b"]" * levels
        for name in (b"input_ids", b"messages", b"selector", b"tags"):
            assert engine.post(path, b'{"%s": %s}' % (name, nested))[0] == 400


def test_arguments_of_a_tool_call_that_are_nested_deeply_are_400(engine: InProcess) -> None:
    call = {"function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}
    messages = [{"role": "assistant", "content": "a", "tool_calls": [call]}]
    status, answer = engine.post("/v1/chat/completions", {"messages": messages})
    assert (status, "arguments" in answer["message"]) == (400, True)


@pytest.mark.parametrize("place", [{}, {"chat_template_kwargs": {}}], ids=["request", "variables"])
def test_a_template_that_the_client_sends_is_refused(engine: InProcess, place: dict[str, Any]) -> None:
    own = {"chat_template": "{% for i in range(9) %}a{% endfor %}"}
    more = dict.fromkeys(place, own) or own
    status, answer = engine.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **more})
    assert (status, "'chat_template' is not supported" in answer["message"]) == (400, True)


def test_other_requests_are_answered_while_a_template_is_rendered(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, let_go = threading.Event(), threading.Event()

    def render(*_: Any, **__: Any) -> str:
        began.set()
        assert let_go.wait(60)
        return "ab"

    async def both() -> tuple[int, int]:
        body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
        chat = asyncio.create_task(engine.ask("/v1/chat/completions", body))
        await asyncio.to_thread(began.wait, 60)
        other = await engine.ask("/generate", b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}')
        let_go.set()
        return other[0], (await chat)[0]

    monkeypatch.setattr(engine.service.codec.tokenizer, "apply_chat_template", render)
    assert engine.loop.run_until_complete(asyncio.wait_for(both(), 60)) == (200, 200)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"top_k": 2**63}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"n": 2**40}, "n must"),
        ({"temperature": 1e300}, "temperature"),
        ({"sampling_seed": 1e30}, "sampling_seed"),
        ({"stop_token_ids": [-5]}, "stop_token_ids"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"stop": "a" * 100_000}, "stop"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused_by_name(engine: InProcess, params: dict[str, Any], names: str) -> None:
    status, answer = engine.generate(**params)
    assert status == 400
    assert names in answer["error"]["message"]


def test_a_request_for_more_rows_than_any_use_is_refused_before_they_are_made(engine: InProcess) -> None:
    body = {"input_ids": [[5]] * 2000, "sampling_params": {"n": 1000}}
    status, answer = engine.post("/generate", body)
    assert (status, "rows" in answer["error"]["message"]) == (400, True)


def test_a_batch_that_cannot_be_drawn_fails_its_requests_and_the_next_one_is_answered(
    make_scheduler: Any, make_request: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make_scheduler()
    before = make_request("before", (5, 6), max_new_tokens=20)
    scheduler.add(before)
    scheduler.step()
    bad = make_request("bad", (7, 8), max_new_tokens=20)
    object.__setattr__(bad.params, "top_k", "x")  # past the check of requests
    scheduler.add(bad)
    with caplog.at_level(logging.ERROR):
        finished = run(scheduler)
    assert [request.rid for request in finished] == ["bad", "before"]
    assert (bad.finish_reason["type"], bad.finish_reason["status_code"]) == ("abort", 500)
    assert "TypeError" in bad.finish_reason["message"]
    assert "'bad'" in caplog.text
    assert before.finish_reason == {"type": "length", "length": 20}
    assert (scheduler.num_running, scheduler.idle) == (0, True)
