"""OpenAI's routes over an ``EngineService``: whole answers, and streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from buffer_rl.embedded import openai
from buffer_rl.embedded.protocol import BadRequestError, GenerateCall, meta_info
from buffer_rl.embedded.service import EngineService
from buffer_rl.embedded.streams import Piece
from buffer_rl.engines.http_server import JSONError, read_json
from buffer_rl.errors import EngineError

_DONE = b"data: [DONE]\n\n"


class OpenAIRoutes:
    """``/v1/chat/completions``, ``/v1/completions``, ``/v1/models``. A client's going away aborts its request."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.model = service.model.options.model_path

    async def models(self, _: HttpRequest) -> Response:
        return _json(openai.model_list(self.model, self.service.limits.context_length))

    async def chat(self, request: HttpRequest) -> Response:
        limit = self.service.limits.longest_sequence
        return await self._answer(
            request, lambda body: openai.read_chat(body, self.service.codec.tokenizer, limit, self.model)
        )

    async def completions(self, request: HttpRequest) -> Response:
        return await self._answer(
            request, lambda body: openai.read_completion(body, self.service.codec.tokenizer, self.model)
        )

    async def _answer(self, request: HttpRequest, read: Any) -> Response:
        done = asyncio.Event()
        try:
            body = read_json(await request.body())
            generate, reply = await self.service.aside(lambda: read(body))  # a template takes its time
            call = await self.service.begin(generate, done.set)
        except (BadRequestError, JSONError) as error:
            return _json(openai.error_body(str(error)), 400)
        except EngineError as error:
            return _json(openai.error_body(str(error), 503), 503)
        if reply.stream:
            return StreamingResponse(self._events(call, reply), media_type="text/event-stream")
        if not await _done_before_disconnect(done, request):
            self.service.drop(call)
            return Response(status_code=499)  # nothing reads it
        if call.failure:
            return _json(openai.error_body(call.failure, 500), 500)
        n = call.requests[0].params.n
        prompts = [list(row.prompt_ids) for row in call.requests]
        return _json(openai.response(self.service.answers(call), prompts, n, reply))  # type: ignore[arg-type]

    async def _events(self, call: GenerateCall, reply: openai.Reply) -> AsyncIterator[bytes]:
        stream = self.service.watch(call)
        try:
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
        finally:
            self.service.unwatch(stream)
            self.service.drop(call)

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


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
