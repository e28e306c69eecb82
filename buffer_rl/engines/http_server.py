"""The limits of an HTTP server of the project for its clients: the embedded engine's and the rollout service's.

uvicorn bounds the time between two requests of a connection. It has no deadline for the first request, nor for the
rest of one, and no bound on the size of headers and bodies: ``_Connection`` and ``Front`` add these.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import FrameType
from typing import Any

import orjson
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
HEADER_TIMEOUT_S = 60.0
"""From a connection, or the first byte of a request, to the end of the request's headers."""
BODY_TIMEOUT_S = 60.0
"""From the end of the headers to the end of the body."""
KEEP_ALIVE_S = 120
MAX_IDLE_CONNECTIONS = 512
"""Connections without a request under way; beyond them the one that is idle longest is closed. Many systems let a
process have 1,024 files open, and connections with requests need some."""
LINGER_S = 5.0
"""In which the rest of a refused body is thrown away, so that its sender gets to read the answer."""

Refusal = Callable[[Scope, int, str], Response]
"""``(scope, status, what is wrong) -> answer``, in the words of one server."""


def json_response(content: Any, status: int = 200) -> Response:
    """JSON by orjson; numbers that are not finite become null."""
    return Response(orjson.dumps(content), status, media_type="application/json")


@dataclass(eq=False)
class Front:
    """What sees each request first: it refuses those without a key, and hands on others with their whole body.

    allows: whether a request has what it needs; its body is not read before. max_body_bytes: of one body."""

    _app: ASGIApp
    _: KW_ONLY
    refusal: Refusal
    max_body_bytes: int
    allows: Callable[[Scope], bool] = lambda _: True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if not self.allows(scope):
            return await self._refuse(401, "the key is missing or wrong", scope, receive, send)
        sizes = [int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
        too_large = f"the body is larger than {self.max_body_bytes} bytes"
        if max(sizes, default=0) > self.max_body_bytes:
            return await self._refuse(413, too_large, scope, receive, send)
        parts: list[bytes] = []
        num_bytes, more = 0, True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None  # the client is gone
                    parts.append(message.get("body", b""))
                    num_bytes, more = num_bytes + len(parts[-1]), message.get("more_body", False)
                    if num_bytes > self.max_body_bytes:
                        break
        except TimeoutError:
            return await self._refuse(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", scope, receive, send)
        if num_bytes > self.max_body_bytes:
            return await self._refuse(413, too_large, scope, receive, send, more=more)
        whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
        parts.clear()

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        return await self._app(scope, receive_whole, send)

    async def _refuse(
        self, status: int, what: str, scope: Scope, receive: Receive, send: Send, *, more: bool = True
    ) -> None:
        response = self.refusal(scope, status, what)
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while more:
                    more = (await receive()).get("more_body", False)  # not of a disconnect
        await send({"type": "http.response.body", "body": b""})


class _Connection(HttpToolsProtocol):
    """uvicorn's connection with a bound on its headers and their time, and one on how many are idle.

    idle: those without a request under way, of this server, longest first."""

    def __init__(self, *args: Any, idle: dict[_Connection, None], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._idle = idle
        self._is_in_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        self._becomes_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers and not self._is_busy:
            self._expect_headers()
        self._header_bytes += len(data)  # what is none of them sets it to 0
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._end("431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        self._idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_headers = True
        self._header_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy and not self.transport.is_closing():
            self._becomes_idle()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # an unread answer would keep it open

    def _becomes_idle(self) -> None:
        self._idle.pop(self, None)
        self._idle[self] = None
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            next(iter(self._idle))._end()

    def _expect_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._end, "408 Request Timeout")

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end(self, status: str = "") -> None:
        """Close the connection, with ``status`` as the answer if a request has begun and none is being answered."""
        self._idle.pop(self, None)
        self._stop_timer()
        if status and self._header_bytes and not self._is_busy:
            self.transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
            self.transport.close()
        else:
            self.transport.abort()


class _Server(uvicorn.Server):
    """A server that does not handle signals that its caller ignores, as SIGINT in a script's background jobs."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ignored = {number for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        if sig not in self._ignored:
            super().handle_exit(sig, frame)


def http_server(app: ASGIApp) -> uvicorn.Server:
    """A server of ``app``, which is behind a ``Front``; run it with its listening socket."""
    idle: dict[_Connection, None] = {}
    connection: Any = partial(_Connection, idle=idle)
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        access_log=False,
        proxy_headers=False,
        log_level="error",  # the router's HTTP/2 probe is a warning a second otherwise
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        backlog=4096,
    )
    return _Server(config)
