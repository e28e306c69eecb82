"""The engines of a fleet now: a registry of them, and the control calls of a publication to them.

Engines come and go while others generate and take weights. Who waits for whom:

- The registry is read and changed by the supervisor's thread (finds the dead), the publisher's, and one for each
  replacement, under a lock of its own. ``publication`` is held while weights are brought to engines, so that no engine
  joins the others between two versions.
- A publication, from its first ``pause`` to its end, waits for a replacement that is just taking the newest weights by
  itself, and holds back one that would (``EngineRegistry.publication``, with a deadline).
- A publication for which there is no engine waits for a replacement, with another deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from buffer_rl.engines.control import EngineControlClient, EngineFanOut
from buffer_rl.engines.replica import CACHE, SERVES, WEIGHTS, EngineEvent, EngineState, Replica
from buffer_rl.errors import BufferRLError, DeadlineError, EngineError

T = TypeVar("T")

DEATH_TIMEOUT_S = 1.0
"""How long a process whose connections broke may take until the kernel says that it has ended."""
POLL_INTERVAL_S = 0.02


def no_engine_left(death: BufferRLError) -> EngineError:
    """The error of a fleet whose last engine ended with ``death``."""
    return EngineError(
        f"no engine is left: {death.what}",
        where=death.where,
        hint="read the log; fleet.log beside it says what came before",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The weights that the engines serve. folder: None where they did not come by disk."""

    version: str
    folder: str | None


@dataclass(slots=True, kw_only=True)
class EngineRegistry:
    """The engines of a fleet. published: None while they serve the weights that they started with. over: why there is
    no engine, and none will come. has_memory: whether devices have memory for engines that start; none is started
    without. num_starting: of replacements, until they have joined or failed."""

    replicas: list[Replica] = field(default_factory=list)
    published: Published | None = None
    over: EngineError | None = None
    publication: threading.Lock = field(default_factory=threading.Lock)
    has_memory: bool = True
    num_starting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __contains__(self, replica: Replica) -> bool:
        return replica in self.all()

    def all(self) -> list[Replica]:
        """All replicas, by index."""
        with self._lock:
            return sorted(self.replicas, key=lambda replica: replica.index)

    def add(self, replica: Replica) -> None:
        """Add ``replica`` to the fleet."""
        with self._lock:
            self.replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        """Remove ``replica`` from the fleet."""
        with self._lock:
            self.replicas.remove(replica)

    def clear(self) -> list[Replica]:
        """Remove all replicas; returns them."""
        with self._lock:
            replicas, self.replicas = self.replicas, []
        return replicas

    def in_state(self, *states: EngineState) -> list[Replica]:
        """The replicas in one of ``states``, by index."""
        return [replica for replica in self.all() if replica.state in states]

    def begin_start(self) -> bool:
        """Whether a replacement may be started; it is counted then until ``end_start``."""
        with self._lock:
            self.num_starting += self.has_memory
            return self.has_memory

    def end_start(self) -> None:
        """A replacement has joined the fleet, or failed to."""
        with self._lock:
            self.num_starting -= 1

    def hold_starts(self, timeout_s: float) -> None:
        """Have no replacement started until ``has_memory`` is set again, and wait for those that are being started.
        Raises DeadlineError."""
        with self._lock:
            self.has_memory = False
        deadline = time.monotonic() + timeout_s
        while self.num_starting:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"an engine that is being started took longer than {timeout_s:g} s",
                    where="--offload-rollout",
                    hint="its log says what it does; --engine-start-timeout-s and --update-weights-timeout-s bound it",
                )
            time.sleep(POLL_INTERVAL_S)

    def starved_version(self) -> int | None:
        """The version that an engine waits for while no other one serves and none is published; None if it is not so.
        A rollout would wait for it, and the next publication for the rollout."""
        serves, starved = self.in_state(*SERVES), self.in_state(EngineState.WAITING)
        if serves or not starved or self.publication.locked() or self.published is None or not self.has_memory:
            return None
        return int(self.published.version)

    def is_gone(self, url: str) -> bool:
        """Whether the engine at ``url`` has left or has died. Waits a moment for the death of one that lives."""
        deadline = time.monotonic() + DEATH_TIMEOUT_S
        while replica := next((replica for replica in self.all() if replica.url == url), None):
            if replica.error() is not None:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True


FAILED_LAST_ATTEMPT = "failed the last attempt of a publication"


