"""HTTP calls to engines: a session, a gate for requests, one call to all engines at once, and an event loop for
synchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import InitVar, dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp
import orjson

from buffer_rl.cluster.process import auth_headers
from buffer_rl.engines.protocol import SERVER_INFO, ServerInfo
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.plugin.calls import new_event_loop

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
Body = Mapping[str, Any]
NOTHING: Body = MappingProxyType({})
"""The body of a call that has no parameters."""
CONTROL_KEEPALIVE_S = 2.0
"""Less than servers wait, 5 s and more, before they close an idle connection: a control call that met that moment would
fail."""


@dataclass(eq=False)
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

    urls: Callable[[], Sequence[str]]
    timeout_s: float
    router_url: str = ""
    is_gone: Callable[[str, EngineError], bool] | None = None
    has_ended: Callable[[str], bool] = lambda url: False
    api_key: InitVar[str | None] = None

    def __post_init__(self, api_key: str | None) -> None:
        self._http = HttpSession(self.timeout_s, api_key, CONTROL_KEEPALIVE_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def ask(
        self,
        path: str,
        body: Body | None = None,
        *,
        each: Mapping[str, Body] | None = None,
        only: Collection[str] | None = None,
        reachable_only: bool = False,
        missing: bytes | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, bytes]:
        """The answers by URL of all engines, or of those at the URLs ``only``, to ``GET path``, or ``POST path`` with
        ``body``.

        each: bodies by URL, for these engines alone. reachable_only: pass over engines that cannot be reached, or do
        not answer in time. missing: the answer of an engine without this path. timeout_s: a shorter deadline."""
        timeout_s = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        wanted = only if each is None else each
        urls = [url for url in self.urls() or await self._urls_of_router() if wanted is None or url in wanted]
        calls = [self._until_ended(url, self._one(url + path, each[url] if each else body, timeout_s)) for url in urls]
        results = dict(zip(urls, await asyncio.gather(*calls), strict=True))
        if missing is not None:
            lacks = [url for url, found in results.items() if isinstance(found, EngineError) and found.status == 404]
            results |= dict.fromkeys(lacks, missing)
        failures = {url: result for url, result in results.items() if isinstance(result, EngineError)}
        answers = {url: result for url, result in results.items() if isinstance(result, bytes)}
        if reachable_only:
            unreached = (aiohttp.ClientError, TimeoutError)  # it could not be reached, or the connection was lost
            failures = {url: error for url, error in failures.items() if not isinstance(error.__cause__, unreached)}
        elif answers and self.is_gone is not None:
            failures = {
                url: error for url, error in failures.items() if not await asyncio.to_thread(self.is_gone, url, error)
            }
        if len(failures) == 1:
            raise next(iter(failures.values()))
        if failures:
            what = f"{len(failures)} of {len(urls)} engines failed:\n" + "\n".join(map(str, failures.values()))
            raise EngineError(what, where=path)
        return answers

    async def server_info(self, *, reachable_only: bool = False) -> dict[str, ServerInfo]:
        """What each engine is, by URL. reachable_only: see ``ask``."""
        # An engine of a plugin may not have it: it is taken for one that promises nothing.
        found = await self.ask(SERVER_INFO, reachable_only=reachable_only, missing=b"{}")
        return {url: ServerInfo.parse(decode_json(raw, url + SERVER_INFO), url) for url, raw in found.items()}

    async def _urls_of_router(self) -> list[str]:
        if not self.router_url:
            return []
        url = f"{self.router_url}/workers"
        raw = await self._one(url, None, self.timeout_s)
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
                if self.has_ended(url):
                    return EngineError("it was given up while a call to it was open", where=url)
            return task.result()
        finally:
            task.cancel()

    async def _one(self, url: str, body: Body | None, timeout_s: float) -> bytes | EngineError:
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(dict(body)))
        try:
            async with asyncio.timeout(timeout_s):
                async with self._http.session().request(method, url, data=data) as response:
                    raw = await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            late = isinstance(error, TimeoutError)
            what = f"no answer within {timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            failure = EngineError(what, where=url, hint="" if late else "read the engine's log")
            failure.__cause__ = error
            return failure
        return raw if response.status == 200 else status_error(url, response.status, raw)


def decode_json(raw: bytes, url: str) -> Any:
    """``raw`` as JSON. Raises EngineError naming ``url``."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the answer is not JSON: {raw[:200]!r}", where=url) from error


def status_error(url: str, status: int, raw: bytes) -> EngineError:
    """An error that names the URL, the HTTP status and the answer's text."""
    return EngineError(f"HTTP {status}: {raw[:2000].decode(errors='replace').strip()}", where=url, status=status)


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

        Raises ``concurrent.futures.CancelledError`` where ``stop`` comes first, PluginError if there is no loop."""
        with self._lock:  # so that it is asked for before the end, and cancelled by it
            with contextlib.ExitStack() as unless_it_runs:
                unless_it_runs.callback(coroutine.close)
                loop = self._running()
                unless_it_runs.pop_all()
            answer = asyncio.run_coroutine_threadsafe(coroutine, loop)
        return answer.result()

    def stop(self) -> None:
        """End the thread, if it was started; a later ``run`` starts another one."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._loop = self._end = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, ended = new_event_loop(), asyncio.Event()
            threading.Thread(target=_run_until, args=(self._loop, ended), name=self._name, daemon=True).start()
            self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, ended.set)
            self._end.atexit = False
        return self._loop


def _run_until(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels what still runs, so that no caller waits for it
        runner.run(ended.wait())
