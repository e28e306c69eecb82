"""The routes of the service: JSON in, JSON out, a bearer token for everything but ``/health``.

POST /write   a trajectory (``trajectory.Trajectory``); ``/buffer/write`` is the same, as agents of slime call it
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
import hmac
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from buffer_rl.errors import BufferStateError
from buffer_rl_rollout_service.page import render_page
from buffer_rl_rollout_service.store import FullError, Store, StoredGroup
from buffer_rl_rollout_service.trajectory import Id, Trajectory

BODY_TIMEOUT_S = 60.0
STORE_TIMEOUT_S = 30.0
TICK_S = 1.0
MAX_WAIT_S = 60.0
MAX_GROUPS = 1024
_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
Count = Annotated[int, Field(ge=0, lt=2**53)]


class ReadRequest(BaseModel):
    """See ``Store.read``. reader: any name; one at a time may read under it."""

    reader: Id
    num_groups: int = Field(default=1, ge=1, le=MAX_GROUPS)
    position: Count | None = None
    keep_from: Count = 0
    have: list[Count] = Field(default_factory=list, max_length=MAX_GROUPS)
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)


class AckRequest(BaseModel):
    """See ``Store.acknowledge``. delivered: numbers of groups; dropped: reasons by number."""

    reader: Id
    delivered: list[Count] = Field(default_factory=list, max_length=MAX_GROUPS)
    dropped: dict[Count, Annotated[str, Field(max_length=256)]] = Field(default_factory=dict, max_length=MAX_GROUPS)


def refusal(status: int, what: str, *, where: str = "", expected: str = "", hint: str = "") -> web.Response:
    """An error as the answer to a request."""
    error = {"what": what, "where": where, "expected": expected, "hint": hint}
    return _json({"error": {name: text for name, text in error.items() if text}}, status)


class Service:
    """The store behind HTTP. token: what callers must send. The store's calls run one after another in a thread."""

    def __init__(self, store: Store, token: str, *, max_body_bytes: int) -> None:
        self._store = store
        self._token = token.encode()
        self._max_body_bytes = max_body_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._ready = asyncio.Condition()

    def app(self) -> web.Application:
        """The application; its clean-up closes the store."""
        app = web.Application(
            client_max_size=self._max_body_bytes, middlewares=[self._errors_as_json, self._require_token]
        )
        app.add_routes(
            [
                web.post("/write", self._write),
                web.post("/buffer/write", self._write),
                web.post("/read", self._read),
                web.post("/ack", self._acknowledge),
                web.get("/peek", self._peek),
                web.get("/stats", self._stats),
                web.get("/health", self._health),
                web.get("/", self._page),
            ]
        )
        app.cleanup_ctx.append(self._background)
        return app

    async def _background(self, app: web.Application) -> AsyncIterator[None]:
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

    async def _write(self, request: web.Request) -> web.Response:
        given = await self._body(request, Trajectory)
        body = orjson.dumps(given.model_dump(exclude_unset=True))
        written = await self._call(self._store.write, given.instance_id, given.uid, given.reward, body)
        if written.complete:
            await self._wake_readers()
        return _json(
            {
                "success": True,
                "group": written.group,
                "size": written.size,
                "complete": written.complete,
                "duplicate": written.duplicate,
            }
        )

    async def _read(self, request: web.Request) -> web.Response:
        asked = await self._body(request, ReadRequest)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + asked.wait_s
        while True:
            groups = await self._call(
                self._store.read,
                asked.reader,
                asked.num_groups,
                position=asked.position,
                keep_from=asked.keep_from,
                have=asked.have,
            )
            left = deadline - loop.time()
            if groups or left <= 0:
                return _json({"store": self._store.store_id, "groups": [_as_json(group) for group in groups]})
            async with self._ready:  # a group that is ready by now is seen at the next tick
                try:
                    await asyncio.wait_for(self._ready.wait(), min(left, 2 * TICK_S))
                except TimeoutError:
                    continue

    async def _acknowledge(self, request: web.Request) -> web.Response:
        asked = await self._body(request, AckRequest)
        await self._call(self._store.acknowledge, asked.reader, asked.delivered, asked.dropped)
        return _json({"delivered": len(asked.delivered), "dropped": len(asked.dropped)})

    async def _peek(self, request: web.Request) -> web.Response:
        given = request.query.get("num_groups", "1")
        if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= MAX_GROUPS:
            return refusal(422, f"num_groups is {given!r:.40}", where="GET /peek", expected=f"1 to {MAX_GROUPS}")
        groups = await self._call(self._store.peek, int(given))
        return _json({"groups": [_as_json(group) for group in groups]})

    async def _stats(self, request: web.Request) -> web.Response:
        return _json(await self._call(self._store.statistics))

    async def _health(self, request: web.Request) -> web.Response:
        await self._call(self._store.expire)
        return _json({"status": "ok"})

    async def _page(self, request: web.Request) -> web.Response:
        statistics = await self._call(self._store.statistics)
        history = await self._call(self._store.history)
        page, policy = render_page(statistics, history)
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def _body(self, request: web.Request, model: type[M]) -> M:
        """The request's body. What it raises is answered by ``_errors_as_json``."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                raw = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        return model.model_validate(orjson.loads(raw))

    @web.middleware
    async def _require_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health" and not self._is_authorized(request):
            scheme = 'Basic realm="rollout service"' if request.path == "/" else "Bearer"
            answer = refusal(
                401,
                "the token is missing or wrong",
                where=f"{request.method} {request.path}",
                expected="the header Authorization: Bearer TOKEN",
                hint="the service prints at its start which file has the token",
            )
            answer.headers["WWW-Authenticate"] = scheme
            return answer
        return await handler(request)

    def _is_authorized(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        secret = given.strip().encode(errors="replace")
        if scheme.lower() == "basic" and request.path == "/":  # a browser asks its user for a password
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(secret, self._token)

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        where = f"{request.method} {request.path}"[:200]
        try:
            return await handler(request)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "the body"
            return refusal(
                422, f"{field}: {first['msg']}", where=where, expected="the fields of docs/rollout_service.md"
            )
        except orjson.JSONDecodeError as error:
            return refusal(400, f"the body is no JSON: {error}", where=where, expected="a JSON object")
        except FullError as error:
            answer = refusal(429, error.what, where=error.where, expected=error.expected, hint=error.hint)
            answer.headers["Retry-After"] = "5"
            return answer
        except BufferStateError as error:
            return refusal(409, error.what, where=error.where, expected=error.expected)
        except web.HTTPRequestEntityTooLarge:
            most = f"at most {self._max_body_bytes} bytes (--max-body-mib)"
            return refusal(413, "the body is too large", where=where, expected=most)
        except web.HTTPException as error:  # 404, 405, 408
            return refusal(error.status, error.reason, where=where, expected="a route of the service, and its body")
        except (sqlite3.Error, TimeoutError) as error:
            _LOG.error("%s: the store failed: %s: %s", where, type(error).__name__, error)
            hint = "send it again: what was written under a uid is not counted twice"
            return refusal(503, f"the store failed: {error or 'it did not answer'}", where=where, hint=hint)


def _as_json(group: StoredGroup) -> dict[str, Any]:
    return {
        "group": group.number,
        "instance_id": group.instance_id,
        "partial": group.partial,
        "items": [orjson.Fragment(body) for body in group.bodies],
    }


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
