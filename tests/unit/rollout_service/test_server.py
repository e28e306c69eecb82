"""The rollout service over HTTP: who may call it, what it refuses and in which words, and its page."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.engines import http_server
from buffer_rl.errors import ConfigError, DeadlineError, RolloutError
from buffer_rl.records.groups import VersionSpan
from buffer_rl_rollout_service.client import ServiceClient
from buffer_rl_rollout_service.server import AckRequest, ReadRequest, Service
from buffer_rl_rollout_service.store import Rules, Store
from buffer_rl_rollout_service.trajectory import Trajectory
from harness.asgi import serving_app

TOKEN = "a-token-of-32-characters-or-more"
TOKENS: dict[str, Any] = {"messages": None, "tokens": [5, 1, 2, 3], "response_length": 3}
MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def trajectory(uid: str = "a", **changes: Any) -> dict[str, Any]:
    return {"instance_id": "p", "uid": uid, "reward": 1.0, "messages": MESSAGES, **changes}


def spans(*entries: tuple[int, ...]) -> dict[str, Any]:
    names = ("version", "start", "end")
    return {"weight_versions": [dict(zip(names, entry, strict=False)) for entry in entries]}


@asynccontextmanager
async def serving(folder: Path, **rules: Any) -> AsyncIterator[str]:
    service = Service(Store(folder, Rules(**{"group_size": 2, **rules})), TOKEN, max_body_bytes=10_000)
    async with serving_app(service.app()) as url:
        yield url


async def ask(url: str, path: str, *, token: str | None = f"Bearer {TOKEN}", **request: Any) -> tuple[int, Any]:
    headers = {"Authorization": token} if token is not None else {}
    method = "POST" if request else "GET"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.request(method, url + path, headers=headers, **request) as response,
    ):
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


async def test_writes_reads_and_acknowledgements(tmp_path: Path) -> None:
    async with serving(tmp_path) as url, ServiceClient(url, TOKEN) as service:
        assert await service.write(trajectory(instance_id=17, extra_info={"tool": 3}, ignored=1)) == {
            "success": True,
            "group": 1,
            "size": 1,
            "complete": False,
            "duplicate": False,
            "weight_version": None,
        }
        status, _ = await ask(url, "/buffer/write", json=trajectory("b", instance_id="17"))
        assert status == 200
        status, peeked = await ask(url, "/peek?num_groups=3")
        answer = await service.read("run", 2, position=0, weight_version=3, timeout_s=60)
        assert (status, peeked["groups"]) == (200, answer["groups"])
        (group,) = answer["groups"]
        assert (group["instance_id"], group["partial"]) == ("17", False)
        assert group["items"] == [
            trajectory(instance_id="17", extra_info={"tool": 3}),
            trajectory("b", instance_id="17"),
        ]
        await service.acknowledge("run", delivered=[group["group"]], timeout_s=60)
        assert (await service.write(trajectory("c"), timeout_s=60))["weight_version"] == 3  # what agents may go by
        assert await service.peek(timeout_s=60) == []
        statistics = await service.statistics(timeout_s=60)
        assert statistics["weight_version"] == 3
        counts = statistics["trajectories"]
        assert (counts["written"], counts["delivered"], counts["open"]) == (3, 2, 1)
        with pytest.raises(RolloutError, match="not leased by this reader") as refused:
            await service.acknowledge("other", delivered=[group["group"]], timeout_s=60)
        assert refused.value.status == 409


async def test_a_read_waits_for_the_write_that_completes_a_group(tmp_path: Path) -> None:
    async with serving(tmp_path) as url, ServiceClient(url, TOKEN) as service:
        assert (await ask(url, "/read", json={"reader": "run", "wait_s": 0.1}))[1]["groups"] == []
        reading = asyncio.create_task(service.read("run", 1, timeout_s=60))
        await service.write(trajectory("a"))
        await service.write(trajectory("b"))
        assert len((await reading)["groups"]) == 1


async def test_a_group_times_out_while_no_request_comes(tmp_path: Path) -> None:
    async with serving(tmp_path, timeout_s=0.5) as url, ServiceClient(url, TOKEN) as service:
        await service.write(trajectory("a"))
        (group,) = (await service.read("run", 1, timeout_s=60))["groups"]
        assert group["partial"]


@pytest.mark.parametrize(
    "token", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, "Bearer \u00e9", "Basic !"]
)
async def test_nothing_but_health_is_answered_without_the_token(tmp_path: Path, token: str | None) -> None:
    async with serving(tmp_path) as url:
        for path in ("/", "/stats", "/peek"):
            status, answer = await ask(url, path, token=token)
            assert (status, answer["error"]["what"]) == (401, "the token is missing or wrong")
        for path in ("/write", "/buffer/write", "/read", "/ack", "/nothing"):
            assert (await ask(url, path, token=token, json=trajectory()))[0] == 401
        assert (await ask(url, "/health", token=token)) == (200, {"status": "ok"})
        assert (await ask(url, "/stats"))[1]["trajectories"]["written"] == 0
        with pytest.raises(RolloutError, match="token"):
            async with ServiceClient(url, "another token") as service:
                await service.statistics(timeout_s=60)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": None}, "reward: Input should be a valid number"),
        ({"reward": 1e39}, "reward: Input should be less than or equal to 3"),
        ({"reward": -1e39}, "reward: Input should be greater than or equal to -3"),
        ({"reward": "1"}, "reward: Input should be a valid number"),
        ({"instance_id": ""}, "instance_id: String should have at least 1 character"),
        ({"uid": "u" * 257}, "uid: String should have at most 256 characters"),
        ({"uid": True}, "uid: Input should be a valid string"),
        ({"messages": None}, "has either messages or tokens"),
        ({"messages": MESSAGES[:1] * 2}, "no message has the role 'assistant'"),
        ({"messages": [{"content": "x"}, *MESSAGES]}, "messages.0.role: Field required"),
        ({"tokens": [1, 2]}, "has either messages or tokens"),
        ({"messages": None, "tokens": [1, 2]}, "response_length: expected 1 to 1"),
        ({"messages": None, "tokens": [1, 2], "response_length": 2}, "response_length: expected 1 to 1"),
        ({"messages": None, "tokens": [1, -2], "response_length": 1}, "tokens.1: Input should be greater"),
        ({"messages": None, "tokens": [1, 2], "response_length": 1, "loss_mask": [1, 1]}, "loss_mask: 2 values"),
        ({"messages": None, "tokens": [1, 2], "response_length": 1, "loss_mask": [2]}, "loss_mask.0: Input should be"),
        ({"weight_version": "default"}, "weight_version: Input should be a valid integer"),
        ({"weight_version": -1}, "weight_version: Input should be greater than or equal to 0"),
        ({"weight_version": True}, "weight_version: Input should be a valid integer"),
        ({"weight_version": 2**31}, "weight_version: Input should be less than"),
        (spans((1, 0, 3)), "weight_versions belong to tokens; weight_version goes with messages"),
        (TOKENS | spans((1, 0)), "weight_versions.0.end: Field required"),
        (TOKENS | spans(), "weight_versions: List should have at least 1 item"),
        (TOKENS | spans((1, 0, 2), (1, 1, 3)), "expected spans in order within response_length, 3"),
        (TOKENS | spans((1, 0, 0)), "weight_versions.0.end: Input should be greater than or equal to 1"),
        (TOKENS | spans((1, 2, 2), (1, 2, 3)), "got [(2, 2), (2, 3)]"),
        (TOKENS | spans((1, 0, 4)), "expected spans in order within response_length, 3"),
        (TOKENS | spans((1, 0, 2)), "tokens 2 to 3 are trained on and have no version"),
        (TOKENS | spans((1, 1, 3)), "tokens 0 to 1 are trained on and have no version"),
    ],
)
async def test_a_wrong_trajectory_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    async with serving(tmp_path) as url:
        status, answer = await ask(url, "/write", json=trajectory(**changes))
        assert status == 422
        assert says in answer["error"]["what"]
        assert answer["error"]["where"] == "POST /write"
        assert (await ask(url, "/stats"))[1]["trajectories"]["written"] == 0


async def test_versions_are_taken_as_engines_report_them(tmp_path: Path) -> None:
    meta_info = {"weight_version": "4", "weight_versions": [{"version": "3", "start": 0, "end": 1}]}
    masked = TOKENS | {"loss_mask": [1, 0, 0]}
    async with serving(tmp_path) as url, ServiceClient(url, TOKEN) as service:
        await service.write(trajectory("a", **masked, **meta_info))
        await service.write(trajectory("b", weight_version=4))
        (group,) = await service.peek(timeout_s=60)
    first, second = (Trajectory.model_validate(item) for item in group["items"])
    assert first.spans(3) == [VersionSpan(3, 0, 1)]
    assert second.spans(3) == [VersionSpan(4, 0, 3)]
    assert Trajectory.model_validate(trajectory()).spans(3) == []


async def test_other_requests_that_cannot_be_done_say_why(tmp_path: Path) -> None:
    async with serving(tmp_path, capacity=1) as url:
        status, answer = await ask(url, "/write", data=b'{"reward": NaN}')
        assert status == 400
        assert "no JSON" in answer["error"]["what"]
        assert (await ask(url, "/write", data=b"[1]"))[0] == 422
        status, answer = await ask(url, "/write", json=trajectory(extra_info={"x": "y" * 10_000}))
        assert (status, answer["error"]["expected"]) == (413, "at most 10000 bytes (--max-body-mib)")
        assert (await ask(url, "/write", json=trajectory()))[0] == 200
        status, answer = await ask(url, "/write", json=trajectory(instance_id="q"))
        assert (status, answer["error"]["where"]) == (429, "instance_id 'q'")
        for asked in ({"num_groups": 0}, {"num_groups": 10**9}, {"wait_s": 1e9}, {"have": [2**63]}, {"position": -1}):
            assert (await ask(url, "/read", json={"reader": "run", **asked}))[0] == 422, asked
        assert (await ask(url, "/peek?num_groups=-1"))[0] == 422
        assert (await ask(url, "/nothing"))[0] == 404
        assert (await ask(url, "/write"))[0] == 405


@pytest.mark.parametrize(
    "number", ["0001", "0", "1025", "9" * 5000, "00000000" + "9" * 5000, "+1", " 1", "1.0", "\u0661", ""]
)
async def test_a_number_of_groups_that_is_none_is_422(tmp_path: Path, number: str) -> None:
    async with serving(tmp_path) as url:
        status, answer = await ask(url, f"/peek?num_groups={quote(number)}")
        assert (status, answer["error"]["expected"]) == (422, "1 to 1024")
        assert (await ask(url, "/peek?num_groups=1024"))[0] == 200


async def test_json_that_is_nested_deeply_is_422_wherever_it_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        for levels in (200, 400, 900, 4000):
            nested = "[" * levels + "]" * levels
            for name in ("extra_info", "messages", "tools", "reader", "tokens"):
                for path in ("/write", "/read", "/ack"):
                    body = json.dumps(trajectory(extra_info={}))[:-1] + f', "{name}": {{"a": {nested}}}}}'
                    status, answer = await ask(url, path, data=body.encode())
                    assert (status, "nested too deeply" in answer["error"]["what"]) == (422, True)
        assert (await ask(url, "/write", data=b"{"))[0] == 400


hostile = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.text(max_size=8),
        st.sampled_from([2**31, 2**53, 2**63, 2**64, -1, -(2**63), 10**300, 1e308, -1e308, 5e-324, 0, 1]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
largest = st.sampled_from([2**53, 2**63, 2**64, 10**300])
hostile = hostile | st.lists(largest, min_size=1, max_size=2) | largest
BODIES = {"/write": Trajectory, "/read": ReadRequest, "/ack": AckRequest}
requests = st.sampled_from(list(BODIES)).flatmap(
    lambda path: st.tuples(
        st.just(path), st.dictionaries(st.sampled_from(list(BODIES[path].model_fields)), hostile, max_size=2)
    )
)


def test_no_json_value_is_an_error_of_the_server(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        service = serving(tmp_path)
        url = runner.run(service.__aenter__())

        @settings(max_examples=100)
        @given(requests)
        def check(drawn: tuple[str, dict[str, Any]]) -> None:
            path, body = drawn
            sent = trajectory(**body) if path == "/write" else {"reader": "run", **body, "wait_s": 0}
            status, answer = runner.run(ask(url, path, json=sent))
            assert status < 500, answer

        check()
        runner.run(service.__aexit__(None, None, None))


async def test_a_body_that_does_not_come_ends_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.2)
    async with asyncio.timeout(60), serving(tmp_path) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST /write HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99\r\n\r\n{{"
        writer.write(head.encode())
        assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        writer.close()


async def test_a_client_says_which_service_does_not_answer_and_stops_at_its_deadline(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with ServiceClient(f"http://127.0.0.1:{unused_tcp_port}", TOKEN) as service:
        with pytest.raises(DeadlineError, match=f"127.0.0.1:{unused_tcp_port}/stats.*within 1.2 s"):
            await service.statistics(timeout_s=1.2)  # three tries, of which the first is told
    said = [record.getMessage() for record in caplog.records if record.name == "buffer_rl_rollout_service.client"]
    assert len(said) == 1
    assert said[0].startswith(f"http://127.0.0.1:{unused_tcp_port}/stats: Cannot connect to host")
    assert " it is tried again for up to 1." in said[0]
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with silent, ServiceClient(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", TOKEN) as service:
        with pytest.raises(DeadlineError, match=r"within 0\.2 s: TimeoutError"):
            await service.statistics(timeout_s=0.2)
    async with ServiceClient("nowhere", TOKEN) as service:
        with pytest.raises(ConfigError, match="no address"):
            await service.statistics(timeout_s=1)
    with pytest.raises(ConfigError, match="BUFFER_RL_ROLLOUT_SERVICE_TOKEN"):
        ServiceClient("http://127.0.0.1:1", None)


async def test_the_page_shows_counts_and_a_chart_to_who_has_the_token(tmp_path: Path) -> None:
    password = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    async with serving(tmp_path) as url:
        status, empty = await ask(url, "/", token=f"Basic {password}")
        assert status == 200
        assert "Nothing was written yet." in empty
        assert (await ask(url, "/stats", token=f"Basic {password}"))[0] == 401  # of the page alone
        for problem in ("p", "q"):
            for uid in "ab":
                await ask(url, "/write", json=trajectory(uid, instance_id=problem))
        _, read = await ask(url, "/read", json={"reader": "run"})
        await ask(url, "/ack", json={"reader": "run", "dropped": {str(read["groups"][0]["group"]): "<b>odd</b>"}})
        _, page = await ask(url, "/")
        assert re.search(r"<tr><td class=\"name\">ready</td><td class=\"num\">1</td><td class=\"num\">2</td>", page)
        assert "&lt;b&gt;odd&lt;/b&gt;" in page
        assert page.count("<svg") == 2
        assert "<script" not in page
