"""``/generate`` as a bare ASGI application."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from buffer_rl.embedded.protocol import BadRequestError, GenerateCall
from buffer_rl.embedded.service import EngineService
from buffer_rl.engines.http_server import JSONError, read_json
from buffer_rl.errors import EngineError

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class GenerateRoute:
    """It is called hundreds of times a rollout step, and it has to notice a client that went away, whose requests are
    then aborted."""

    def __init__(self, service: EngineService) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        task = asyncio.current_task()
        assert task is not None
        try:
            call = await self.service.begin(read_json(body), task.cancel)
        except JSONError as error:
            return await _send(send, 400, {"error": {"message": f"the body is not JSON: {error}"}})
        except BadRequestError as error:
            return await _send(send, 400, {"error": {"message": str(error)}})
        except EngineError as error:
            return await _send(send, 503, {"error": {"message": str(error)}})
        if call.stream:
            return await self._stream(call, receive, send)
        try:
            await receive()  # a client that goes away is the only message to come; the end of the rows cancels this
        except asyncio.CancelledError:
            if not call.done or task.uncancel():
                raise
        finally:
            call.on_done = None
        if not call.done:
            return self.service.drop(call)
        if call.failure:
            return await _send(send, 500, {"error": {"message": call.failure}})
        rows = self.service.answers(call)
        return await _send(send, 200, rows if call.as_list else rows[0])

    async def _stream(self, call: GenerateCall, receive: Receive, send: Send) -> None:
        """Server-sent events; each has all text and tokens of one row so far."""
        stream = self.service.watch(call)
        gone = asyncio.ensure_future(receive())
        gone.add_done_callback(lambda _: stream.close())
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        texts = [""] * len(call.requests)
        try:
            async for piece in stream.pieces():
                texts[piece.row] += piece.text
                event = self.service.row_so_far(call, piece, texts[piece.row])
                await send(_event(orjson.dumps({**event, "index": piece.row})))
            if call.failure:
                await send(_event(orjson.dumps({"error": {"message": call.failure}})))
            await send(_event(b"[DONE]"))
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self.service.unwatch(stream)
            self.service.drop(call)


def _event(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}


async def _send(send: Send, status: int, content: Any) -> None:
    body = orjson.dumps(content)
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
