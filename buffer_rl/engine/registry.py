"""The engines of a fleet now: a registry of them, their heartbeat, and the control calls of a publication to them.

Engines come and go while others generate and take weights. Who waits for whom:

- The registry is read and changed by the driver's thread (finds the dead), the publisher's, and one for each
  replacement, under a lock of its own. ``publication`` is held while weights are brought to engines, so that no engine
  joins the others between two versions.
- The heartbeat finds engines that hang: their process lives, their connections open, and nothing is answered. A thread
  of its own asks every engine that has answered once for ``/health``, again and again; no other thread waits for it.
  What it finds is the replica's failure, and ``EngineFleet.check`` replaces the engine as one that died.
- A publication, from its first ``pause`` to its end, waits for a replacement that is just taking the newest weights by
  itself, and holds back one that would (``EngineRegistry.publication``, with a deadline).
"""

from __future__ import annotations

import concurrent.futures
import http.client
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from buffer_rl.contracts import EngineProcess
from buffer_rl.engine.control import EngineControlClient, EngineFanOut
from buffer_rl.errors import BufferRLError, DeadlineError, EngineError

T = TypeVar("T")

DEATH_TIMEOUT_S = 1.0
"""How long a process whose connections broke may take until the kernel says that it has ended."""
POLL_INTERVAL_S = 0.02
LONGEST_INTERVAL_S = 5.0
LONGEST_PROBE_S = 10.0
SHORTEST_PROBE_S = 1.0
PROBES_AT_ONCE = 16
JOIN_TIMEOUT_S = 1.0


class ReplicaState(StrEnum):
    """What an engine of the fleet can do now."""

    STARTING = "starting"  # it does not answer yet
    LOADING = "loading"  # it answers, and takes the current weights by itself
    WAITING = "waiting"  # it answers, and needs the current weights before its first request
    SERVING = "serving"  # the router sends it requests


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One engine. index: its place in the fleet; a replacement takes over that of the engine that was lost."""

    index: int
    engine: EngineProcess
    state: ReplicaState = ReplicaState.STARTING
    failure: BufferRLError | None = None
    thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        return self.engine.url

    def error(self) -> BufferRLError | None:
        """Why the engine cannot be used any more; None while it can. Engines without ``check`` count as alive."""
        if self.failure is not None:
            return self.failure
        probe: Callable[[], None] | None = getattr(self.engine, "check", None)
        if probe is not None:
            try:
                probe()
            except EngineError as error:
                return error
        return None


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
    """The engines of a fleet. published: None while they serve the weights that they started with."""

    replicas: list[Replica] = field(default_factory=list)
    published: Published | None = None
    publication: threading.Lock = field(default_factory=threading.Lock)
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

    def in_state(self, *states: ReplicaState) -> list[Replica]:
        """The replicas in one of ``states``, by index."""
        return [replica for replica in self.all() if replica.state in states]

    def healthy(self) -> list[Replica]:
        """Replicas without error that serve or, while weights are published, wait for them."""
        states = [ReplicaState.SERVING, *([ReplicaState.WAITING] if self.publication.locked() else [])]
        return [replica for replica in self.in_state(*states) if replica.error() is None]

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


WATCHED = (ReplicaState.SERVING, ReplicaState.WAITING, ReplicaState.LOADING)
"""Of one that starts, the deadline is ``--engine-start-timeout-s``."""


class Heartbeat:
    """Watches the replicas of ``registry`` that serve, or will as soon as they have the weights.

    timeout_s: an engine has failed once it answered no probe for so long. The time counts from the first probe that
    failed, not from the last that succeeded: a machine that slept finds its engines well.
    """

    def __init__(self, registry: EngineRegistry, timeout_s: float) -> None:
        self._registry = registry
        self._timeout_s = timeout_s
        self._interval_s = min(timeout_s / 6, LONGEST_INTERVAL_S)
        self._probe_s = max(SHORTEST_PROBE_S, min(timeout_s / 6, LONGEST_PROBE_S))
        self._failing_since: dict[Replica, float] = {}
        self._end = threading.Event()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
        self._thread = threading.Thread(target=self._watch, name="engine-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a probe under way is not waited for."""
        self._end.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        pool = concurrent.futures.ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="engine-probe")
        try:
            while not self._end.wait(self._interval_s):
                replicas = self._registry.in_state(*WATCHED)
                for replica, healthy in zip(replicas, pool.map(self._answers, replicas), strict=True):
                    self._note(replica, healthy)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _note(self, replica: Replica, healthy: bool) -> None:
        if healthy:
            self._failing_since.pop(replica, None)
            return
        now = time.monotonic()
        since = self._failing_since.setdefault(replica, now)
        if now - since >= self._timeout_s and replica.failure is None:
            del self._failing_since[replica]
            replica.failure = EngineError(
                f"engine {replica.index} hangs: no answer to /health for {self._timeout_s:g} s",
                where=replica.url,
                hint="its log says what it did last; raise --rollout-health-check-timeout if it is only slow",
            )

    def _answers(self, replica: Replica) -> bool:
        try:
            with self._opener.open(f"{replica.url}/health", timeout=self._probe_s) as response:
                return bool(response.status == 200)
        except (http.client.HTTPException, OSError, ValueError):  # urllib's errors are OSErrors
            return False