class FleetControl(EngineControlClient):
    """Reaches the engines that were there at ``pause`` and still live. An engine that dies does not fail a call that
    another one answers, nor does a quarantined one: one that fails after ``drop_failed_engines``, or whose answer does
    not come in time, as asking it again would take as long. Replacements that wait for weights take part, and serve
    from ``resume`` on.

    timeout_s: deadline of one call. start_timeout_s: of the wait for an engine where there is none. api_key: of the
    engines.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        *,
        timeout_s: float,
        start_timeout_s: float | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__(
            (), timeout_s=timeout_s, is_gone=self._is_gone_or_dropped, has_ended=self._has_ended, api_key=api_key
        )
        self._registry = registry
        self._start_timeout_s = timeout_s if start_timeout_s is None else start_timeout_s
        self._in_publication: list[Replica] | None = None
        self._folder: str | None = None
        self._versions: dict[str, str] = {}
        self._drops_failed = False

    def targets(self) -> Sequence[str]:
        """The engines that calls go to now."""
        return [replica.url for replica in self._replicas() if replica in self._registry and replica.failure is None]

    def _replicas(self) -> list[Replica]:
        if self._in_publication is not None:
            return self._in_publication
        return self._registry.in_state(*SERVES) or self._registry.in_state(EngineState.WAITING)

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
        self._drops_failed = True

    def drop(self, urls: Collection[str]) -> bool:
        """Quarantine the engines at ``urls``, after ``drop_failed_engines``. Returns whether that was done."""
        for replica in self._replicas() if self._drops_failed else ():
            if replica.url in urls:
                self._drop(replica)
        return self._drops_failed

    def pause(self, mode: str = "retract") -> None:
        """Begin a publication, or another attempt of it: stop decoding on every engine that answers."""
        self._hold()
        self._folder, self._versions = None, {}
        super().pause(mode)

    def _hold(self) -> None:
        """Fix the engines that calls go to; none joins them before ``end_publication``."""
        if self._in_publication is None:
            if not self._registry.publication.acquire(timeout=self.timeout_s):
                raise DeadlineError(f"an engine that joins took longer than {self.timeout_s:g} s", where="publish")
            self._in_publication = self._registry.in_state(*SERVES, EngineState.WAITING)

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every engine take the weights in the folder ``path`` and call them ``version``."""
        super().update_weights_from_disk(path, version)
        self._folder = path

    def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        self._versions = super().versions()
        return self._versions

    def resume(self, urls: Collection[str] | None = None) -> None:
        """End the publication: the engines at ``urls`` go on, or all; replacements among them serve, if all have the
        same weights. Where an engine fails it, the publication goes on. Those without their cache go on when they have
        it, after ``resume_memory``."""
        ready = [replica.url for replica in self._replicas() if not replica.released]
        super().resume([url for url in ready if urls is None or url in urls])
        found = {url: version for url, version in self._versions.items() if urls is None or url in urls}
        if len(set(found.values())) == 1:  # versions() was asked for, and all have the same
            self._registry.published = Published(version=next(iter(found.values())), folder=self._folder)
            for replica in self._replicas():
                if replica.url in found:
                    replica.note(EngineEvent.HAS_WEIGHTS)
        self.end_publication()

    def release_memory(self) -> None:
        """Have the engines free their memory, whatever runs there retracted; waits for those that are being started.
        One that fails it is dropped, where others do not; none is started before ``resume_memory`` of the cache."""
        self._registry.hold_starts(self._start_timeout_s + self.timeout_s)
        with self._turn():
            self._hold()
            self.pause()
            self.flush()
            super().release_memory()
            for replica in self._replicas():
                replica.released = (*WEIGHTS, *CACHE)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Have the engines take back memory of the kinds ``tags`` that they released; those that serve and have all of
        it go on. Fails as ``release_memory``."""
        with self._turn():
            self._hold()
            self._registry.has_memory = CACHE[0] in tags  # before that, the trainer is awake
            self._in_publication = back = [replica for replica in self._replicas() if replica.released]
            if not self.targets():
                return
            self._post("/resume_memory_occupation", {"tags": list(tags)})
            for replica in back:
                replica.released = tuple(tag for tag in replica.released if tag not in tags)
            serving = [r.url for r in back if not r.released and r.state in SERVES]
            super().resume(serving)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A publication of one attempt. Where all engines died in it, the fleet starts others."""
        self._drops_failed = True
        try:
            yield
        except EngineError:
            if self.targets() or self._registry.over is not None:
                raise
        finally:
            self.end_publication()

    def end_publication(self) -> None:
        """Engines may join from now on; those that did not go on stay paused."""
        self._drops_failed, self._versions = False, {}
        self._leave()

    def _leave(self) -> None:
        if self._in_publication is not None:
            self._in_publication = None
            self._registry.publication.release()

    def _run(self, call: Callable[[EngineFanOut], Coroutine[Any, Any, T]]) -> T:
        replicas = self._replicas()
        try:
            if not self.targets():
                raise EngineError("there is no engine to ask", where="the fleet")
            return super()._run(call)
        except EngineError as error:
            if not all(self._registry.is_gone(replica.url) for replica in replicas):
                raise
            deaths = [death for replica in replicas if (death := replica.error()) is not None]
            raise self._registry.over or (deaths[-1] if deaths else error) from error

    def _has_ended(self, url: str) -> bool:
        """Whether the engine that is called at ``url`` has ended; behind an address that is not the run's, another
        replica may wait for the same one to answer again."""
        return any(replica.failure is not None for replica in self._replicas() if replica.url == url)

    def _is_gone_or_dropped(self, url: str, error: EngineError) -> bool:
        if self._has_ended(url) or self._registry.is_gone(url):
            return True
        failing = next((replica for replica in self._replicas() if replica.url == url), None)
        hangs = isinstance(error.__cause__, TimeoutError)
        if failing is None or not (self._drops_failed or hangs):
            return False
        self._drop(failing, f"hangs in a publication: {error.what}" if hangs else FAILED_LAST_ATTEMPT)
        return True

    @staticmethod
    def _drop(replica: Replica, why: str = FAILED_LAST_ATTEMPT) -> None:
        what, hint = f"engine {replica.index} {why}", "its log, and the notices of attempts before, say why"
        replica.end(EngineError(what, where=replica.url, hint=hint), EngineEvent.REFUSED)
