"""HTTP calls to all engines of a fleet at once, and the control calls for synchronous code on top of them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar

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


CONTROL_TIMEOUT_S = 60.0
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
    that no engine answers fails all the same. api_key: of engines and router.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        timeout_s: float,
        *,
        router_url: str = "",
        is_gone: Callable[[str, EngineError], bool] | None = None,
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

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        reachable_only: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        """Send ``body`` to all engines, or to those at the URLs ``only``. reachable_only: pass over engines that cannot
        be reached."""
        await self._all("POST", path, orjson.dumps(dict(body)), reachable_only=reachable_only, only=only)

    async def post_each(self, path: str, bodies: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]]) -> None:
        """``post`` with a body for each engine: at least as many as there are engines, or by the URLs of some."""
        if isinstance(bodies, Mapping):
            by_url = {url: orjson.dumps(dict(body)) for url, body in bodies.items()}
            await self._all("POST", path, by_url, only=by_url)
        else:
            await self._all("POST", path, [orjson.dumps(dict(body)) for body in bodies])

    async def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        return await self._field("weight_version", "GET", "/model_info", None)

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
        body: bytes | Sequence[bytes] | Mapping[str, bytes] | None,
        *,
        reachable_only: bool = False,
        only: Collection[str] | None = None,
    ) -> dict[str, bytes]:
        urls = [url for url in self._urls() or await self._urls_of_router() if only is None or url in only]
        bodies: Sequence[bytes | None]
        if isinstance(body, Mapping):
            bodies = [body[url] for url in urls]
        else:
            bodies = [body] * len(urls) if isinstance(body, bytes) or body is None else body[: len(urls)]
        calls = [self._one(method, url + path, own) for url, own in zip(urls, bodies, strict=True)]
        results = await asyncio.gather(*calls)
        answers = {url: result for url, result in zip(urls, results, strict=True) if isinstance(result, bytes)}
        failures = {url: result for url, result in zip(urls, results, strict=True) if isinstance(result, EngineError)}
        if reachable_only:
            failures = {url: error for url, error in failures.items() if not is_connection_error(error)}
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
        except TimeoutError as error:
            failure = EngineError(f"no answer within {self.timeout_s:g} s", where=url)
            failure.__cause__ = error
            return failure
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
        runner.run(_waited(ended))


async def _waited(ended: asyncio.Event) -> None:
    await ended.wait()


class EngineControlClient:
    """The control calls for synchronous code, wherever it is called from: they run in the event loop of another thread.

    timeout_s: deadline of one call. is_gone, api_key: see ``EngineFanOut``. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        is_gone: Callable[[str, EngineError], bool] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.engine_urls = tuple(url.rstrip("/") for url in engine_urls)
        self.timeout_s = timeout_s
        self._loop = LoopThread("engine-control")
        self._engines = EngineFanOut(self.targets, timeout_s, is_gone=is_gone, api_key=api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later call opens others."""
        if self._loop.is_running:
            self._loop.run(self._engines.close())
            self._loop.stop()

    def targets(self) -> Sequence[str]:
        """The engines that the next call goes to."""
        return self.engine_urls

    def _run(self, call: Callable[[EngineFanOut], Coroutine[Any, Any, T]]) -> T:
        try:
            return self._loop.run(call(self._engines))
        except CancelledError as error:
            raise EngineError("the control client was closed during a call", where="the engines") from error

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        self._run(lambda engines: engines.post(path, body))

    def pause(self, mode: str = "retract") -> None:
        """Stop decoding on every engine; mode is ``abort``, ``in_place`` or ``retract``."""
        self._post("/pause_generation", {"mode": mode})

    def resume(self, urls: Collection[str] | None = None) -> None:
        """End a pause on the engines at ``urls``; None: on every engine."""
        self._run(lambda engines: engines.post("/continue_generation", {}, only=urls))

    def flush(self) -> None:
        """Have every engine forget what it cached. EngineError while requests run."""
        self._post("/flush_cache", {})

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every engine take the weights in the folder ``path`` and call them ``version``."""
        self._post("/update_weights_from_disk", {"model_path": path, "weight_version": str(version)})

    def begin_weight_update(self) -> None:
        """Have every engine stage what ``update_weights_from_tensor`` sends."""
        self._post("/begin_weight_update", {"selector": "all"})

    def update_weights_from_tensor(
        self, serialized: Sequence[str], load_format: str | None, version: int | None
    ) -> None:
        """Send every engine a bucket of weights, of which ``serialized`` has a handle for each of them.

        load_format: how the handles are to be read. version: what the weights are called, with the last bucket."""
        common = {
            "load_format": load_format,
            "flush_cache": False,  # the publisher has flushed; at a real server it would fail after the weights changed
            "weight_version": None if version is None else str(version),
        }
        bodies = [{"serialized_named_tensors": [handle], **common} for handle in serialized]
        self._run(lambda engines: engines.post_each("/update_weights_from_tensor", bodies))

    def init_weights_update_group(self, address: str, port: int, urls: Sequence[str], *, name: str) -> None:
        """Have the engines at ``urls`` join a group as ranks 1, 2, …, whose rank 0 listens at ``address``. It ends when
        all members are there: start rank 0 before."""
        common = {"master_address": address, "master_port": port, "world_size": len(urls) + 1}
        common |= {"group_name": name, "backend": "gloo"}
        bodies = {url: {"rank_offset": rank, **common} for rank, url in enumerate(urls, start=1)}
        self._run(lambda engines: engines.post_each("/init_weights_update_group", bodies))

    def update_weights_from_distributed(
        self, bucket: Mapping[str, Sequence[Any]], *, name: str, version: int | None = None, flattened: bool = False
    ) -> None:
        """Have every engine receive a bucket from rank 0 of a group; it ends when all have it: start rank 0 before.

        bucket: ``names``, ``dtypes`` and ``shapes``, in the order of the broadcasts. version: what the weights are
        called, with the last bucket. flattened: the bucket is one broadcast."""
        body = {
            **bucket,
            "group_name": name,
            "flush_cache": False,
            "load_format": "flattened_bucket" if flattened else None,
            "weight_version": None if version is None else str(version),
        }
        self._post("/update_weights_from_distributed", body)

    def destroy_weights_update_group(self, name: str) -> None:
        """Have every engine leave a group. EngineError if one is not in it."""
        self._post("/destroy_weights_update_group", {"group_name": name})

    def end_weight_update(self) -> None:
        """Have every engine serve what was sent since ``begin_weight_update``."""
        self._post("/end_weight_update", {})

    def drop_failed_engines(self) -> None:
        """Does nothing: these engines are not replaced, so the failure of one fails the call."""

    def drop(self, urls: Collection[str]) -> bool:
        """Drop the engines at ``urls``. Returns whether that was done; False here, as they are not replaced."""
        return False

    def end_publication(self) -> None:
        """Forget what was noted since ``pause``; engines that are paused stay so."""

    def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        return self._run(lambda engines: engines.versions())

    def checksums(self) -> dict[str, str]:
        """The checksum of the weights that each engine serves, by URL."""
        return self._run(lambda engines: engines.checksums())
