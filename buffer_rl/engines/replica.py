"""One engine process of a fleet, and what it can do now: a state machine without HTTP and without threads.

::

    starting ───────────────────────────────┐
    restarting ──> loading ──> waiting ──> serving <──> suspect
                      └────────────────────┘
    any of them ──> quarantined, dead

The process of a dead or quarantined engine is ended, and a replacement, another ``Replica`` of the same index, begins
as restarting. Probes that fail count in each state that is probed; only one that serves becomes suspect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from buffer_rl.errors import BufferRLError
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
WEIGHTS = ("weights",)
CACHE = ("kv_cache", "cuda_graph")
"""The tags of SGLang's memory, in the order in which an engine takes it back."""
PROBED = (*SERVES, EngineState.WAITING, EngineState.LOADING)
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
