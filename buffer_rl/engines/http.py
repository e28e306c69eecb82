"""HTTP calls to engines: a session, a gate for requests, one call to all engines at once, and an event loop for
synchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import orjson

from buffer_rl.cluster.process import auth_headers
from buffer_rl.engines.protocol import ServerInfo
from buffer_rl.errors import DeadlineError, EngineError

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


class RequestGate:
    """Where each try of a request passes on its way to an engine. Closed, it lets none in; those inside end. Belongs to
    one event loop."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside = 0

    @contextlib.asynccontextmanager
    async def passed(self, limit: asyncio.Timeout | None = None) -> AsyncIterator[None]:
        """The block begins once the gate is open. limit: a deadline that the wait for it does not count for."""
        if not self._open.is_set():
            loop = asyncio.get_running_loop()
            left = None if limit is None or (when := limit.when()) is None else when - loop.time()
            if limit is not None:
                limit.reschedule(None)
            while not self._open.is_set():
                await self._open.wait()
            if limit is not None and left is not None:
                limit.reschedule(loop.time() + left)
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def close(self, timeout_s: float) -> None:
        """Let none in from now on, and return when none is inside. Raises DeadlineError, and is open again, if that
        takes longer than ``timeout_s``."""
        self._open.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError as error:
            self.open()
            what = f"{self._inside} requests still run after {timeout_s:g} s, and the publication waits for them"
            hint = "lower the response length, or take --publication retract"
            raise DeadlineError(what, where="the rollout worker", hint=hint) from error
        except BaseException:
            self.open()
            raise

    def open(self) -> None:
        """Let all in that wait, and those that come."""
        self._open.set()


ENDED_POLL_S = 0.5
RETRACTION_S = 60.0
"""For one call while a retraction is tried: a scheduler that ended in it answers nothing."""
CONTROL_KEEPALIVE_S = 2.0
"""Less than servers wait, 5 s and more, before they close an idle connection: a control call that met that moment would
fail."""


