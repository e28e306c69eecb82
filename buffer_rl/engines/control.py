"""The control calls to engines, for synchronous code: each call to a server is one method of the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from buffer_rl.engines.http import NOTHING, Body, EngineFanOut, LoopThread, decode_json
from buffer_rl.engines.protocol import CACHE, GENERATE, MODEL_INFO, WEIGHTS, ServerInfo
from buffer_rl.engines.registry import POLL_INTERVAL_S, SERVES, WAITS, EngineEvent, EngineRegistry, Published, Replica
from buffer_rl.errors import DeadlineError, EngineError

T = TypeVar("T")
CONTROL_TIMEOUT_S = 60.0
RETRACTION_S = 60.0
"""For one call while a retraction is tried: a scheduler that ended in it answers nothing."""
FAILED_LAST_ATTEMPT = "failed the last attempt of a publication"
PAUSE, CONTINUE, FLUSH = "/pause_generation", "/continue_generation", "/flush_cache"


class EngineControlClient(AbstractContextManager["EngineControlClient"]):
    """The control calls, from any thread: each goes to all engines at once, in the event loop of another thread.

    It reaches the engines that were there at ``pause`` and still live. An engine that dies does not fail a call that
    another one answers, nor does a quarantined one: one that fails after ``drop_failed_engines``, or whose answer does
    not come in time, as asking it again would take as long. Replacements that wait for weights take part, and serve
    from ``resume`` on. Any failure of engines that are not replaced fails a call.

    engines: those of a fleet, or the URLs of engines that are not replaced. timeout_s: deadline of one call.
    start_timeout_s: of the wait for an engine if there is none; None: as of a call. api_key: of the engines. Close it,
    or use it as a context manager.
    """

    def __init__(
        self,
        engines: EngineRegistry | Sequence[str],
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        start_timeout_s: float | None = None,
        api_key: str | None = None,
    ) -> None:
        self._registry = engines if isinstance(engines, EngineRegistry) else EngineRegistry.of_urls(engines)
        self.timeout_s = timeout_s
        self._start_timeout_s = timeout_s if start_timeout_s is None else start_timeout_s
        self._loop = LoopThread("engine-control")
        how: dict[str, Any] = {"is_gone": self._is_gone_or_dropped, "has_ended": self._has_ended, "api_key": api_key}
        self._engines = EngineFanOut(self.targets, timeout_s, **how)
        self._in_publication: list[Replica] | None = None
        self._folder: str | None = None
        self._adapter: str | None = None
        self._versions: dict[str, str] = {}
        self._drops_failed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later call opens others."""
        if self._loop.is_running:
            self._loop.run(self._engines.close())
            self._loop.stop()

    # ------------------------------------------------------------------ whom calls reach

    @property
    def replaces(self) -> bool:
        """Whether engines that fail are replaced: they are the run's own, and alike."""
        return self._registry.replaces

    def targets(self) -> Sequence[str]:
        """The engines that the next call goes to."""
        return [replica.url for replica in self._replicas() if replica in self._registry and replica.failure is None]

    def _replicas(self) -> list[Replica]:
        if self._in_publication is not None:
            return self._in_publication
        return self._registry.in_state(*SERVES) or self._registry.in_state(*WAITS)

    def wait_for_engine(self) -> None:
        """Return once an engine can take weights: at once, or when a replacement answers. Raises EngineError if none
        will come, DeadlineError if none does in ``start_timeout_s``."""
        deadline = time.monotonic() + self._start_timeout_s
        while not self.targets():
            self._leave()  # a replacement may need the lock before it answers
            self._registry.has_memory = True  # although the trainer is awake: nothing goes on without an engine
            if self._registry.over is not None:
                raise self._registry.over
            if time.monotonic() > deadline:
                what = f"no engine came in place of those that died within {self._start_timeout_s:g} s"
                raise DeadlineError(what, where="publish", hint="raise --engine-start-timeout-s")
            time.sleep(POLL_INTERVAL_S)

    def drop_failed_engines(self) -> None:
        """Until the publication ends, quarantine an engine that fails a call that another one answers: it gets no more
        calls, and the fleet replaces it as one that died."""
        self._drops_failed = self.replaces

    def drop(self, urls: Collection[str]) -> bool:
        """Quarantine the engines at ``urls``, after ``drop_failed_engines``. Returns whether that was done."""
        for replica in self._replicas() if self._drops_failed else ():
            if replica.url in urls:
                self._drop(replica)
        return self._drops_failed

    def _hold(self) -> None:
        """Fix the engines that calls go to; none joins them before ``end_publication``."""
        if self._in_publication is None:
            if not self._registry.publication.acquire(timeout=self.timeout_s):
                raise DeadlineError(f"an engine that joins took longer than {self.timeout_s:g} s", where="publish")
            self._in_publication = self._registry.in_state(*SERVES, *WAITS)

    def end_publication(self) -> None:
        """Engines may join from now on; those that did not go on stay paused."""
        self._drops_failed, self._versions = False, {}
        self._leave()

    def _leave(self) -> None:
        if self._in_publication is not None:
            self._in_publication = None
            self._registry.publication.release()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A publication of one attempt. Where all engines died in it, the fleet starts others."""
        self.drop_failed_engines()
        try:
            yield
        except EngineError:
            if self.targets() or self._registry.over is not None:
                raise
        finally:
            self.end_publication()

    def _run(self, call: Callable[[EngineFanOut], Coroutine[Any, Any, T]]) -> T:
        replicas = self._replicas()
        try:
            if not self.targets() and (self.replaces or self._registry.all()):  # else no engine is known by its address
                raise EngineError("there is no engine to ask", where="the fleet")
            return self._loop.run(call(self._engines))
        except CancelledError as error:
            raise EngineError("the control client was closed during a call", where="the engines") from error
        except EngineError as error:
            if not all(self._registry.is_gone(replica.url) for replica in replicas):
                raise
            deaths = [death for replica in replicas if (death := replica.error()) is not None]
            raise self._registry.over or (deaths[-1] if deaths else error) from error

    def _has_ended(self, url: str) -> bool:
        """Whether the engine that is called at ``url`` has ended; behind an address that is not the run's, another
        replica may wait for the same one to answer again."""
        found = [replica for replica in self._replicas() if replica.url == url]  # none: outside a publication it went
        return not found or any(replica.failure is not None for replica in found)

    def _is_gone_or_dropped(self, url: str, error: EngineError) -> bool:
        if self._has_ended(url) or self._registry.is_gone(url):
            return True
        failing = next((replica for replica in self._replicas() if replica.url == url), None)
        hangs = self.replaces and isinstance(error.__cause__, TimeoutError)
        if failing is None or not (self._drops_failed or hangs):
            return False
        self._drop(failing, f"hangs in a publication: {error.what}" if hangs else FAILED_LAST_ATTEMPT)
        return True

    @staticmethod
    def _drop(replica: Replica, why: str = FAILED_LAST_ATTEMPT) -> None:
        what, hint = f"engine {replica.index} {why}", "its log, and the notices of attempts before, say why"
        replica.end(EngineError(what, where=replica.url, hint=hint), EngineEvent.REFUSED)

    # ------------------------------------------------------------------ calls to the servers

    def post(self, path: str, body: Body = NOTHING, **how: Any) -> None:
        """Send ``body`` to every engine. how: see ``EngineFanOut.ask``."""
        self._run(lambda engines: engines.ask(path, body, **how))

    def _ask(self, path: str, body: Body | None = None, **how: Any) -> dict[str, Any]:
        """The answers to ``EngineFanOut.ask``, by URL."""
        found = self._run(lambda engines: engines.ask(path, body, **how))
        return {url: decode_json(raw, url + path) for url, raw in found.items()}

    def _field(self, name: str, path: str, body: Body | None = None) -> dict[str, str]:
        answers = self._ask(path, body)
        for url, answer in answers.items():
            if not isinstance(answer, dict) or name not in answer:
                raise EngineError(f"the answer has no {name}", where=url + path)
        return {url: str(answer[name]) for url, answer in answers.items()}

    def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        self._versions = self._field("weight_version", MODEL_INFO)
        return self._versions

    def server_info(self) -> dict[str, ServerInfo]:
        """What each engine is, by URL."""
        return self._run(lambda engines: engines.server_info())

    def checksums(self) -> dict[str, str]:
        """The checksum of the weights that each engine serves, by URL."""
        return self._field("per_engine_checksum", "/weights_checker", {"action": "checksum"})

    def pause(self, mode: str = "retract") -> int | None:
        """Begin a publication, or another attempt of it: stop decoding on every engine that answers; mode is ``abort``,
        ``in_place`` or ``retract``. Returns how many tokens of retracted requests will go through the model again; None
        if no engine reports it."""
        self._hold()
        self._folder, self._adapter, self._versions = None, None, {}
        answers = self._ask(PAUSE, {"mode": mode}).values()
        counts = [int(answer["retracted_tokens"]) for answer in answers if "retracted_tokens" in answer]
        return sum(counts) if counts else None

    def resume(self, urls: Collection[str] | None = None) -> None:
        """End the publication: the engines at ``urls`` go on, or all; replacements among them serve, if all have the
        same weights. Where an engine fails it, the publication goes on. Those without their cache go on when they have
        it, after ``resume_memory``."""
        ready = [replica.url for replica in self._replicas() if not replica.released]
        self.post(CONTINUE, only=[url for url in ready if urls is None or url in urls])
        found = {url: version for url, version in self._versions.items() if urls is None or url in urls}
        if len(set(found.values())) == 1:  # versions() was asked for, and all have the same
            version = next(iter(found.values()))
            self._registry.published = Published(version=version, folder=self._folder, adapter=self._adapter)
            for replica in self._replicas():
                if replica.url in found:
                    replica.note(EngineEvent.HAS_WEIGHTS)
        self.end_publication()

    def sample(self, urls: Collection[str], body: Body) -> dict[str, Any]:
        """End the pause of the engines at ``urls`` and have each answer the request ``body`` of ``/generate``."""
        self.post(CONTINUE, only=urls)
        return self._ask(GENERATE, body, only=urls)

    def halt(self, urls: Collection[str]) -> None:
        """Pause the engines at ``urls`` again, and end the requests that run there: these have sampled meanwhile."""
        self.post(PAUSE, {"mode": "abort"}, only=urls)

    def flush(self) -> None:
        """Have every engine forget what it cached. EngineError while requests run."""
        self.post(FLUSH)

    def try_retraction(self, url: str, body: Body, wait_s: float) -> tuple[Any, bool]:
        """Have the engine at ``url`` answer the request ``body``, and, after ``wait_s``, retract it, flush the cache
        and continue. Returns the answer, and whether it came before the retraction.

        Raises EngineError if the engine refuses a call, ends, or takes longer than ``RETRACTION_S`` for one."""
        only: dict[str, Any] = {"only": [url], "timeout_s": RETRACTION_S}

        async def retracted(engines: EngineFanOut) -> tuple[Any, bool]:
            generating = asyncio.ensure_future(engines.ask(GENERATE, body, **only))
            try:
                early, _ = await asyncio.wait([generating], timeout=wait_s)
                try:
                    await engines.ask(PAUSE, {"mode": "retract"}, **only)
                    await engines.ask(FLUSH, NOTHING, **only)
                finally:
                    await engines.ask(CONTINUE, NOTHING, **only, reachable_only=True)
                return decode_json((await generating).get(url, b""), url + GENERATE), bool(early)
            finally:
                generating.cancel()
                await asyncio.gather(generating, return_exceptions=True)  # of two errors the other one is raised

        return self._run(retracted)

    def release_memory(self, tags: Collection[str] = (*WEIGHTS, *CACHE)) -> None:
        """Have the engines free memory of the kinds ``tags``, whatever runs there retracted; waits for those that are
        being started. One that fails it is dropped, where others do not; none is started before ``resume_memory`` of
        the cache."""
        self._registry.hold_starts(self._start_timeout_s + self.timeout_s)
        with self._turn():
            self.pause()
            self.flush()
            self.post("/release_memory_occupation", {"tags": [tag for tag in (*WEIGHTS, *CACHE) if tag in tags]})
            for replica in self._replicas():
                replica.released = (*replica.released, *tags)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Have the engines take back memory of the kinds ``tags`` that they released; those that serve and have all of
        it go on. Fails as ``release_memory``."""
        with self._turn():
            self._hold()
            self._registry.has_memory = CACHE[0] in tags  # before that, the trainer is awake
            self._in_publication = back = [replica for replica in self._replicas() if replica.released]
            if not self.targets():
                return
            self.post("/resume_memory_occupation", {"tags": [tag for tag in (*WEIGHTS, *CACHE) if tag in tags]})
            for replica in back:
                replica.released = tuple(tag for tag in replica.released if tag not in tags)
            self.post(CONTINUE, only=[r.url for r in back if not r.released and r.state in SERVES])

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every engine take the weights in the folder ``path`` and call them ``version``."""
        self.post("/update_weights_from_disk", {"model_path": path, "weight_version": str(version)})
        self._folder = path

    def load_adapter(self, name: str, path: str, version: int) -> None:
        """Have every engine take the adapter in the folder ``path`` beside others, and call its tokens ``version``."""
        body = {"lora_name": name, "lora_path": path, "weight_version": str(version)}
        self.post("/load_lora_adapter", body)  # SGLang's has no version, and ignores it
        self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._folder, self._adapter = path, name

    def unload_adapter(self, name: str) -> None:
        """Have every engine forget an adapter. EngineError if one has none of that name; SGLang's waits for the end of
        requests that run with it."""
        self.post("/unload_lora_adapter", {"lora_name": name})

    def begin_weight_update(self, base: str | None = None) -> None:
        """Have every engine stage what comes: all weights, or a delta of the version whose digest is ``base``."""
        self.post("/begin_weight_update", {"selector": "all"} if base is None else {"selector": "all", "base": base})

    def update_weights_from_tensor(
        self, serialized: Mapping[str, Sequence[str]], load_format: str | None, version: int | None
    ) -> None:
        """Send the engines at the URLs ``serialized`` a bucket of weights: a handle for each tensor-parallel rank.

        load_format: how the handles are to be read. version: what the weights are called, with the last bucket."""
        name = None if version is None else str(version)
        # The publisher has flushed; at a real server it would fail after the weights changed.
        common = {"load_format": load_format, "flush_cache": False, "weight_version": name}
        bodies = {url: {"serialized_named_tensors": list(own), **common} for url, own in serialized.items()}
        self.post("/update_weights_from_tensor", each=bodies)

    def prepare_weight_update(
        self, folder: str | None = None, digest: str | None = None, version: int | None = None
    ) -> None:
        """Have every engine prepare what was sent since ``begin_weight_update``, or the weights in ``folder``, while it
        generates: ``serve_prepared`` has it serve them. digest, version: as of ``end_weight_update``."""
        body = {"model_path": folder, "digest": digest, "weight_version": None if version is None else str(version)}
        self.post("/prepare_weight_update", {key: value for key, value in body.items() if value is not None})

    def serve_prepared(self, folder: str | None = None) -> None:
        """Have every engine serve what it prepared. folder: what ``prepare_weight_update`` named."""
        self.end_weight_update()
        self._folder = folder

    def end_weight_update(self, digest: str | None = None, version: int | None = None) -> None:
        """Have every engine serve what was sent since ``begin_weight_update``. digest: of the version that it has then,
        which it keeps for deltas. version: what the weights are called, if no bucket said so."""
        body = {} if digest is None else {"digest": digest, "weight_version": str(version)}
        self.post("/end_weight_update", body)
