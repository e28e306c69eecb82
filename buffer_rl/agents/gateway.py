"""The HTTP server of a rollout worker's sessions: an OpenAI endpoint for each, on the loopback interface.

A request is asked once, whatever becomes of its connection: its answer is recorded, and a client that repeats the
request, and says so as OpenAI's clients do, gets the recorded answer. After the end of its session it gets 410, which
clients do not repeat.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from buffer_rl.agents import chat_dialect as dialect
from buffer_rl.agents.session import Exchange, Session, SessionEndedError, TooLongError
from buffer_rl.cluster.process import base_url, listening_socket
from buffer_rl.data.json_text import JSONError, read_json
from buffer_rl.engines.http_server import Front, http_server
from buffer_rl.errors import BufferRLError, EngineError

_log = logging.getLogger(__name__)
HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 15.0
"""Between the comments of a stream whose answer is not there yet."""
REPEATED = "x-stainless-retry-count"
"""The header by which OpenAI's clients, and Anthropic's, count the repetitions of a request."""


@dataclass(slots=True, kw_only=True)
class _Opened:
    """asked: by the digest of its body, the newest request. running: all requests without an answer."""

    session: Session
    key: str
    asked: dict[bytes, asyncio.Task[list[Exchange]]] = field(default_factory=dict)
    running: set[asyncio.Task[list[Exchange]]] = field(default_factory=set)

    def ask(self, digest: bytes, asked: dialect.ChatRequest) -> None:
        task = self.asked[digest] = asyncio.get_running_loop().create_task(_answers(self.session, asked))
        self.running.add(task)
        task.add_done_callback(self.running.discard)


class Gateway:
    """The server, which starts with the first session. Belongs to the worker's event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self._num_late = 0
        self._tokenizer = tokenizer
        self._opened: dict[str, _Opened] = {}
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._url = ""
        self._noticed: set[str] = set()

    @asynccontextmanager
    async def opened(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """For the length of the block ``session`` has a URL and a key, which are given."""
        if self._task is None:
            self._start()
        name, key = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        opened = self._opened[name] = _Opened(session=session, key=key)
        try:
            yield f"{self._url}/sessions/{name}/v1", key
        finally:
            del self._opened[name]
            for task in list(opened.running):
                task.cancel()

    async def aclose(self) -> None:
        """Stop the server."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._task}, timeout=5.0)
            self._task.cancel()

    def take_late(self) -> int:
        """How many requests came after the end of their session since this was called last."""
        number, self._num_late = self._num_late, 0
        return number

    def _start(self) -> None:
        listener = listening_socket(HOST, backlog=4096)
        self._url = base_url(HOST, listener.getsockname()[1])
        routes = [
            Route("/sessions/{name}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/sessions/{name}/v1/models", self._models),
            Route("/sessions/{name}/v1/models/{model}", self._models),
        ]
        app = Front(Starlette(routes=routes), refusal=_refusal, max_body_bytes=MAX_BODY_BYTES, allows=self._has_key)
        self._server = http_server(app)
        self._server.capture_signals = nullcontext  # they are the worker's
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    def _has_key(self, scope: Scope) -> bool:
        opened = self._opened.get(_name_in(scope["path"]))
        if opened is None:
            return True  # answered with 410
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + opened.key.encode())

    async def _chat(self, request: Request) -> Response:
        if (opened := self._opened.get(request.path_params["name"])) is None:
            return self._late()
        raw = await request.body()
        try:
            body = read_json(raw)
            asked = dialect.read_request(body)
        except (JSONError, BufferRLError) as error:
            return _error(str(error), 400, "invalid_request")
        self._notice(dialect.ignored(body, opened.session.params))
        digest = hashlib.sha256(raw).digest()
        is_repeated = request.headers.get(REPEATED, "0") not in ("", "0")
        if not is_repeated or digest not in opened.asked:
            opened.ask(digest, asked)
        task = opened.asked[digest]
        await asyncio.wait({task}, timeout=KEEP_ALIVE_S if asked.stream else None)
        if not task.done():
            return _stream(self._late_events(task, asked))
        if (refused := _refused(task)) is not None:
            return refused
        if asked.stream:
            return _stream(_events(dialect.events(task.result(), asked, self._tokenizer)))
        return _json(dialect.completion(task.result(), asked, self._tokenizer))

    async def _late_events(
        self, task: asyncio.Task[list[Exchange]], asked: dialect.ChatRequest
    ) -> AsyncIterator[bytes]:
        while not task.done():
            yield b": keep-alive\n\n"
            await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
        if (refused := _refused(task)) is not None:
            yield b"data: " + bytes(refused.body) + b"\n\n"
            return
        async for event in _events(dialect.events(task.result(), asked, self._tokenizer)):
            yield event

    async def _models(self, request: Request) -> Response:
        if request.path_params["name"] not in self._opened:
            return self._late()
        return _json(dialect.model() if "model" in request.path_params else dialect.models())

    def _late(self) -> Response:
        self._num_late += 1
        return _error("the session has ended", 410, "session_ended")

    def _notice(self, ignored: dict[str, Any]) -> None:
        for name, value in ignored.items():
            if name not in self._noticed:
                self._noticed.add(name)
                _log.warning("an agent's %s=%r is ignored: sampling is the run's", name, value)


async def _answers(session: Session, asked: dialect.ChatRequest) -> list[Exchange]:
    def answer() -> Coroutine[Any, Any, Exchange]:
        return session.chat(asked.messages, asked.tools, max_tokens=asked.max_tokens, stop=asked.stop)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer()) for _ in range(asked.num_answers)]
    return [task.result() for task in tasks]


def _refused(task: asyncio.Task[list[Exchange]]) -> Response | None:
    """The answer to a request that failed; None for one that did not."""
    if task.cancelled():
        return _error("the session has ended", 410, "session_ended")
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return None
    if isinstance(error, SessionEndedError):
        return _error(str(error), 410, "session_ended")
    if isinstance(error, TooLongError):
        return _error(error.what, 400, "context_length_exceeded")
    if isinstance(error, BufferRLError) and not isinstance(error, EngineError):
        return _error(str(error), 400, "invalid_request")
    if not isinstance(error, EngineError):
        _log.error("a request of an agent failed", exc_info=error)
    refusal = _error(f"{type(error).__name__}: {error}", 502, "engine_failed", kind="server_error")
    refusal.headers["x-should-retry"] = "false"
    return refusal


async def _events(events: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    for event in events:
        yield b"data: " + orjson.dumps(event) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error(what: str, status: int, code: str, *, kind: str = "invalid_request_error") -> Response:
    return _json(dialect.error_body(what, code, kind=kind), status)


def _refusal(_: Scope, status: int, what: str) -> Response:
    return _error(what, status, "invalid_api_key" if status == 401 else "invalid_request")


def _name_in(path: str) -> str:
    parts = path.split("/", 3)
    return parts[2] if len(parts) > 2 and parts[1] == "sessions" else ""