FAILED_LAST_ATTEMPT = "failed the last attempt of a publication"


class FleetControl(EngineControlClient):
    """Reaches the engines that were there at ``pause`` and still live. An engine that dies does not fail a call that
    another one answers, nor does a dropped one: one that fails after ``drop_failed_engines``, or whose answer does not
    come in time, as asking it again would take as long. Replacements that wait for weights take
    part, and join the router at ``resume``.

    admit: has the router send requests to a replica. timeout_s: deadline of one call. api_key: of the engines.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        admit: Callable[[Replica], None],
        *,
        timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        super().__init__((), timeout_s=timeout_s, is_gone=self._is_gone_or_dropped, api_key=api_key)
        self._registry = registry
        self._admit = admit
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
        return self._registry.in_state(ReplicaState.SERVING)

    def drop_failed_engines(self) -> None:
        """Until the publication ends, drop an engine that fails a call that another one answers: it gets no more calls,
        and the fleet replaces it as one that died."""
        self._drops_failed = True

    def drop(self, urls: Collection[str]) -> bool:
        """Drop the engines at ``urls``, after ``drop_failed_engines``. Returns whether that was done."""
        for replica in self._replicas() if self._drops_failed else ():
            if replica.url in urls:
                self._drop(replica)
        return self._drops_failed

    def pause(self, mode: str = "retract") -> None:
        """Begin a publication, or another attempt of it: stop decoding on every engine that answers."""
        if self._in_publication is None:
            if not self._registry.publication.acquire(timeout=self.timeout_s):
                raise DeadlineError(f"an engine that joins took longer than {self.timeout_s:g} s", where="publish")
            self._in_publication = self._registry.in_state(ReplicaState.SERVING, ReplicaState.WAITING)
        self._folder, self._versions = None, {}
        super().pause(mode)

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every engine take the weights in the folder ``path`` and call them ``version``."""
        super().update_weights_from_disk(path, version)
        self._folder = path

    def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        self._versions = super().versions()
        return self._versions

    def resume(self, urls: Collection[str] | None = None) -> None:
        """End the publication: the engines at ``urls`` go on, or all; replacements among them join, if all have the
        same weights. Where an engine fails it, the publication goes on; one that the router does not take is lost."""
        super().resume(urls)
        found = {url: version for url, version in self._versions.items() if urls is None or url in urls}
        if len(set(found.values())) == 1:  # versions() was asked for, and all have the same
            self._registry.published = Published(version=next(iter(found.values())), folder=self._folder)
            for replica in self._replicas():
                if replica.state is ReplicaState.WAITING and replica.failure is None and replica.url in found:
                    try:
                        self._admit(replica)
                    except BufferRLError as error:
                        replica.failure = error
        self.end_publication()

    def end_publication(self) -> None:
        """Engines may join from now on; those that did not go on stay paused."""
        self._drops_failed, self._versions = False, {}
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
            raise no_engine_left(deaths[-1] if deaths else error) from error

    def _is_gone_or_dropped(self, url: str, error: EngineError) -> bool:
        if self._registry.is_gone(url):
            return True
        failing = next((replica for replica in self._replicas() if replica.url == url), None)
        hangs = isinstance(error.__cause__, TimeoutError)
        if failing is None or not (self._drops_failed or hangs):
            return False
        self._drop(failing, f"hangs in a publication: {error.what}" if hangs else FAILED_LAST_ATTEMPT)
        return True

    @staticmethod
    def _drop(replica: Replica, why: str = FAILED_LAST_ATTEMPT) -> None:
        replica.failure = EngineError(
            f"engine {replica.index} {why}",
            where=replica.url,
            hint="its log, and the notices of attempts before, say why",
        )
