"""An HTTP server for tests, in a thread of its own, that fails on order: at a request, or at a control call."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from aiohttp import web

from buffer_rl.errors import DeadlineError

START_TIMEOUT_S = 30.0
CONTROL_PATHS = (
    *("/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk"),
    *("/release_memory_occupation", "/resume_memory_occupation"),
)


class Fault(StrEnum):
    """What a request may meet in place of its answer."""

    SERVER_ERROR = "server_error"  # HTTP 500
    RESET = "reset"  # the connection is closed without an answer
    GARBAGE = "garbage"  # HTTP 200 with a body that is not JSON
    ABORT = "abort"  # HTTP 200, finish reason abort, no tokens
    KILL = "kill"  # the engine is gone with all its connections; see ``back_after_s``
    HANG = "hang"  # the engine accepts everything and answers nothing, as after SIGSTOP; see ``back_after_s``


class FaultPoint(StrEnum):
    """How far a request has come when it meets its fault."""

    ACCEPT = "accept"  # it was read, and nothing done about it
    MID_STREAM = "mid_stream"  # half of the answer is on its way; ``ABORT`` has no such point
    BEFORE_ACK = "before_ack"  # the answer is made, and nothing of it sent


@dataclass(kw_only=True, eq=False, repr=False)
class FaultyServer:
    """Serves ``routes()`` on 127.0.0.1. A context manager; ``url`` is known inside.

    point: where the faults of requests strike. control_fault: by path, what a control call (``CONTROL_PATHS``) meets in
    place of its effect. back_after_s: seconds until a killed or hung server is replaced at the same URL.
    """

    point: FaultPoint = FaultPoint.ACCEPT
    control_fault: Callable[[str], Fault | None] | None = None
    back_after_s: float = 0.2

    def __post_init__(self) -> None:
        self.url = ""
        self._hung = False
        self._returning: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S) or not self.url:
            raise DeadlineError("the fake engine did not start", where="FakeEngine")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)

    def routes(self) -> list[web.RouteDef]:
        """What it serves."""
        raise NotImplementedError

    def replaced(self) -> None:
        """Called in the server's thread when another server has taken its place: what this one had is gone."""

    def cut_connections(self) -> None:
        """Close all connections, as a router that is restarted does; the server lives. Callable from every thread."""
        self._loop.call_soon_threadsafe(self._cut)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._guarded])
        app.router.add_routes(self.routes())
        runner = self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._site = web.TCPSite(runner, "127.0.0.1", 0)
        await self._site.start()
        host, self._port = runner.addresses[0][:2]
        self.url = f"http://{host}:{self._port}"
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What happens to every request, before anything else looks at it."""
        if self._hung:
            await asyncio.Event().wait()  # until the connection is cut
        if request.path in CONTROL_PATHS and self.control_fault and (fault := self.control_fault(request.path)):
            return await self._effect(request, fault)
        answer = await handler(request)
        if self._hung:
            await asyncio.Event().wait()
        return answer

    async def _failed(self, request: web.Request, fault: Fault, make: Callable[[], web.Response]) -> web.StreamResponse:
        if self.point is FaultPoint.MID_STREAM:
            whole = json.dumps(json.loads(make().body or b"")).encode()  # type: ignore[arg-type]
            half = len(whole) // 2
            response = web.StreamResponse(status=500 if fault is Fault.SERVER_ERROR else 200)
            response.content_length = len(whole)
            await response.prepare(request)
            await response.write(whole[:half])
            if fault in (Fault.GARBAGE, Fault.SERVER_ERROR):
                await response.write(b"\0" * (len(whole) - half))
                return response
        elif self.point is FaultPoint.BEFORE_ACK:
            make()
        return await self._effect(request, fault)

    async def _effect(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault is Fault.SERVER_ERROR:
            return web.json_response({"error": {"message": "scripted failure"}}, status=500)
        if fault is Fault.GARBAGE:
            return web.Response(text="<html>not JSON", content_type="application/json")
        if fault in (Fault.KILL, Fault.HANG):
            await self._leave(fault)
        elif request.transport is not None:
            request.transport.abort()
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        return web.Response()

    async def _leave(self, fault: Fault, *, returns: bool = True) -> None:
        if fault is Fault.HANG:
            self._hung = True
        else:
            await self._site.stop()
            self._cut()
        if returns:
            self._returning = asyncio.create_task(self._return(fault))

    async def _return(self, fault: Fault) -> None:
        await asyncio.sleep(self.back_after_s)
        self._cut()
        self.replaced()
        self._hung = False
        if fault is Fault.KILL:
            self._site = web.TCPSite(self._runner, "127.0.0.1", self._port)
            await self._site.start()

    def _cut(self) -> None:
        server = self._runner.server
        for connection in list(server.connections) if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
