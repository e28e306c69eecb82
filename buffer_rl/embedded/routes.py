"""SGLang's HTTP routes over an ``EngineService``, and what stands in front of them: the run's API key, limits."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from buffer_rl.cluster.process import auth_headers
from buffer_rl.data.json_text import JSONError, read_json
from buffer_rl.embedded import metrics
from buffer_rl.embedded.generation_routes import GenerateRoute, OpenAIRoutes
from buffer_rl.embedded.protocol import weight_version
from buffer_rl.embedded.service import EngineService
from buffer_rl.engines.http_server import Front, json_response
from buffer_rl.engines.protocol import CACHE, WEIGHTS, BadRequestError
from buffer_rl.errors import EngineError

PROBE_TIMEOUT_S = 20.0


Handler = Callable[[HttpRequest], Awaitable[Response]]


def build_app(service: EngineService) -> Starlette:
    """The ASGI application; its lifespan starts and stops the engine thread."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    handlers, generate, openai = _Handlers(service), GenerateRoute(service), OpenAIRoutes(service)
    table: list[tuple[tuple[str, ...], Any, list[str], Callable[[str], Any] | None]] = [
        (("/generate",), generate, ["POST", "PUT"], None),
        (("/v1/chat/completions",), openai.chat, ["POST"], None),
        (("/v1/completions",), openai.completions, ["POST"], None),
        (("/v1/models",), openai.models, ["GET"], None),
        (("/metrics",), handlers.metrics, ["GET"], None),
        (("/health",), handlers.health, ["GET"], None),
        (("/ready",), handlers.ready, ["GET"], None),
        (("/health_generate",), handlers.health_generate, ["GET"], None),
        (("/model_info", "/get_model_info"), handlers.model_info, ["GET"], None),
        (("/server_info", "/get_server_info"), handlers.server_info, ["GET"], _plain_error),
        (("/flush_cache",), handlers.flush_cache, ["GET", "POST"], _plain_error),
        (("/abort_request",), handlers.abort_request, ["POST"], _plain_error),
        (("/pause_generation",), handlers.pause_generation, ["POST"], _plain_error),
        (("/continue_generation",), handlers.continue_generation, ["POST"], _plain_error),
        (("/release_memory_occupation",), handlers.release_memory_occupation, ["GET", "POST"], _plain_error),
        (("/resume_memory_occupation",), handlers.resume_memory_occupation, ["GET", "POST"], _plain_error),
        (("/update_weights_from_disk",), handlers.update_weights_from_disk, ["POST"], _update_failed),
        (("/begin_weight_update",), handlers.begin_weight_update, ["POST"], _failed),
        (("/update_weights_from_tensor",), handlers.update_weights_from_tensor, ["POST"], _failed),
        (("/init_weights_update_group",), handlers.init_weights_update_group, ["POST"], _failed),
        (("/update_weights_from_distributed",), handlers.update_weights_from_distributed, ["POST"], _failed),
        (("/destroy_weights_update_group",), handlers.destroy_weights_update_group, ["POST"], _failed),
        (("/prepare_weight_update",), handlers.prepare_weight_update, ["POST"], _failed),
        (("/end_weight_update",), handlers.end_weight_update, ["POST"], _failed),
        (("/weights_checker",), handlers.weights_checker, ["POST"], _failed),
        (("/load_lora_adapter",), handlers.load_lora_adapter, ["POST"], _adapter_failed),
        (("/unload_lora_adapter",), handlers.unload_lora_adapter, ["POST"], _adapter_failed),
        (("/update_weight_version",), handlers.update_weight_version, ["POST"], _failed),
    ]
    routes = [
        Route(path, endpoint if shape is None else _answering_errors(endpoint, shape), methods=methods)
        for paths, endpoint, methods, shape in table
        for path in paths
    ]
    return _App(generate, routes=routes, lifespan=lifespan)


class _App(Starlette):
    """``generate`` is called past the router and the middleware, which cost more than it does."""

    def __init__(self, generate: ASGIApp, **settings: Any) -> None:
        super().__init__(**settings)
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope.get("path") == "/generate" and scope.get("method") == "POST"
        await (self._generate if direct else super().__call__)(scope, receive, send)


