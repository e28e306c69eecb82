"""What a case is: requests to a server in order, and what the answers have to be. And the runner of cases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from conformance.answers import normalised
from conformance.reference import Reference

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request, or one wait.

    kind: ``ask`` sends and records the answer; ``quiet`` sends, and the status has to be 200; ``start`` sends a request
    to ``/generate`` and goes on, with ``wait`` once it has its first token; ``answer`` records what ``start`` of that
    ``name`` is answered; ``leave`` closes its connection; ``again`` sends until the status is 200, which it records."""

    kind: str
    path: str = ""
    body: Any = None
    method: str = "POST"
    name: str = ""
    wait: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """expect: an entry for each recorded answer, all of whose parts have to be in it (see ``mismatch``). as_sglang: the
    same of a SGLang server, where it differs, for the reason ``why``. sampled: tokens are random and not compared
    between servers."""

    name: str
    steps: Sequence[Step]
    expect: Sequence[Any]
    as_sglang: Sequence[Any] | None = None
    why: str = ""
    sampled: bool = False
    topic: str = ""


def ask(path: str, body: Any = None, method: str = "POST") -> Step:
    """Send, and record the answer."""
    return Step(kind="ask", path=path, body=body, method=method)


def get(path: str) -> Step:
    """GET, and record the answer."""
    return Step(kind="ask", path=path, method="GET")


def quiet(path: str, body: Any = None) -> Step:
    """Send; the answer has to be 200 and is not recorded."""
    return Step(kind="quiet", path=path, body={} if body is None else body)


def start(name: str, body: Mapping[str, Any], *, wait: bool = True) -> Step:
    """Send to ``/generate``; go on once it runs, or at once."""
    return Step(kind="start", name=name, path="/generate", body=body, wait=wait)


def answer(name: str) -> Step:
    """Record what ``start(name)`` is answered."""
    return Step(kind="answer", name=name)


def leave(name: str) -> Step:
    """Close the connection of ``start(name)``."""
    return Step(kind="leave", name=name)


def again(path: str, body: Any) -> Step:
    """Send until the status is 200, and record that answer."""
    return Step(kind="again", path=path, body=body)


ROUTED = ("/generate", "/v1/completions", "/v1/chat/completions")
"""What a run's router forwards."""


@dataclass(slots=True)
class Runner:
    """Runs cases against one server, which it brings back to version 0 of the weights before each.

    router: the URL of a router in front of it, if requests for tokens go through one."""

    session: aiohttp.ClientSession
    url: str
    reference: Reference
    router: str = ""
    _tasks: dict[str, asyncio.Task[tuple[int, Any]]] = field(default_factory=dict)

    async def run(self, case: Case) -> list[dict[str, Any]]:
        """The normalised answers of ``case``."""
        await self._reset()
        found = []
        try:
            for step in case.steps:
                if (got := await self._step(step)) is not None:
                    found.append(normalised(*got, step_body(case, step), self.reference))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._tasks.clear()
        return found

    async def _step(self, step: Step) -> tuple[int, Any] | None:
        if step.kind == "start":
            sent, running = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(self._stream(step.body, sent, running))
            self._tasks[step.name] = task
            begun = asyncio.create_task((running if step.wait else sent).wait())
            await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
            if not step.wait:
                await self._send(get("/health"))  # behind the request
            return None
        if step.kind == "answer":
            return await self._tasks[step.name]
        if step.kind == "leave":
            self._tasks[step.name].cancel()
            return None
        if step.kind == "again":
            async with asyncio.timeout(TIMEOUT_S):
                while (got := await self._send(step))[0] != 200:  # noqa: ASYNC110  the other side is a server
                    await asyncio.sleep(0.02)
            return got
        got = await self._send(step)
        if step.kind == "quiet" and got[0] != 200:
            raise AssertionError(f"{step.path} {step.body}: {got}")
        return got if step.kind == "ask" else None

    def _to(self, path: str) -> str:
        is_routed = self.router and path.partition("?")[0] in ROUTED
        return (self.router if is_routed else self.url) + path

    async def _send(self, step: Step) -> tuple[int, Any]:
        raw = None if step.method == "GET" else json.dumps(step.body)
        headers = {"Content-Type": "application/json"}
        async with self.session.request(step.method, self._to(step.path), data=raw, headers=headers) as response:
            return response.status, parsed(await response.text())

    async def _stream(self, body: Mapping[str, Any], sent: asyncio.Event, running: asyncio.Event) -> tuple[int, Any]:
        """The last event of a streamed answer; an error as it is. sent, running: set when it is so."""
        request = {"json": {**body, "stream": True}, "trace_request_ctx": sent}
        async with self.session.post(self._to("/generate"), **request) as response:
            if response.status != 200:
                return response.status, parsed(await response.text())
            last: Any = None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    running.set()
            return response.status, last

    async def _reset(self) -> None:
        await self._send(quiet("/continue_generation"))
        await self._send(quiet("/end_weight_update"))
        await self._send(quiet("/abort_request", {"abort_all": True}))
        async with asyncio.timeout(TIMEOUT_S):
            while (await self._send(quiet("/flush_cache")))[0] != 200:  # noqa: ASYNC110  the other side is a server
                await asyncio.sleep(0.02)
        if (await self._send(get("/model_info")))[1]["weight_version"] != "0":
            await self._step(quiet("/update_weights_from_disk", self.reference.update("0")))


async def _note_sent(_: Any, context: Any, __: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.set()


def tracing() -> aiohttp.TraceConfig:
    """Of the session of a ``Runner``: it says when a request's body is sent."""
    config = aiohttp.TraceConfig()
    config.on_request_chunk_sent.append(_note_sent)
    return config


def step_body(case: Case, step: Step) -> Any:
    """The request that an answer belongs to."""
    return next((own.body for own in case.steps if own.name == step.name), {}) if step.name else step.body


def parsed(text: str) -> Any:
    """JSON, server-sent events as a list of objects, or plain text."""
    if text.startswith("data: "):
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] + (
            ["[DONE]"] if "data: [DONE]" in text else []
        )
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def mismatch(expected: Any, found: Any, where: str = "") -> str:
    """Where ``found`` lacks what is expected, or "". Objects may have more keys; functions are asked; numbers may be
    0.002 apart."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping):
            return f"{where}: expected an object, found {found!r:.200}"
        parts = (mismatch(value, found.get(key), f"{where}.{key}") for key, value in expected.items())
        return next(filter(None, parts), "")
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return f"{where}: expected {expected!r:.300}, found {found!r:.300}"
        pairs = zip(expected, found, strict=True)
        return next(filter(None, (mismatch(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(pairs))), "")
    if isinstance(expected, Callable):  # type: ignore[arg-type]
        return "" if expected(found) else f"{where}: not so of {found!r:.300}"
    if isinstance(expected, float) and isinstance(found, float):
        return "" if abs(expected - found) <= 0.002 else f"{where}: expected {expected}, found {found}"
    return "" if expected == found else f"{where}: expected {expected!r:.300}, found {found!r:.300}"
