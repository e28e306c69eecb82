"""Refuses requests without the run's API key, in front of the engine's routes."""

from __future__ import annotations

import hmac

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from buffer_rl.engine.api_key import auth_headers

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered to everybody, as SGLang does: routers and supervisors ask them without a key, and they tell nothing else."""
_REFUSAL = orjson.dumps(
    {
        "error": {
            "message": "the engine's API key is missing or wrong; expected the header 'Authorization: Bearer KEY', "
            "where KEY is args.engine_api_key"
        }
    }
)


class RequireKey:
    """ASGI middleware: HTTP 401 for every request to ``app`` without ``key``, ``OPEN_PATHS`` excepted."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = auth_headers(key)["Authorization"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._allows(scope):
            await self._app(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_REFUSAL)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _REFUSAL})

    def _allows(self, scope: Scope) -> bool:
        given: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)  # takes as long wherever the two differ