class _Handlers:
    """Everything but ``/generate``. Bodies are small JSON objects; an absent body is an empty one."""

    def __init__(self, service: EngineService) -> None:
        self.service = service

    async def health(self, _: HttpRequest) -> Response:
        """Answered while decoding and while paused: routers evict engines by it."""
        failure = self.service.failure
        return PlainTextResponse("", 200) if failure is None else PlainTextResponse(str(failure), 503)

    async def ready(self, _: HttpRequest) -> Response:
        return PlainTextResponse("", 200 if self.service.ready else 503)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self.service.metrics(), media_type=metrics.CONTENT_TYPE)

    async def health_generate(self, _: HttpRequest) -> Response:
        """One token end to end; a paused engine is healthy."""
        if self.service.failure is None and self.service.scheduler.paused and self.service.imitate is None:
            return PlainTextResponse("")
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        done = asyncio.Event()
        try:
            call = await self.service.begin(probe, done.set)
            await asyncio.wait_for(done.wait(), PROBE_TIMEOUT_S)
        except TimeoutError:
            await self.service.abort(call.requests.__contains__)
            return PlainTextResponse("no token within the deadline", 503)
        except EngineError as error:
            return PlainTextResponse(str(error), 503)
        return PlainTextResponse(call.failure, 503 if call.failure else 200)

    async def model_info(self, _: HttpRequest) -> Response:
        return json_response(self.service.model_info())

    async def server_info(self, _: HttpRequest) -> Response:
        return json_response(await self.service.server_info())

    async def flush_cache(self, _: HttpRequest) -> Response:
        if await self.service.flush():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: there are requests.\n", 400)

    async def abort_request(self, request: HttpRequest) -> Response:
        body = await _object(request)
        rid = "" if body.get("abort_all", False) else body.get("rid")
        if not isinstance(rid, str) or not (rid or body.get("abort_all")):
            if not self.service.limits.refuses:
                return Response(status_code=200)
            raise BadRequestError("give 'rid' (a string) or 'abort_all': true")
        await self.service.abort(lambda own: own.rid.startswith(rid))  # by prefix, as SGLang
        return Response(status_code=200)

    async def pause_generation(self, request: HttpRequest) -> Response:
        more = await self.service.pause(str((await _object(request)).get("mode", "abort")))
        return json_response({"message": "Generation paused successfully.", "status": "ok", **more})

    async def continue_generation(self, _: HttpRequest) -> Response:
        await self.service.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def release_memory_occupation(self, request: HttpRequest) -> Response:
        await self.service.release_memory(_tags(await _object(request)))
        return json_response(None)

    async def resume_memory_occupation(self, request: HttpRequest) -> Response:
        await self.service.resume_memory(_tags(await _object(request)))
        return json_response(None)

    async def update_weights_from_disk(self, request: HttpRequest) -> Response:
        body = await _object(request)
        path, version = body.get("model_path"), weight_version(body)
        if not isinstance(path, str) or not path:
            raise BadRequestError("'model_path' must be a folder")
        flush, abort = bool(body.get("flush_cache", True)), bool(body.get("abort_all_requests", False))
        held = await self.service.update_weights(path, version, flush_cache=flush, abort_all=abort)
        answer = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": held}
        return json_response(answer)

    async def begin_weight_update(self, request: HttpRequest) -> Response:
        body = await _object(request)
        base = _digest(body, "base")
        if base not in (None, self.service.model.kept.digest):
            raise EngineError(f"the version {base} is not kept", hint="publish the whole version")
        self.service.staged.begin(body.get("selector", "all"), base)
        return json_response({"success": True, "message": "Weight update begun."})

    async def update_weights_from_tensor(self, request: HttpRequest) -> Response:
        body = await _object(request)
        handles, load_format = body.get("serialized_named_tensors"), body.get("load_format")
        flush = bool(body.get("flush_cache", True))
        self.service.staged.add(handles, load_format, weight_version(body), flush_cache=flush)
        await self.service.part_arrived()
        return json_response({"success": True, "message": "Staged until the end of the update."})

    async def init_weights_update_group(self, request: HttpRequest) -> Response:
        await self.service.groups.init(await _object(request))
        return json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def update_weights_from_distributed(self, request: HttpRequest) -> Response:
        await self.service.groups.update(await _object(request))
        await self.service.part_arrived()
        return json_response({"success": True, "message": "Staged until the end of the update."})

    async def destroy_weights_update_group(self, request: HttpRequest) -> Response:
        self.service.groups.destroy(await _object(request))
        return json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def prepare_weight_update(self, request: HttpRequest) -> Response:
        body = await _object(request)
        path = body.get("model_path")
        if path is not None and not (isinstance(path, str) and path):
            raise BadRequestError("'model_path' must be a folder")
        await self.service.prepare_weight_update(path, _digest(body, "digest"), weight_version(body))
        return json_response({"success": True, "message": "Prepared until the end of the update."})

    async def end_weight_update(self, request: HttpRequest) -> Response:
        body = await _object(request)
        await self.service.end_weight_update(_digest(body, "digest"), weight_version(body))
        return json_response({"success": True, "message": "Succeeded to update model weights."})

    async def weights_checker(self, request: HttpRequest) -> Response:
        if (action := (await _object(request)).get("action")) != "checksum":
            raise BadRequestError(f"unknown action {action!r}; known: checksum")
        return json_response(await self.service.checksums())

    async def load_lora_adapter(self, request: HttpRequest) -> Response:
        body = await _object(request)
        name, folder = body.get("lora_name"), body.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(folder, str)):
            raise BadRequestError("'lora_name' must be a name, and 'lora_path' a folder")
        await self.service.load_adapter(name, folder, weight_version(body))
        return json_response({"success": True, "error_message": ""})

    async def unload_lora_adapter(self, request: HttpRequest) -> Response:
        await self.service.unload_adapter(str((await _object(request)).get("lora_name")))
        return json_response({"success": True, "error_message": ""})

    async def update_weight_version(self, request: HttpRequest) -> Response:
        body = await _object(request)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise BadRequestError("'new_version' must be a string")
        if body.get("abort_all_requests", True):
            await self.service.abort()
        self.service.label = version
        return json_response({"success": True, "message": f"Weight version updated to {version}"})


