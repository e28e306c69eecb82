"""The engines of a fleet now: what each can do (a state machine without HTTP and without threads), and all of them.

::

    starting ───────────────────────────────┐
    restarting ──> loading ──> waiting ──> serving <──> suspect
                      └────────────────────┘
    any of them ──> quarantined, dead

The process of a dead or quarantined engine is ended, and a replacement, another ``Replica`` of the same index, begins
as restarting. Probes that fail count in each state that is probed; only one that serves becomes suspect.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from buffer_rl.engines.external import ExternalEngine
from buffer_rl.errors import BufferRLError, DeadlineError, EngineError
from buffer_rl.kinds.engine import EngineProcess


class EngineState(StrEnum):
    """What an engine of the fleet can do now."""

    STARTING = "starting"  # it was started with the run, and does not answer yet
    RESTARTING = "restarting"  # it was started in the place of another one, and does not answer yet
    LOADING = "loading"  # it answers, and takes the current weights by itself
    WAITING = "waiting"  # it answers, and needs the current weights before its first request
    SERVING = "serving"  # the router sends it requests
    SUSPECT = "suspect"  # it serves, but its last probe failed: new requests go to others, where there are any
    QUARANTINED = "quarantined"  # it answers, but not as it should: it gets no requests, and is replaced
    DEAD = "dead"  # it ended, hangs, or did not start; it is replaced


class EngineEvent(StrEnum):
    """What may change the state."""

    ANSWERED = "answered"  # for the first time
    NEEDS_WEIGHTS = "needs weights"  # that it cannot take by itself
    HAS_WEIGHTS = "has weights"  # the current ones
    PROBE_FAILED = "probe failed"
    PROBE_ANSWERED = "probe answered"
    REFUSED = "refused"  # it failed the last attempt of a publication, or answers wrong
    ENDED = "ended"


_S, _E = EngineState, EngineEvent
_ENDS = {_E.REFUSED: _S.QUARANTINED, _E.ENDED: _S.DEAD}
TRANSITIONS: dict[EngineState, dict[EngineEvent, EngineState]] = {
    _S.STARTING: {_E.HAS_WEIGHTS: _S.SERVING, **_ENDS},
    _S.RESTARTING: {_E.ANSWERED: _S.LOADING, **_ENDS},
    _S.LOADING: {_E.NEEDS_WEIGHTS: _S.WAITING, _E.HAS_WEIGHTS: _S.SERVING, **_ENDS},
    _S.WAITING: {_E.HAS_WEIGHTS: _S.SERVING, **_ENDS},
    _S.SERVING: {_E.PROBE_FAILED: _S.SUSPECT, **_ENDS},
    _S.SUSPECT: {_E.PROBE_ANSWERED: _S.SERVING, **_ENDS},
    _S.QUARANTINED: {},
    _S.DEAD: {},
}
"""Any other event changes nothing: threads that watch an engine learn late that it has ended."""

SERVES = (EngineState.SERVING, EngineState.SUSPECT)
WAITS = (EngineState.WAITING,)
PROBED = (*SERVES, *WAITS, EngineState.LOADING)
"""Of one that starts, the deadline is ``--engine-start-timeout-s``."""


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One engine. index: its place in the fleet; a replacement takes over that of the engine that was lost.

    failure: why it is dead or quarantined. released: tags of the memory that it was made to free. on_change: called
    after each transition with the replica, the state before and a reason, from the thread that caused it.
    """

    index: int
    engine: EngineProcess
    state: EngineState = EngineState.STARTING
    failure: BufferRLError | None = None
    released: tuple[str, ...] = ()
    on_change: Callable[[Replica, EngineState, str], None] | None = None
    _silent_since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        return self.engine.url

    def note(self, event: EngineEvent, why: str = "") -> bool:
        """Make the transition that ``event`` causes. Returns whether there is one."""
        with self._lock:
            before = self.state
            self.state = TRANSITIONS[before].get(event, before)
        if self.state is before:
            return False
        if self.on_change is not None:
            self.on_change(self, before, why)
        return True

    def end(self, error: BufferRLError, event: EngineEvent = EngineEvent.ENDED) -> None:
        """It cannot be used any more, because of ``error``. The first error stays."""
        with self._lock:
            self.failure = self.failure or error
        self.note(event, error.what.splitlines()[0])

    def probed(self, answered: bool, now: float) -> float:
        """Note a probe that ended at ``now``, in seconds on any clock. Returns for how many seconds all have failed:
        since the first that did, not since the last that was answered, so that a machine that slept finds its engines
        well."""
        if answered:
            self._silent_since = None
            self.note(EngineEvent.PROBE_ANSWERED)
            return 0.0
        if self._silent_since is None:
            self._silent_since = now
        self.note(EngineEvent.PROBE_FAILED, "its probe failed")
        return now - self._silent_since

    def error(self) -> BufferRLError | None:
        """Why the engine cannot be used any more; None while it can. Asks whether its process has ended."""
        if self.failure is None:
            try:
                self.engine.check()
            except BufferRLError as error:
                self.end(error)
        return self.failure


DEATH_TIMEOUT_S = 1.0
"""How long a process whose connections broke may take until the kernel says that it has ended."""
POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The weights that the engines serve. folder: None where they did not come by disk. adapter: its name, if it has an
    adapter."""

    version: str
    folder: str | None
    adapter: str | None = None


@dataclass(slots=True, kw_only=True)
class EngineRegistry:
    """The engines of a fleet. published: None while they serve the weights that they started with. over: why there is
    no engine, and none will come. has_memory: whether devices have memory for engines that start; none is started
    without. num_starting: of replacements, until they have joined or failed. replaces: False for engines of others,
    whose failures are not asked about."""

    replicas: list[Replica] = field(default_factory=list)
    published: Published | None = None
    over: EngineError | None = None
    publication: threading.Lock = field(default_factory=threading.Lock)
    has_memory: bool = True
    num_starting: int = 0
    replaces: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of_urls(cls, urls: Sequence[str]) -> Self:
        """Engines that serve at ``urls``, and that the run neither ends nor replaces."""
        engines = [ExternalEngine(url.rstrip("/")) for url in urls]
        serving = [Replica(index=i, engine=each, state=EngineState.SERVING) for i, each in enumerate(engines)]
        return cls(replicas=serving, replaces=False)

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
                what = f"an engine that is being started took longer than {timeout_s:g} s"
                hint = "its log says what it does; --engine-start-timeout-s and --update-weights-timeout-s bound it"
                raise DeadlineError(what, where="--offload-rollout", hint=hint)
            time.sleep(POLL_INTERVAL_S)

    def starved_version(self) -> int | None:
        """The version that was published last, if engines wait for weights, none serves, and no publication is under
        way; else None. Requests would wait for an engine, and the next publication for their samples.

        It is what the engines that are gone served, and says nothing of what the trainer has: a trainer that has taken
        a step since has newer weights, which have to be published under their own number."""
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
            if not self.replaces or time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True