class EngineFanOut:
    """One call to all engines at once; all failures become one EngineError that names the URLs, the HTTP statuses and
    the answers.

    urls: the engines, asked for when a call is made; where there are none, the workers that the router at
    ``router_url`` lists then.
    timeout_s: deadline of one call. is_gone: whether to ignore the failure of the engine at a URL, because it has
    died or was dropped; asked only where another engine answered, with the failure; it may block for a moment. A call
    that no engine answers fails all the same. has_ended: whether the engine at a URL that has not answered yet was
    given up meanwhile, so that its answer is not waited for. api_key: of engines and router.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        timeout_s: float,
        *,
        router_url: str = "",
        is_gone: Callable[[str, EngineError], bool] | None = None,
        has_ended: Callable[[str], bool] = lambda url: False,
        api_key: str | None = None,
    ) -> None:
        self._urls = urls
        self._has_ended = has_ended
        self.timeout_s = timeout_s
        self._router_url = router_url
        self._is_gone = is_gone
        self._http = HttpSession(timeout_s, api_key, CONTROL_KEEPALIVE_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        reachable_only: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        """Send ``body`` to all engines, or to those at the URLs ``only``. reachable_only: pass over engines that cannot
        be reached, or do not answer in time."""
        await self._all("POST", path, orjson.dumps(dict(body)), reachable_only=reachable_only, only=only)

    async def post_each(
        self, path: str, bodies: Mapping[str, Mapping[str, Any]], timeout_s: float | None = None
    ) -> None:
        """``post`` with a body for each of the engines at the URLs ``bodies``. timeout_s: a deadline of its own."""
        by_url = {url: orjson.dumps(dict(body)) for url, body in bodies.items()}
        await self._all("POST", path, by_url, only=by_url, timeout_s=timeout_s)

    async def pause(self, mode: str) -> int | None:
        """Stop decoding. Returns how many tokens the engines retracted; None where none of them says so."""
        found = await self._all("POST", "/pause_generation", orjson.dumps({"mode": mode}))
        answers = [decode_json(raw, f"{url}/pause_generation") for url, raw in found.items()]
        told = [answer["retracted_tokens"] for answer in answers if "retracted_tokens" in answer]
        return sum(map(int, told)) if told else None

    async def retraction(self, url: str, body: Mapping[str, Any], wait_s: float) -> tuple[Any, bool]:
        """Have the engine at ``url`` answer the request ``body``, and, after ``wait_s``, retract it, flush the cache
        and continue. Returns the answer, and whether it came before the retraction.

        Raises EngineError if the engine refuses a call, ends, or takes longer than ``RETRACTION_S`` for one."""

        async def post(path: str, what: Mapping[str, Any], reachable_only: bool = False) -> bytes:
            raw, limit = orjson.dumps(dict(what)), RETRACTION_S
            found = await self._all("POST", path, raw, only=[url], timeout_s=limit, reachable_only=reachable_only)
            return found.get(url, b"")

        generating = asyncio.ensure_future(post("/generate", body))
        try:
            early, _ = await asyncio.wait([generating], timeout=wait_s)
            try:
                await post("/pause_generation", {"mode": "retract"})
                await post("/flush_cache", {})
            finally:
                await post("/continue_generation", {}, reachable_only=True)
            return decode_json(await generating, f"{url}/generate"), bool(early)
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)  # of two errors the other one is raised

    async def sample(self, urls: Collection[str], body: Mapping[str, Any]) -> dict[str, Any]:
        """End the pause of the engines at ``urls`` and have each answer the request ``body``; the answers by URL."""
        await self.post("/continue_generation", {}, only=urls)
        found = await self._all("POST", "/generate", orjson.dumps(dict(body)), only=urls)
        return {url: decode_json(raw, f"{url}/generate") for url, raw in found.items()}

    async def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        return await self._field("weight_version", "GET", "/model_info", None)

    async def server_info(self, *, reachable_only: bool = False) -> dict[str, ServerInfo]:
        """What each engine is, by URL. reachable_only: see ``post``."""
        # An engine of a plugin may not have it: it is taken for one that promises nothing.
        found = await self._all("GET", "/server_info", None, reachable_only=reachable_only, missing=b"{}")
        return {url: ServerInfo.parse(decode_json(raw, f"{url}/server_info"), url) for url, raw in found.items()}

    async def checksums(self) -> dict[str, str]:
        """The checksum of the weights that each engine serves, by URL."""
        action = orjson.dumps({"action": "checksum"})
        return await self._field("per_engine_checksum", "POST", "/weights_checker", action)

    async def _field(self, name: str, method: str, path: str, body: bytes | None) -> dict[str, str]:
        found = {}
        for url, raw in (await self._all(method, path, body)).items():
            answer = decode_json(raw, url + path)
            if not isinstance(answer, dict) or name not in answer:
                raise EngineError(f"the answer has no {name}", where=url + path)
            found[url] = str(answer[name])
        return found

    async def _all(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, bytes] | None,
        *,
        reachable_only: bool = False,
        only: Collection[str] | None = None,
        missing: bytes | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, bytes]:
        timeout_s = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        urls = [url for url in self._urls() or await self._urls_of_router() if only is None or url in only]
        bodies = [body[url] if isinstance(body, Mapping) else body for url in urls]
        calls = [
            self._until_ended(url, self._one(method, url + path, own, timeout_s))
            for url, own in zip(urls, bodies, strict=True)
        ]
        results = await asyncio.gather(*calls)
        if missing is not None:
            results = [missing if isinstance(each, EngineError) and each.status == 404 else each for each in results]
        answers = {url: result for url, result in zip(urls, results, strict=True) if isinstance(result, bytes)}
        failures = {url: result for url, result in zip(urls, results, strict=True) if isinstance(result, EngineError)}
        if reachable_only:
            failures = {url: error for url, error in failures.items() if not _is_out_of_reach(error)}
        elif answers and self._is_gone is not None:
            failures = {
                url: error for url, error in failures.items() if not await asyncio.to_thread(self._is_gone, url, error)
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
        raw = await self._one("GET", url, None, self.timeout_s)
        if isinstance(raw, EngineError):
            raise raw
        try:
            return [str(worker["url"]).rstrip("/") for worker in decode_json(raw, url)["workers"]]
        except (KeyError, TypeError) as error:
            raise EngineError(f"the answer is no list of workers: {raw[:200]!r}", where=url) from error

    async def _until_ended(self, url: str, call: Coroutine[Any, Any, bytes | EngineError]) -> bytes | EngineError:
        """What ``call`` returns. An engine that hangs and is ended breaks it; one that is not the run's to end would
        leave it open."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=ENDED_POLL_S))[0]:
                if self._has_ended(url):
                    return EngineError("it was given up while a call to it was open", where=url)
            return task.result()
        finally:
            task.cancel()

    async def _one(self, method: str, url: str, body: bytes | None, timeout_s: float) -> bytes | EngineError:
        try:
            async with asyncio.timeout(timeout_s):
                async with self._http.session().request(method, url, data=body) as response:
                    raw = await response.read()
        except TimeoutError as error:
            failure = EngineError(f"no answer within {timeout_s:g} s", where=url)
            failure.__cause__ = error
            return failure
        except aiohttp.ClientError as error:
            failure = EngineError(f"{type(error).__name__}: {error}", where=url, hint="read the engine's log")
            failure.__cause__ = error
            return failure
        return raw if response.status == 200 else status_error(url, response.status, raw)


def _is_out_of_reach(error: EngineError) -> bool:
    return is_connection_error(error) or isinstance(error.__cause__, TimeoutError)


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

    The thread is a daemon: it ends with ``stop``, when the object is collected, or with the process.
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
        runner.run(ended.wait())
