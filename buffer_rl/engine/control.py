"""HTTP calls to all engines of a fleet at once, and the control calls for synchronous code on top of them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import orjson

from buffer_rl.engine.process import auth_headers
from buffer_rl.errors import EngineError

T = TypeVar("T")


class HttpSession:
    """One aiohttp session, made in the event loop that uses it first. ``timeout_s``: deadline of one request.
    api_key: sent with each. keepalive_s: an idle connection is used again for so long."""

    def __init__(self, timeout_s: float, api_key: str | None = None, keepalive_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._keepalive_s = keepalive_s
        self._headers = {"Content-Type": "application/json", **auth_headers(api_key)}
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """The session, without a limit of connections."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


CONTROL_KEEPALIVE_S = 2.0
"""Less than servers wait, 5 s and more, before they close an idle connection: a control call that met that moment would
fail."""


class EngineFanOut:
    """One call to all engines at once; all failures become one EngineError that names the URLs, the HTTP statuses and
    the answers.

    urls: the engines, asked for when a call is made; where there are none, the workers that the router at
    ``router_url`` lists then.
    timeout_s: deadline of one call. is_gone: whether the failure of the engine at a URL is of no account, because it
    has died or is given up; asked only where another engine answered; it may block for a moment. A call that no engine
    answers fails all the same. api_key: of engines and router.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        timeout_s: float,
        *,
        router_url: str = "",
        is_gone: Callable[[str], bool] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._urls = urls
        self.timeout_s = timeout_s
        self._router_url = router_url
        self._is_gone = is_gone
        self._http = HttpSession(timeout_s, api_key, CONTROL_KEEPALIVE_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> list[bytes]:
        """The answers' bodies, in the order of the engines."""
        return list((await self._all("POST", path, orjson.dumps(dict(body)))).values())

    async def post_each(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """``post`` with a body for each engine; at least as many as there are engines."""
        return list((await self._all("POST", path, [orjson.dumps(dict(body)) for body in bodies])).values())

    async def post_where_reachable(self, path: str, body: Mapping[str, Any]) -> None:
        """``post`` for calls that have no meaning for an engine that cannot be reached."""
        await self._all("POST", path, orjson.dumps(dict(body)), reachable_only=True)

    async def get(self, path: str) -> list[bytes]:
        """The answers' bodies, in the order of the engines."""
        return list((await self._all("GET", path, None)).values())

    async def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        found = {}
        for url, raw in (await self._all("GET", "/model_info", None)).items():
            info = decode_json(raw, f"{url}/model_info")
            if not isinstance(info, dict) or "weight_version" not in info:
                raise EngineError("the answer has no weight_version", where=f"{url}/model_info")
            found[url] = str(info["weight_version"])
        return found

    async def checksums(self) -> dict[str, str]:
        """The checksum of the weights that each engine serves, by URL."""
        path, action = "/weights_checker", orjson.dumps({"action": "checksum"})
        found = {}
        for url, raw in (await self._all("POST", path, action)).items():
            answer = decode_json(raw, url + path)
            if not isinstance(answer, dict) or "per_engine_checksum" not in answer:
                raise EngineError("the answer has no per_engine_checksum", where=url + path)
            found[url] = str(answer["per_engine_checksum"])
        return found

    async def _all(
        self, method: str, path: str, body: bytes | Sequence[bytes] | None, *, reachable_only: bool = False
    ) -> dict[str, bytes]:
        urls = self._urls() or await self._urls_of_router()
        bodies = [body] * len(urls) if isinstance(body, bytes) or body is None else body[: len(urls)]
        calls = [self._one(method, url + path, own) for url, own in zip(urls, bodies, strict=True)]
        results = await asyncio.gather(*calls)
        answers = {url: result for url, result in zip(urls, results, strict=True) if isinstance(result, bytes)}
        failures = {url: result for url, result in zip(urls, results, strict=True) if isinstance(result, EngineError)}
        if reachable_only:
            failures = {url: error for url, error in failures.items() if not is_connection_error(error)}
        elif answers and self._is_gone is not None:
            failures = {
                url: error for url, error in failures.items() if not await asyncio.to_thread(self._is_gone, url)
            }
        if len(failures) == 1:
            raise next(iter(failures.values()))
        if failures:
            what = f"{len(failures)} of {len(urls)} engines failed:\n" + "\n".join(map(str, failures.values()))
            raise EngineError(what, where=path)
        return answers

    async def _urls_of_router(self) -> list[str]:
        if not self._router_url:
            return []
        url = f"{self._router_url}/workers"
        raw = await self._one("GET", url, None)
        if isinstance(raw, EngineError):
            raise raw
        try:
            return [str(worker["url"]).rstrip("/") for worker in decode_json(raw, url)["workers"]]
        except (KeyError, TypeError) as error:
            raise EngineError(f"the answer is no list of workers: {raw[:200]!r}", where=url) from error

    async def _one(self, method: str, url: str, body: bytes | None) -> bytes | EngineError:
        try:
            async with asyncio.timeout(self.timeout_s):
                async with self._http.session().request(method, url, data=body) as response:
                    raw = await response.read()
        except TimeoutError:
            return EngineError(f"no answer within {self.timeout_s:g} s", where=url)
        except aiohttp.ClientError as error:
            failure = EngineError(f"{type(error).__name__}: {error}", where=url, hint="read the engine's log")
            failure.__cause__ = error
            return failure
        return raw if response.status == 200 else status_error(url, response.status, raw)


def is_connection_error(error: EngineError) -> bool:
    """Whether a call failed because the engine could not be reached, or the connection was lost."""
    return isinstance(error.__cause__, aiohttp.ClientError)


def decode_json(raw: bytes, url: str) -> Any:
    """``raw`` as JSON. Raises EngineError naming ``url``."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the answer is not JSON: {raw[:200]!r}", where=url) from error


def status_error(url: str, status: int, raw: bytes) -> EngineError:
    """An error that names the URL, the HTTP status and the answer's text."""
    error = EngineError(f"HTTP {status}: {raw[:2000].decode(errors='replace').strip()}", where=url)
    error.status = status
    return error


class LoopThread:
    """An event loop that runs in a thread of its own from the first call on, so that connections outlive a call.

    The thread is a daemon: it ends with ``stop``, when nobody has the object any more, or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize[Any, LoopThread] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and not ended."""
        return self._loop is not None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's answer. It must have a deadline of its own. Callable from every thread but the loop's.

        Raises ``concurrent.futures.CancelledError`` where ``stop`` comes first."""
        with self._lock:  # so that it is asked for before the end, and cancelled by it
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        return answer.result()

    def stop(self) -> None:
        """End the thread, if it was started; a later ``run`` starts another one."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._loop = self._end = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, ended = asyncio.new_event_loop(), asyncio.Event()
            threading.Thread(target=_run_until, args=(self._loop, ended), name=self._name, daemon=True).start()
            self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, ended.set)
            self._end.atexit = False
        return self._loop


def _run_until(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels what still runs, so that no caller waits for it
        runner.run(_waited(ended))


async def _waited(ended: asyncio.Event) -> None:
    await ended.wait()
