"""An application behind the HTTP server that the project's own run in, in the event loop of a test."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from buffer_rl.engines.http_server import http_server


@asynccontextmanager
async def serving_app(app: ASGIApp) -> AsyncIterator[str]:
    """The address of ``app``, on a free port of 127.0.0.1; it has ended at the end."""
    server = http_server(app)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await server.startup(sockets=[listener])
    try:
        yield url
    finally:
        await server.shutdown(sockets=[listener])