def _adapter_failed(message: str) -> Any:
    return {"success": False, "error_message": message}


def _failed(message: str) -> Any:
    return {"success": False, "message": message}


def _update_failed(message: str) -> Any:
    return {"success": False, "message": message, "num_paused_requests": 0}


def _plain_error(message: str) -> Any:
    return {"error": {"message": message}}


def _answering_errors(handler: Handler, shape: Callable[[str], Any]) -> Handler:
    async def answer(request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except (BadRequestError, EngineError) as error:
            return json_response(shape(str(error)), 400)
        except RuntimeError as error:
            return json_response(shape(str(error)), 500)

    return answer


async def _object(request: HttpRequest) -> dict[str, Any]:
    raw = await request.body()
    try:
        body = read_json(raw) if raw else {}
    except JSONError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _digest(body: Mapping[str, Any], key: str) -> str | None:
    """Of a version that a body names, if it does."""
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"'{key}' must be a digest of weights")
    return value


def _tags(body: Mapping[str, Any]) -> Sequence[str]:
    """The kinds of memory that a body names, all where it names none."""
    known, tags = (*WEIGHTS, *CACHE), body.get("tags")
    if tags and not (isinstance(tags, list) and all(tag in known for tag in tags)):
        raise BadRequestError(f"'tags' must be a list of some of {', '.join(known)}")
    return tags or known


OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without a key, as SGLang does: routers and supervisors ask them so, and the answer says nothing else."""
MAX_BODY_BYTES = 64 << 20
"""Of one request: ten times ten prompts of 100,000 token ids. Weights are not in the bodies of their updates."""


def guarded(app: ASGIApp, key: str | None) -> Front:
    """``app`` behind the limits of ``http_server``, and HTTP 401 for who has not ``key``, ``OPEN_PATHS`` excepted."""
    expected = auth_headers(key)["Authorization"].encode() if key is not None else b""

    def allows(scope: Scope) -> bool:
        if key is None or scope["path"] in OPEN_PATHS:
            return True
        given: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, expected)  # takes as long wherever the two differ

    return Front(app, refusal=_refusal, max_body_bytes=MAX_BODY_BYTES, allows=allows)


def _refusal(_: Scope, status: int, what: str) -> Response:
    if status != 401:
        return json_response(_plain_error(what), status)
    what = f"the engine's API key: {what}; expected the header 'Authorization: Bearer KEY', where KEY is "
    response = json_response(_plain_error(f"{what}args.engine_api_key"), status)
    response.headers["www-authenticate"] = "Bearer"
    return response
