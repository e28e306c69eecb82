"""Who belongs to a fleet now: engines come and go while others generate and take weights.

Two threads and more look at it: the driver's (finds the dead), the publisher's, and one for each replacement. The
list is changed under a lock of its own; ``publication`` is held by whoever brings weights to engines, so that no
engine joins the others between two versions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from buffer_rl.contracts import EngineProcess
from buffer_rl.errors import BufferRLError, EngineError

DEATH_TIMEOUT_S = 1.0
"""How long a process whose connections broke may take until the kernel says that it has ended."""
POLL_INTERVAL_S = 0.02


class MemberState(StrEnum):
    """What an engine of the fleet can do now."""

    STARTING = "starting"  # it does not answer yet
    LOADING = "loading"  # it answers, and takes the current weights by itself
    WAITING = "waiting"  # it answers, and needs the current weights before its first request
    SERVING = "serving"  # the router sends it requests


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One engine. index: its place in the fleet; a replacement takes over that of the engine that was lost."""

    index: int
    engine: EngineProcess
    state: MemberState = MemberState.STARTING
    failure: BufferRLError | None = None
    thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        return self.engine.url

    def death(self) -> BufferRLError | None:
        """Why the engine is of no use any more; None while it is. Engines without ``check`` count as alive."""
        if self.failure is not None:
            return self.failure
        probe: Callable[[], None] | None = getattr(self.engine, "check", None)
        if probe is not None:
            try:
                probe()
            except EngineError as error:
                return error
        return None


def none_left(death: BufferRLError) -> EngineError:
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
class Roster:
    """The engines of a fleet. published: None while they serve the weights that they started with."""

    members: list[Member] = field(default_factory=list)
    published: Published | None = None
    publication: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __contains__(self, member: Member) -> bool:
        return member in self.all()

    def all(self) -> list[Member]:
        """Everybody, by place."""
        with self._lock:
            return sorted(self.members, key=lambda member: member.index)

    def add(self, member: Member) -> None:
        """From now on it belongs to the fleet."""
        with self._lock:
            self.members.append(member)

    def remove(self, member: Member) -> None:
        """From now on it does not."""
        with self._lock:
            self.members.remove(member)

    def clear(self) -> list[Member]:
        """Nobody belongs to the fleet any more; returns who did."""
        with self._lock:
            members, self.members = self.members, []
        return members

    def in_state(self, *states: MemberState) -> list[Member]:
        """Those in one of ``states``, by place."""
        return [member for member in self.all() if member.state in states]

    def able(self) -> list[Member]:
        """Those that serve, and, while weights are published, those that wait for them."""
        states = [MemberState.SERVING, *([MemberState.WAITING] if self.publication.locked() else [])]
        return [member for member in self.in_state(*states) if member.death() is None]

    def is_gone(self, url: str) -> bool:
        """Whether the engine at ``url`` has left or has died. Waits a moment for the death of one that lives."""
        deadline = time.monotonic() + DEATH_TIMEOUT_S
        while member := next((member for member in self.all() if member.url == url), None):
            if member.death() is not None:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True
