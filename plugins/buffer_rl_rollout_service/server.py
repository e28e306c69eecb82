"""The routes of the service: JSON in, JSON out, a bearer token for everything but ``/health``.

POST /write   a trajectory (``Trajectory``); ``/buffer/write`` is the same, as agents of slime call it
POST /read    lease groups (``ReadRequest``); waits up to ``wait_s`` for the first one
POST /ack     end leases (``AckRequest``)
GET  /peek    ``?num_groups=N``: what a reader would get next; nothing changes
GET  /stats   counts of groups and trajectories; ``/`` shows them as a page
GET  /health  200 while the store answers

An error is ``{"error": {"what", "where", "expected", "hint"}}`` with the status that fits: 400 no JSON, 401 no token,
408 the body did not come, 409 not the reader's group, 413 too large, 422 a wrong field, 429 full, 503 try again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from buffer_rl.data.json_text import JSONError, read_json
from buffer_rl.engines.http_server import Front, json_response
from buffer_rl.errors import BufferStateError
from buffer_rl_rollout_service.page import render_page
from buffer_rl_rollout_service.store import MAX_GROUPS, FullError, Store, StoredGroup
from buffer_rl_rollout_service.trajectory import Id, Trajectory, Version

STORE_TIMEOUT_S = 30.0
TICK_S = 1.0
MAX_WAIT_S = 60.0
MAX_HELD = 64 * MAX_GROUPS
_LOG = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
Count = Annotated[int, Field(ge=0, lt=2**53)]


class ReadRequest(BaseModel):
    """See ``Store.read``. reader: any name. weight_version: the newest one that the reader has published."""

    reader: Id
    weight_version: Version | None = None
    num_groups: int = Field(default=1, ge=1, le=MAX_GROUPS)
    position: Count | None = None
    again_from: Count | None = None
    keep_from: Count = 0
    have: list[Count] = Field(default_factory=list, max_length=MAX_HELD)
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)


class AckRequest(BaseModel):
    """See ``Store.acknowledge``. delivered: numbers of groups; dropped: reasons by number."""

    reader: Id
    delivered: list[Count] = Field(default_factory=list, max_length=MAX_GROUPS)
    dropped: dict[Count, Annotated[str, Field(max_length=256)]] = Field(default_factory=dict, max_length=MAX_GROUPS)


def refusal(status: int, what: str, *, where: str = "", expected: str = "", hint: str = "") -> Response:
    """An error as the answer to a request."""
    error = {"what": what, "where": where, "expected": expected, "hint": hint}
    return json_response({"error": {name: text for name, text in error.items() if text}}, status)


class Service:
    """The store behind HTTP. token: what callers must send. The store's calls run one after another in a thread."""

    def __init__(self, store: Store, token: str, *, max_body_bytes: int) -> None:
        self._store = store
        self._token = token.encode()
        self._max_body_bytes = max_body_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._ready = asyncio.Condition()
        self._weight_version: int | None = None  # that a reader published, so that agents know how far they lag

    def app(self) -> Front:
        """The application; the end of its lifespan closes the store."""
        table: list[tuple[str, Any, str]] = [
            ("/write", self._write, "POST"),
            ("/buffer/write", self._write, "POST"),
            ("/read", self._read, "POST"),
            ("/ack", self._acknowledge, "POST"),
            ("/peek", self._peek, "GET"),
            ("/stats", self._stats, "GET"),
            ("/health", self._health, "GET"),
            ("/", self._page, "GET"),
        ]
        errors: Any = (HTTPException, ValidationError, JSONError, BufferStateError, sqlite3.Error, TimeoutError)
        app = Starlette(
            routes=[Route(path, endpoint, methods=[method]) for path, endpoint, method in table],
            exception_handlers=dict.fromkeys(errors, self._answer_error),
            lifespan=self._background,
        )
        app.router.redirect_slashes = False
        return Front(app, refusal=self._refusal, max_body_bytes=self._max_body_bytes, allows=self._is_authorized)

    @contextlib.asynccontextmanager
    async def _background(self, _: Starlette) -> AsyncIterator[None]:
        ticking = asyncio.create_task(self._tick())
        yield
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)

    async def _tick(self) -> None:
        """Ends what is overdue also while no request comes."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._call(self._store.expire)
            except (sqlite3.Error, TimeoutError) as error:
                _LOG.error("the store failed: %s", error)
            await self._wake_readers()

    async def _wake_readers(self) -> None:
        async with self._ready:
            self._ready.notify_all()

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            work = partial(function, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _write(self, request: Request) -> Response:
        given = await self._body(request, Trajectory)
        body = orjson.dumps(given.model_dump(exclude_unset=True))
        written = await self._call(self._store.write, given.instance_id, given.uid, given.reward, body)
        if written.complete:
            await self._wake_readers()
        return json_response({"success": True, **asdict(written), "weight_version": self._weight_version})

    async def _read(self, request: Request) -> Response:
        asked = await self._body(request, ReadRequest)
        if asked.weight_version is not None:
            self._weight_version = asked.weight_version
        loop = asyncio.get_running_loop()
        deadline = loop.time() + asked.wait_s
        place = asked.model_dump(include={"position", "again_from", "keep_from", "have"})
        while True:
            groups = await self._call(self._store.read, asked.reader, asked.num_groups, **place)
            left = deadline - loop.time()
            if groups or left <= 0:
                return json_response({"store": self._store.store_id, "groups": [_as_json(group) for group in groups]})
            async with self._ready:  # a group that is ready by now is seen at the next tick
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ready.wait(), min(left, 2 * TICK_S))

    async def _acknowledge(self, request: Request) -> Response:
        asked = await self._body(request, AckRequest)
        await self._call(self._store.acknowledge, asked.reader, asked.delivered, asked.dropped)
        return json_response({"delivered": len(asked.delivered), "dropped": len(asked.dropped)})

    async def _peek(self, request: Request) -> Response:
        given = request.query_params.get("num_groups", "1")
        if not re.fullmatch("[1-9][0-9]{0,3}", given) or int(given) > MAX_GROUPS:
            return refusal(422, f"num_groups is {given!r:.40}", where="GET /peek", expected=f"1 to {MAX_GROUPS}")
        groups = await self._call(self._store.peek, int(given))
        return json_response({"groups": [_as_json(group) for group in groups]})

    async def _stats(self, request: Request) -> Response:
        return json_response({**await self._call(self._store.statistics), "weight_version": self._weight_version})

    async def _health(self, request: Request) -> Response:
        await self._call(self._store.expire)
        return json_response({"status": "ok"})

    async def _page(self, request: Request) -> Response:
        statistics = await self._call(self._store.statistics)
        history = await self._call(self._store.history)
        page, policy = render_page(statistics, history)
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})

    async def _body(self, request: Request, model: type[M]) -> M:
        """The request's body. What it raises is answered by ``_answer_error``."""
        return model.model_validate(read_json(await request.body()))

    def _is_authorized(self, scope: Scope) -> bool:
        if scope["path"] == "/health":
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, secret = given.partition(b" ")
        if scheme.lower() == b"basic" and scope["path"] == "/":  # a browser asks its user for a password
            try:
                secret = base64.b64decode(secret.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(secret.strip(), self._token)

    def _refusal(self, scope: Scope, status: int, what: str) -> Response:
        where = _where(scope)
        if status == 413:
            most = f"at most {self._max_body_bytes} bytes (--max-body-mib)"
            return refusal(status, "the body is too large", where=where, expected=most)
        if status != 401:
            return refusal(status, what, where=where)
        expected = "the header Authorization: Bearer TOKEN"
        hint = "the service prints at its start which file has the token"
        answer = refusal(status, "the token is missing or wrong", where=where, expected=expected, hint=hint)
        answer.headers["WWW-Authenticate"] = 'Basic realm="rollout service"' if scope["path"] == "/" else "Bearer"
        return answer

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        where = _where(request.scope)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])[:200] or "the body"
            expected = "the fields of plugins/buffer_rl_rollout_service/README.md"
            return refusal(422, f"{field}: {first['msg']}", where=where, expected=expected)
        if isinstance(error, JSONError):
            if error.is_deep:
                return refusal(422, f"the body is nested too deeply: {error}", where=where, expected="fewer levels")
            return refusal(400, f"the body is no JSON: {error}", where=where, expected="a JSON object")
        if isinstance(error, BufferStateError):
            status = 429 if isinstance(error, FullError) else 409
            answer = refusal(status, error.what, where=error.where, expected=error.expected, hint=error.hint)
            if status == 429:
                answer.headers["Retry-After"] = "5"
            return answer
        if isinstance(error, HTTPException):  # 404, 405
            return refusal(error.status_code, error.detail, where=where, expected="a route of the service")
        _LOG.error("%s: the store failed: %s: %s", where, type(error).__name__, error)
        hint = "send it again: what was written under a uid is not counted twice"
        return refusal(503, f"the store failed: {error or 'it did not answer'}", where=where, hint=hint)


def _where(scope: Scope) -> str:
    return f"{scope['method']} {scope['path']}"[:200]


def _as_json(group: StoredGroup) -> dict[str, Any]:
    return {
        "group": group.number,
        "instance_id": group.instance_id,
        "partial": group.partial,
        "items": [orjson.Fragment(body) for body in group.bodies],
    }
