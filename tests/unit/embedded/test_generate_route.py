"""``/generate`` as an ASGI application, where a real server cannot be brought to: its engine fails, its task ends."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import pytest

from buffer_rl.embedded.loader import LoadedModel, LoadOptions
from buffer_rl.embedded.routes import build_app
from buffer_rl.embedded.scheduler import Request
from buffer_rl.embedded.service import EngineService


class Call:
    """One POST to ``/generate`` of a client that stays."""

    def __init__(self, app: Any, rid: str) -> None:
        rows = {"input_ids": [[5], [6]], "rid": rid, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        self._body: bytes | None = json.dumps(rows).encode()
        self._sent: list[Any] = []
        scope = {"type": "http", "path": "/generate", "method": "POST", "headers": []}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def _send(self, message: Any) -> None:
        self._sent.append(message)

    async def answer(self) -> tuple[int, Any]:
        await asyncio.wait_for(self.task, 30)
        assert self.task.cancelling() == 0
        start, body = self._sent
        return start["status"], json.loads(body["body"])


@pytest.fixture
def service(model_folder: Callable[..., str]) -> EngineService:
    model = LoadedModel(LoadOptions(model_path=model_folder("qwen3")))
    return EngineService(model, None, max_running_requests=8, weight_version="0")


async def test_a_failure_of_the_engine_answers_the_requests_that_wait_and_refuses_later_ones(
    service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(service.model.decoder, "decode", fail)
    app, failures = build_app(service), []
    service.on_failure = lambda: failures.append(1)
    service.scheduler.paused = True
    service.start()
    calls = [Call(app, rid) for rid in ("a", "b")]
    await asyncio.sleep(0)  # both have begun
    await service.resume()
    for call in calls:
        status, body = await call.answer()
        assert (status, body["error"]["message"]) == (500, "the engine has failed: no memory left")
    assert failures == [1]
    assert (await Call(app, "a").answer())[0] == 503


async def test_a_task_that_is_cancelled_from_outside_ends_so_and_others_are_answered(service: EngineService) -> None:
    app = build_app(service)
    service.scheduler.paused = True
    service.start()
    gone, stays = Call(app, "gone"), Call(app, "stays")
    await asyncio.sleep(0)  # both have begun
    gone.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    await service.resume()
    status, rows = await stays.answer()
    assert (status, [len(row["output_ids"]) for row in rows]) == (200, [3, 3])
    assert not gone._sent
    service.stop()


async def test_answered_requests_are_kept_by_no_cycle(service: EngineService) -> None:
    app = build_app(service)
    service.start()
    gc.collect()
    gc.disable()  # what only the collector would free stays
    try:
        for number in range(5):
            assert (await Call(app, f"r{number}").answer())[0] == 200
        left = sum(isinstance(each, Request) for each in gc.get_objects())
    finally:
        gc.enable()
        service.stop()
    assert left <= 2  # of the last call, which the engine thread may still hold
