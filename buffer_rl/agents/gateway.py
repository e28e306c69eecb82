"""The HTTP server of a rollout worker's sessions: an endpoint in each dialect for each, on the loopback interface.

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
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from buffer_rl.agents import chat_dialect, messages_dialect, responses_dialect
from buffer_rl.agents.dialect import (
    ENDED,
    MODEL,
    Dialect,
    Refusal,
    Request,
    frame,
    ignored,
    innermost,
    refusal_of,
    unknown_repeat,
)
from buffer_rl.agents.finish import Finish
from buffer_rl.agents.session import Exchange, Session, SessionEndedError, TurnOptions, UnknownRepeatError
from buffer_rl.cluster.process import base_url, listening_socket
from buffer_rl.data.json_text import JSONError, read_json
from buffer_rl.engines.http_server import Front, http_server, json_response
from buffer_rl.errors import BufferRLError, DataError

if TYPE_CHECKING:
    from buffer_rl.agents.remote import Leases

DIALECTS = (chat_dialect.DIALECT, messages_dialect.DIALECT, responses_dialect.DIALECT)
_log = logging.getLogger(__name__)
HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
MOST_FINISHED = 1024
"""Sessions whose end is remembered, for an agent that tells it again."""
_KEY_HEADERS = (b"authorization", b"x-api-key")
KEEP_ALIVE_S = 15.0
"""Between the comments of a stream whose answer is not there yet."""
REPEATED = "x-stainless-retry-count"
"""The header by which OpenAI's clients, and Anthropic's, count the repetitions of a request."""
CALL = "x-buffer-rl-call"
"""The header by which a request is named (``call`` of ``Session.generate``)."""
TRAIN = "x-buffer-rl-train"
"""The header that says ``false`` of a request whose answer is not trained (``train`` of ``Session.generate``)."""
TRAIN_VALUES = {"true": True, "false": False}
Answering = asyncio.Task[list[Exchange]]


@dataclass(slots=True, kw_only=True)
class _Opened:
    """asked: by the digest of their bodies, the requests in their order. running: all requests without an answer."""

    session: Session
    key: str
    asked: defaultdict[bytes, list[Answering]] = field(default_factory=lambda: defaultdict(list))
    running: set[Answering] = field(default_factory=set)

    def answering(self, request: bytes, asked: Request, headers: Mapping[str, str]) -> Answering | None:
        """What answers ``request``, a path and a body. A repeat, marked as one, is answered by what runs, or by the
        only one that was answered; None if several were. What this process does not know may be in the journal. A
        request with a name of its own is never unknown: it is asked under its name."""
        call, train = headers.get(CALL, ""), TRAIN_VALUES[headers.get(TRAIN, "true")]
        same = [] if call else self.asked[hashlib.sha256(request).digest()]
        is_repeat = headers.get(REPEATED, "0") not in ("", "0") and not call
        if is_repeat and same:
            running = [task for task in same if not task.done()]
            return running[0] if len(running) == 1 else same[0] if len(same) == 1 else None
        task = asyncio.get_running_loop().create_task(_answers(self.session, asked, call, train=train, known=is_repeat))
        same.append(task)
        self.running.add(task)

        def done(task: Answering) -> None:
            self.running.discard(task)
            # Asking for its error has asyncio not log it if the client is gone.
            if not task.cancelled() and isinstance(innermost(task.exception()), UnknownRepeatError):
                same.remove(task)  # it was never asked

        task.add_done_callback(done)
        return task


class Gateway:
    """The server, which starts with the first session. Belongs to the worker's event loop."""

    def __init__(self, tokenizer: Any, *, host: str = HOST, port: int = 0, leases: Leases | None = None) -> None:
        self._host, self._port, self._leases = host, port, leases
        self._finished: dict[str, tuple[str, Finish]] = {}
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
            if session.reported is not None:
                self._remember(name, key, session.reported)
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
        listener = listening_socket(self._host, self._port, backlog=4096, where="--agent-host and --agent-port")
        port = listener.getsockname()[1]
        self._url = base_url(self._host, port)
        if self._leases is not None:
            self._leases.listens(self._host, port)
        routes = [
            *(self._leases.lease_routes() if self._leases is not None else ()),
            Route("/sessions/{name}/finish", self._finish, methods=["POST"]),
            Route("/sessions/{name}/v1/finish", self._finish, methods=["POST"]),
            *(Route(_path(each), partial(self._asked, each), methods=["POST"]) for each in DIALECTS),
            Route(_path(messages_dialect.DIALECT) + "/count_tokens", self._count, methods=["POST"]),
            Route("/sessions/{name}/v1/models", self._models),
            Route("/sessions/{name}/v1/models/{model}", self._models),
        ]
        app = Front(Starlette(routes=routes), refusal=_refusal, max_body_bytes=MAX_BODY_BYTES, allows=self._has_key)
        self._server = http_server(app)
        self._server.capture_signals = nullcontext  # they are the worker's
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    def _has_key(self, scope: Scope) -> bool:
        name = _name_in(scope["path"])
        given = [value for header, value in scope["headers"] if header in _KEY_HEADERS]
        keys = [value.removeprefix(b"Bearer ").strip() for value in given]
        if not name and self._leases is not None:
            return any(self._leases.allows(b"Bearer " + key) for key in keys)
        opened, (key, _) = self._opened.get(name), self._finished.get(name, ("", None))
        if opened is not None:
            key = opened.key
        # Without a key, it is answered with 410.
        return not key or any(hmac.compare_digest(each, key.encode()) for each in keys)

    async def _asked(self, dialect: Dialect, request: HTTPRequest) -> Response:
        if (opened := self._opened.get(request.path_params["name"])) is None:
            return self._late(dialect)
        raw = await request.body()
        try:
            asked = _read(dialect, raw, opened.session)
        except (JSONError, BufferRLError) as error:
            return _refused(dialect, Refusal(what=str(error)))
        if (train := request.headers.get(TRAIN, "true")) not in TRAIN_VALUES:
            return _refused(dialect, Refusal(what=f"the header {TRAIN} is {train!r:.40}; expected: true or false"))
        self._notice(opened.session, asked)
        if (task := opened.answering(dialect.path.encode() + raw, asked, request.headers)) is None:
            return _refused(dialect, unknown_repeat("several such requests were answered"))
        await asyncio.wait({task}, timeout=KEEP_ALIVE_S if asked.stream else None)
        if asked.stream and not (task.done() and _failure(task)):
            return StreamingResponse(self._events(dialect, asked, task), media_type="text/event-stream")
        if refusal := _failure(task):
            return _refused(dialect, refusal)
        return json_response(dialect.whole(task.result(), asked, self._tokenizer))

    async def _events(self, dialect: Dialect, asked: Request, task: Answering) -> AsyncIterator[bytes]:
        while not task.done():
            yield dialect.keep_alive
            await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
        if refusal := _failure(task):
            yield frame(dialect.error(refusal))
            return
        for event in dialect.events(task.result(), asked, self._tokenizer):
            yield frame(event)
        yield dialect.done

    async def _count(self, request: HTTPRequest) -> Response:
        dialect = messages_dialect.DIALECT
        if (opened := self._opened.get(request.path_params["name"])) is None:
            return self._late(dialect)
        try:
            asked = _read(dialect, await request.body(), opened.session)
            return json_response({"input_tokens": opened.session.num_prompt_tokens(asked.messages, asked.tools)})
        except (JSONError, BufferRLError) as error:
            return _refused(dialect, Refusal(what=str(error)) if isinstance(error, JSONError) else refusal_of(error))

    async def _finish(self, request: HTTPRequest) -> Response:
        name, finish = request.path_params["name"], Finish.of_text(await request.body())
        opened, (_, known) = self._opened.get(name), self._finished.get(name, ("", None))
        if opened is not None:
            with suppress(SessionEndedError):
                known = opened.session.finish(finish)
        if known is None:
            return self._late(chat_dialect.DIALECT)
        if known != finish:
            what = "it has finished in another way before"
            return _refused(chat_dialect.DIALECT, Refusal(what=what, status=409, code="finished"))
        if known.fault:
            return _refused(chat_dialect.DIALECT, Refusal(what=known.fault))
        return json_response({"status": "finished"})

    def _remember(self, name: str, key: str, reported: Finish) -> None:
        """An agent that did not get the answer to its finish repeats it."""
        self._finished[name] = key, reported
        while len(self._finished) > MOST_FINISHED:
            del self._finished[next(iter(self._finished))]

    async def _models(self, request: HTTPRequest) -> Response:
        if request.path_params["name"] not in self._opened:
            return self._late(chat_dialect.DIALECT)
        created = int(time.time())
        model = {"id": MODEL, "object": "model", "created": created, "owned_by": "buffer_rl"}
        # Anthropic's form, too.
        model |= {"type": "model", "display_name": MODEL, "lifecycle": "active", "created_at": "1970-01-01T00:00:00Z"}
        if "model" in request.path_params:
            return json_response(model)
        ends = {"first_id": MODEL, "last_id": MODEL}
        return json_response({"object": "list", "data": [model], "has_more": False, **ends})

    def _late(self, dialect: Dialect) -> Response:
        self._num_late += 1
        return _refused(dialect, ENDED)

    def _notice(self, session: Session, asked: Request) -> None:
        for name, value in ignored(asked.body, session.params).items():
            self._warn(name, "an agent's %s=%r is ignored: sampling is the run's", name, value)
        for name in asked.left_out:
            self._warn(name, "an agent's %s is ignored: the model can use functions alone", name)

    def _warn(self, name: str, what: str, *values: Any) -> None:
        if name not in self._noticed:
            self._noticed.add(name)
            _log.warning(what, *values)


