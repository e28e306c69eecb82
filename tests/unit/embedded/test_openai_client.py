"""OpenAI's own client reads the engine's answers under strict validation, and its errors by their codes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from transformers import AutoTokenizer

from buffer_rl.embedded.launcher import launch
from buffer_rl.testing.tiny import make_tiny_model

pytestmark = pytest.mark.filterwarnings("error")
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 6}
TRAINING = {"return_token_ids": True, "return_meta_info": True}


@pytest.fixture(scope="module")
def url(engine_args: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_tiny_model(Path(tmp_path_factory.mktemp("model"), "m"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    args = engine_args(hf_checkpoint=folder, engine_context_length=32)
    engine = launch(args, 0, str(tmp_path_factory.mktemp("logs") / "log"))
    try:
        engine.wait_ready(120)
        yield engine.url
    finally:
        engine.stop()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as own:
        yield own


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2}], ids=["plain", "log-probs"])
async def test_a_chat_is_valid_whole_and_streamed(client: AsyncOpenAI, more: dict[str, Any]) -> None:
    extra = {"ignore_eos": True, **TRAINING}
    whole = await client.chat.completions.create(**ASKED, **more, seed=3, extra_body=extra)
    assert json.loads(whole.model_dump_json())["usage"]["completion_tokens"] == 6 * more.get("n", 1)
    assert whole.metadata is not None
    assert json.loads(whole.metadata["weight_versions"]) == [{"version": "0", "start": 0, "end": 6}]
    texts = [""] * len(whole.choices)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "seed": 3}
    async for chunk in await client.chat.completions.create(**ASKED, **more, **options, extra_body=extra):
        chunk.model_dump_json()
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == 6 * more.get("n", 1)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 6}], ids=["open", "limited"])
@pytest.mark.parametrize("length", [31, 40])
async def test_a_chat_that_is_too_long_is_refused_by_openais_code(
    client: AsyncOpenAI, length: int, limit: dict[str, int]
) -> None:
    messages: Any = [{"role": "user", "content": "a" * length}]
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(model="m", messages=messages, **limit)
    assert refused.value.code == "context_length_exceeded"
    assert f"have {length + 1} tokens; expected fewer than the model's context length of 32" in refused.value.message


async def test_what_does_not_fit_besides_its_answer_has_that_code_too(client: AsyncOpenAI) -> None:
    for asking in (
        client.chat.completions.create(**{**ASKED, "max_tokens": 100}),
        client.completions.create(model="m", prompt="a" * 40, max_tokens=3),
    ):
        with pytest.raises(BadRequestError) as refused:
            await asking
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(**ASKED, temperature=-1)
    assert refused.value.code == "400"


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.owned_by async for model in client.models.list()] == ["buffer_rl"]
