from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError, RewardError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status
from rm_hub.remote import ATTEMPTS, MAX_ANSWER_BYTES, score, score_group

Handler = Callable[[dict[str, Any], int], web.Response | Awaitable[web.Response]]
UID = GroupUid("data", 3, 0)


def sample(response: str = "yes", **fields: Any) -> Sample:
    return Sample(uid=UID, prompt="q", response=response, label="yes", status=Status.COMPLETED, **fields)


def args(url: str | None, timeout_s: float = 20.0) -> Any:
    return SimpleNamespace(rm_url=url, rm_servers=[], rm_timeout_s=timeout_s)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A real server; the handler gets each request's body and how many came before it."""
    seen: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.json())
        answer = handler(seen[-1], len(seen) - 1)
        return answer if isinstance(answer, web.Response) else await answer

    app = web.Application()
    app.router.add_post("/score", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/score", seen
    finally:
        await runner.cleanup()


async def test_the_servers_number_or_mapping_is_the_reward() -> None:
    async with serving(lambda body, _: web.json_response(len(body["response"]))) as (url, seen):
        assert await score(args(url), sample(metadata={"rubric": "r"})) == 3
    assert seen == [
        {"prompt": "q", "response": "yes", "label": "yes", "metadata": {"rubric": "r"}, "status": "completed"}
    ]
    async with serving(lambda body, _: web.json_response({"score": 0.5, "style": 1})) as (url, _):
        assert await score(args(url), sample()) == {"score": 0.5, "style": 1}


async def test_a_group_is_one_request() -> None:
    group = SampleGroup(uid=UID, samples=[sample("a"), sample("bb")])
    async with serving(lambda body, _: web.json_response([len(s["response"]) for s in body["samples"]])) as (url, seen):
        assert await score_group(args(url), group) == [1, 2]
    assert len(seen) == 1
    for wrong in ([1], {"a": 1}, 2):
        async with serving(lambda body, _, wrong=wrong: web.json_response(wrong)) as (url, _):
            with pytest.raises(RewardError, match="a list of 2 rewards"):
                await score_group(args(url), group)


async def test_the_address_is_never_taken_from_the_row() -> None:
    async with serving(lambda body, _: web.json_response(1)) as (url, seen):
        with pytest.raises(ConfigError, match="--rm-url"):
            await score(args(None), sample(metadata={"rm_url": url, "url": url}))
    assert seen == []


async def test_a_row_names_a_server_of_the_runs_and_goes_on_to_the_next_if_that_is_gone() -> None:
    async with (
        serving(lambda body, _: web.json_response(1)) as (first, seen),
        serving(lambda body, _: web.json_response(2)) as (second, others),
    ):
        own = args(None)
        own.rm_servers = [f"sql={first}", f"proofs={second}", "sql=http://127.0.0.1:1/gone"]
        rewards = [await score(own, sample(sample_index=i, metadata={"rm_server": "sql"})) for i in range(8)]
        assert rewards == [1] * 8
        assert await score(own, sample(metadata={"rm_server": "proofs"})) == 2
        with pytest.raises(RewardError, match=r"names the reward server 'http://x'(.|\n)*sql, proofs"):
            await score(own, sample(metadata={"rm_server": "http://x"}))
        with pytest.raises(RewardError, match="names the reward server"):
            await score(own, sample(metadata={"rm_server": ["sql"]}))
        with pytest.raises(ConfigError, match="no address"):
            await score(own, sample())
        own.rm_url = second
        assert await score(own, sample(metadata={"rm_server": None})) == 2
    assert (len(seen), len(others)) == (8, 2)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_passing_failure_is_tried_again(status: int) -> None:
    async with serving(lambda body, n: web.json_response(1.0) if n else web.Response(status=status, text="busy")) as (
        url,
        seen,
    ):
        assert await score(args(url), sample()) == 1.0
    assert len(seen) == 2


async def test_a_lasting_failure_is_given_up_with_the_servers_words() -> None:
    async with serving(lambda body, _: web.Response(status=503, text="still loading")) as (url, seen):
        with pytest.raises(RewardError, match=r"HTTP 503: still loading") as caught:
            await score(args(url), sample())
    assert len(seen) == ATTEMPTS
    assert "data:3:0" in str(caught.value)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (lambda: web.Response(status=400, text="no such field"), "HTTP 400: no such field"),
        (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
        (lambda: web.Response(text="fine"), "no JSON: fine"),
        (lambda: web.Response(text="[" * 100_000), "no JSON"),
        (lambda: web.Response(text="1" * (MAX_ANSWER_BYTES + 1)), "more than"),
    ],
)
async def test_a_wrong_answer_is_not_asked_for_twice(response: Callable[[], web.Response], message: str) -> None:
    async with serving(lambda body, _: response()) as (url, seen):
        with pytest.raises(RewardError, match=message):
            await score(args(url), sample())
    assert len(seen) == 1


async def test_a_server_that_is_not_there_or_never_answers_is_an_error_within_the_deadline() -> None:
    async with serving(lambda body, _: web.json_response(1)) as (url, _):
        pass
    with pytest.raises(RewardError, match="Cannot connect"):
        await score(args(url), sample())

    async def never(body: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(lambda body, _: never(body)) as (url, _), asyncio.timeout(30):
        with pytest.raises(RewardError, match=r"no answer within 0.27 s"):
            await score(args(url, timeout_s=0.3), sample())


@pytest.mark.parametrize("url", ["ftp://host/", "host:80/score", "http://"])
def test_the_option_takes_an_http_address_only(url: str) -> None:
    options = compose(CORE_SECTIONS)
    assert options(rm_url="https://host:80/score").rm_url == "https://host:80/score"
    with pytest.raises(ValueError, match="rm_url"):
        options(rm_url=url)


async def test_what_may_be_secret_in_the_address_is_in_no_message() -> None:
    host = "127.0.0.1:9"  # the port of the discard service, which the system gives to no process
    with pytest.raises(RewardError) as failed:
        await score(args(f"http://user:hunter2@{host}/score?token=hunter2#hunter2", timeout_s=2.0), sample())
    assert f"--rm-url http://{host}/score" in str(failed.value)
    assert "hunter2" not in str(failed.value)
    for url in ("http://user:hunter2@host:port/x", "http://user:hunter2@[::1/x", "ftp://user:hunter2@host/x"):
        with pytest.raises(ConfigError, match="is no address") as wrong:
            await score(args(url), sample())
        assert "hunter2" not in str(wrong.value)
        assert wrong.value.where == "--rm-url"