async def _answers(session: Session, asked: Request, call: str, *, train: bool, known: bool) -> list[Exchange]:
    def answer(number: int) -> Coroutine[Any, Any, Exchange]:
        name = f"{call}#{number}" if call and number else call  # siblings are turns of their own
        options = TurnOptions(max_tokens=asked.max_tokens, stop=asked.stop, call=name, train=train)
        return session.chat(asked.messages, asked.tools, known=known, **options)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(number)) for number in range(asked.num_answers)]
    return [task.result() for task in tasks]


def _failure(task: Answering) -> Refusal | None:
    """The answer to a request that failed; None for one that did not."""
    if task.cancelled():
        return ENDED
    return None if task.exception() is None else refusal_of(task.exception())


def _read(dialect: Dialect, raw: bytes, session: Session) -> Request:
    body = read_json(raw)
    if not isinstance(body, dict):
        raise DataError("the body must be a JSON object")
    return dialect.read(body, session.exchanges)


def _refused(dialect: Dialect, refusal: Refusal) -> Response:
    answer = json_response(dialect.error(refusal), refusal.status)
    if refusal.status == 409 or refusal.status >= 500:
        answer.headers["x-should-retry"] = "false"
    return answer


def _refusal(scope: Scope, status: int, what: str) -> Response:
    code = "invalid_api_key" if status == 401 else "invalid_request"
    dialect = next((each for each in DIALECTS if each.path in scope["path"]), chat_dialect.DIALECT)
    return _refused(dialect, Refusal(what=what, status=status, code=code))


def _path(dialect: Dialect) -> str:
    return "/sessions/{name}/v1" + dialect.path


def _name_in(path: str) -> str:
    parts = path.split("/", 3)
    return parts[2] if len(parts) > 2 and parts[1] == "sessions" else ""
