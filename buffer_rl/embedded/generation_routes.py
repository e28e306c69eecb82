"""The routes that generate: ``/generate`` as a bare ASGI application, and OpenAI's, with server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from buffer_rl.data.json_text import JSONError, read_json
from buffer_rl.embedded.protocol import GenerateCall, meta_info
from buffer_rl.embedded.service import EngineService
from buffer_rl.embedded.streams import Piece, Stream
from buffer_rl.engines import openai
from buffer_rl.engines.http_server import json_response
from buffer_rl.engines.protocol import BadRequestError
from buffer_rl.errors import EngineError

_JSON = [(b"content-type", b"application/json")]
_EVENTS = "text/event-stream"
_DONE = b"data: [DONE]\n\n"


class GenerateRoute:
    """It is called hundreds of times a rollout step, and it has to notice a client that went away, whose requests are
    then aborted."""

    def __init__(self, service: EngineService) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]  # as a whole, as ``Front`` hands it on
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
            with self.service.streamed(call) as stream:
                return await StreamingResponse(self._events(call, stream), media_type=_EVENTS)(scope, receive, send)
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

    async def _events(self, call: GenerateCall, stream: Stream) -> AsyncIterator[bytes]:
        """Each has all text and tokens of one row so far."""
        texts = [""] * len(call.requests)
        async for piece in stream.pieces():
            texts[piece.row] += piece.text
            yield _event({**self.service.row_so_far(call, piece, texts[piece.row]), "index": piece.row})
        if call.failure:
            yield _event({"error": {"message": call.failure}})
        yield _DONE


async def _send(send: Send, status: int, content: Any) -> None:
    body = orjson.dumps(content)
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class OpenAIRoutes:
    """``/v1/chat/completions``, ``/v1/completions``, ``/v1/models``. A client's going away aborts its request."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.model = service.model.options.model_path

    async def models(self, _: HttpRequest) -> Response:
        return json_response(openai.model_list(self.model, self.service.limits.context_length))

    async def chat(self, request: HttpRequest) -> Response:
        limit, tokenizer = self.service.limits.longest_sequence, self.service.codec.tokenizer
        return await self._answer(request, lambda body: openai.read_chat(body, tokenizer, limit, self.model))

    async def completions(self, request: HttpRequest) -> Response:
        tokenizer = self.service.codec.tokenizer
        return await self._answer(request, lambda body: openai.read_completion(body, tokenizer, self.model))

    async def _answer(self, request: HttpRequest, read: Any) -> Response:
        done = asyncio.Event()
        try:
            body = read_json(await request.body())
            generate, reply = await self.service.aside(lambda: read(body))  # a template takes its time
            call = await self.service.begin(generate, done.set)
        except (BadRequestError, JSONError) as error:
            return json_response(openai.error_body(str(error), code=getattr(error, "code", None)), 400)
        except EngineError as error:
            return json_response(openai.error_body(str(error), 503), 503)
        if reply.stream:
            return StreamingResponse(self._events(call, reply), media_type=_EVENTS)
        if not await _done_before_disconnect(done, request):
            self.service.drop(call)
            return Response(status_code=499)  # nothing reads it
        if call.failure:
            return json_response(openai.error_body(call.failure, 500), 500)
        n = call.requests[0].params.n
        prompts = [list(row.prompt_ids) for row in call.requests]
        return json_response(openai.response(self.service.answers(call), prompts, n, reply))  # type: ignore[arg-type]

    async def _events(self, call: GenerateCall, reply: openai.Reply) -> AsyncIterator[bytes]:
        with self.service.streamed(call) as stream:
            for index, request in enumerate(call.requests):
                yield _event(openai.opening(index, request.prompt_ids, reply))
            async for piece in stream.pieces():
                if piece.end > piece.start or piece.text:
                    meta, ids = self._part(call, piece)
                    yield _event(openai.chunk(piece.row, piece.text, ids, meta, reply))
                if piece.done:
                    yield _event(openai.closing(piece.row, self._meta(call, piece.row), reply))
            if call.failure:
                yield _event({"error": openai.error_body(call.failure, 500)})
            elif reply.usage_in_stream:
                rows = [{"meta_info": self._meta(call, row)} for row in range(len(call.requests))]
                used = openai.usage(rows, call.requests[0].params.n)
                yield _event(openai.chunk_of([], reply, usage=used))
            yield _DONE

    def _meta(self, call: GenerateCall, row: int) -> dict[str, Any]:
        return meta_info(call.requests[row], self.service.scheduler.version, call.return_logprob[row], False)

    def _part(self, call: GenerateCall, piece: Piece) -> tuple[dict[str, Any], list[int]]:
        """``meta_info`` with the log-probabilities of the tokens of ``piece``, and these tokens."""
        request, part = call.requests[piece.row], slice(piece.start, piece.end)
        ids = request.output_ids[part]
        entries = [[value, token, None] for value, token in zip(request.log_probs[part], ids, strict=True)]
        meta: dict[str, Any] = {"output_token_logprobs": entries}
        if request.details is not None and request.details.top:
            tops = request.details.output_top[part]
            meta["output_top_logprobs"] = [[[value, token, None] for value, token in top] for top in tops]
        return meta, ids


async def _done_before_disconnect(done: asyncio.Event, request: HttpRequest) -> bool:
    """Whether ``done`` is set before the client goes away, which is the only message to come."""
    waits = [asyncio.ensure_future(done.wait()), asyncio.ensure_future(request.receive())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
    return done.is_set()


def _event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
