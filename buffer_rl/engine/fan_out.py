"""HTTP calls to all engines of a fleet at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from buffer_rl.errors import EngineError


class HttpSession:
    """One aiohttp session, made in the event loop that uses it first. ``timeout_s``: deadline of one request."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """The session, without a limit of connections."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
                headers={"Content-Type": "application/json"},
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class EngineFanOut:
    """One call to all engines at once; all failures become one EngineError that names the URLs, the HTTP statuses and
    the answers. ``timeout_s``: deadline of one call."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        self.urls = tuple(urls)
        self.timeout_s = timeout_s
        self._http = HttpSession(timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> list[bytes]:
        """The answers' bodies, in the order of the engines."""
        return await self._all("POST", path, orjson.dumps(dict(body)))

    async def get(self, path: str) -> list[bytes]:
        """The answers' bodies, in the order of the engines."""
        return await self._all("GET", path, None)

    async def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        answers = await self.get("/model_info")
        found = {}
        for url, raw in zip(self.urls, answers, strict=True):
            info = decode_json(raw, f"{url}/model_info")
            if not isinstance(info, dict) or "weight_version" not in info:
                raise EngineError("the answer has no weight_version", where=f"{url}/model_info")
            found[url] = str(info["weight_version"])
        return found

    async def _all(self, method: str, path: str, body: bytes | None) -> list[bytes]:
        results = await asyncio.gather(*(self._one(method, url + path, body) for url in self.urls))
        failures = [result for result in results if isinstance(result, EngineError)]
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise EngineError(
                f"{len(failures)} of {len(self.urls)} engines failed:\n" + "\n".join(map(str, failures)), where=path
            )
        return [result for result in results if isinstance(result, bytes)]

    async def _one(self, method: str, url: str, body: bytes | None) -> bytes | EngineError:
        try:
            async with asyncio.timeout(self.timeout_s):
                async with self._http.session().request(method, url, data=body) as response:
                    raw = await response.read()
        except TimeoutError:
            return EngineError(f"no answer within {self.timeout_s:g} s", where=url)
        except aiohttp.ClientError as error:
            return EngineError(f"{type(error).__name__}: {error}", where=url, hint="read the engine's log")
        return raw if response.status == 200 else status_error(url, response.status, raw)


def decode_json(raw: bytes, url: str) -> Any:
    """``raw`` as JSON. Raises EngineError naming ``url``."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the answer is not JSON: {raw[:200]!r}", where=url) from error


def status_error(url: str, status: int, raw: bytes) -> EngineError:
    """An error that names the URL, the HTTP status and the answer's text."""
    return EngineError(f"HTTP {status}: {raw[:2000].decode(errors='replace').strip()}", where=url)
