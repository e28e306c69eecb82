"""The HTTP server of a rollout worker's sessions: an OpenAI endpoint for each, on the loopback interface.

A request is asked once, whatever becomes of its connection: it runs on, and its answer is recorded. A client that
repeats the request, and says so as OpenAI's clients do, gets the answer if it is known which one that is; else 409,
which it does not repeat. After the end of its session it gets 410, which
clients do not repeat.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping
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
from buffer_rl.agents.session import Exchange, Session, SessionEndedError, TooLongError, UnknownRepeatError
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
CALL = "x-buffer-rl-call"
"""The header by which a request is named (``call`` of ``Session.generate``)."""
Answering = asyncio.Task[list[Exchange]]


@dataclass(slots=True, kw_only=True)
class _Opened:
    """asked: by the digest of their bodies, the requests in their order. running: all requests without an answer."""

    session: Session
    key: str
    asked: defaultdict[bytes, list[Answering]] = field(default_factory=lambda: defaultdict(list))
    running: set[Answering] = field(default_factory=set)

    def answering(self, raw: bytes, asked: dialect.ChatRequest, headers: Mapping[str, str]) -> Answering | None:
        """What answers the request with the body ``raw``. A repeat, marked as one, is answered by what runs, or by the
        only one that was answered; None if several were. What this process does not know may be in the journal. A
        request with a name of its own is never unknown: it is asked under its name."""
        call = headers.get(CALL, "")
        same = [] if call else self.asked[hashlib.sha256(raw).digest()]
        is_repeat = headers.get(REPEATED, "0") not in ("", "0") and not call
        if is_repeat and same:
            running = [task for task in same if not task.done()]
            return running[0] if len(running) == 1 else same[0] if len(same) == 1 else None
        task = asyncio.get_running_loop().create_task(_answers(self.session, asked, call, known=is_repeat))
        same.append(task)
        self.running.add(task)

        def done(task: Answering) -> None:
            self.running.discard(task)
            if not task.cancelled() and isinstance(_error_of(task), UnknownRepeatError):
                same.remove(task)  # it was never asked

        task.add_done_callback(done)
        return task


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
        if (task := opened.answering(raw, asked, request.headers)) is None:
            return _unknown("several such requests were answered")
        await asyncio.wait({task}, timeout=KEEP_ALIVE_S if asked.stream else None)
        if not task.done():
            return _stream(self._late_events(task, asked))
        if (refused := _refused(task)) is not None:
            return refused
        if asked.stream:
            return _stream(_events(dialect.events(task.result(), asked, self._tokenizer)))
        return _json(dialect.completion(task.result(), asked, self._tokenizer))

    async def _late_events(self, task: Answering, asked: dialect.ChatRequest) -> AsyncIterator[bytes]:
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


async def _answers(session: Session, asked: dialect.ChatRequest, call: str, *, known: bool) -> list[Exchange]:
    def answer(number: int) -> Coroutine[Any, Any, Exchange]:
        name = f"{call}#{number}" if call and number else call  # siblings are turns of their own
        bounds: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": asked.stop}
        return session.chat(asked.messages, asked.tools, **bounds, call=name, known=known)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(number)) for number in range(asked.num_answers)]
    return [task.result() for task in tasks]


def _error_of(task: Answering) -> BaseException | None:
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _unknown(what: str) -> Response:
    """The answer to a repeat that may be of any request, or of none."""
    response = _error(f"what the repeated request was answered is unknown: {what}", 409, "unknown_repeat")
    response.headers["x-should-retry"] = "false"
    return response


def _refused(task: Answering) -> Response | None:
    """The answer to a request that failed; None for one that did not."""
    if task.cancelled():
        return _error("the session has ended", 410, "session_ended")
    if (error := _error_of(task)) is None:
        return None
    if isinstance(error, UnknownRepeatError):
        return _unknown(error.what)
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
