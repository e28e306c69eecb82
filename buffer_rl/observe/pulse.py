"""The pulse of a member process: its calls under way and their progress; and which members of a role hang.

A call makes *progress* when code in it says so (``progress``), begins or ends a wait, or returns. The time between two
marks of progress is a gap. A member knows the longest gap of each of its methods, and compares the current one with it.

Pure logic, without Ray: ``buffer_rl.cluster.hangs`` asks the members.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

GAP_FACTOR = 20
"""A call hangs once its gap is so many times the longest gap before."""


class Waits(StrEnum):
    """What a call waits for: nothing, the other ranks (a collective), or something that has a deadline of its own."""

    NOT = ""
    PEERS = "the other ranks"
    DEADLINE = "an answer with a deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPulse:
    """The calls of one method that are under way. idle_s: seconds since the newest mark of progress."""

    method: str
    idle_s: float
    waits: Waits = Waits.NOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A member's answer. gaps: the longest gap in seconds of each method that has returned once. log: the file with
    its output, empty if it is not known.

    Example:
        Pulse(calls=(CallPulse(method="train", idle_s=0.2),), gaps={"train": 0.5})
    """

    calls: tuple[CallPulse, ...] = ()
    gaps: Mapping[str, float] = field(default_factory=dict)
    pid: int = 0
    node: str = ""
    host: str = ""
    log: str = ""


@dataclass(slots=True)
class _Method:
    num_begun: int = 0  # calls under way
    waits: list[Waits] = field(default_factory=list)
    marked: float = 0.0
    longest_gap: float = 0.0
    has_returned: bool = False


class PulseRecorder:
    """Notes the calls of one member, from any thread. now: a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._methods: dict[str, _Method] = {}

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        """A call of ``method`` is under way in the block; a call within it is a part of it."""
        if _current.get() is not None:
            yield
            return
        with self._lock:
            noted = self._methods.setdefault(method, _Method())
            noted.marked = noted.marked if noted.num_begun else self._now()
            noted.num_begun += 1
        token = _current.set((self, noted))
        try:
            yield
        finally:
            _current.reset(token)
            self.mark(noted)
            with self._lock:
                noted.num_begun -= 1
                noted.has_returned = True

    def mark(self, method: _Method, *, counts_gap: bool = True) -> None:
        """The calls of ``method`` made progress."""
        with self._lock:
            now = self._now()
            if counts_gap:
                method.longest_gap = max(method.longest_gap, now - method.marked)
            method.marked = now

    def calls(self) -> tuple[CallPulse, ...]:
        """The methods with calls under way."""
        with self._lock:
            now, found = self._now(), []
            for name, each in self._methods.items():
                if each.num_begun:
                    # Several calls of a method wait only if each of them does.
                    waits = each.waits[-1] if len(each.waits) >= each.num_begun else Waits.NOT
                    found.append(CallPulse(method=name, idle_s=now - each.marked, waits=waits))
            return tuple(found)

    def gaps(self) -> dict[str, float]:
        """As ``Pulse.gaps``."""
        with self._lock:
            return {name: each.longest_gap for name, each in self._methods.items() if each.has_returned}


_current: ContextVar[tuple[PulseRecorder, _Method] | None] = ContextVar("buffer_rl_pulse", default=None)


def progress() -> None:
    """Mark progress of the call under way; nothing outside of a member's call."""
    if (found := _current.get()) is not None:
        recorder, method = found
        recorder.mark(method)


@contextmanager
def waiting(waits: Waits) -> Iterator[None]:
    """The call under way waits in the block; nothing outside of a member's call. The time of a wait with a deadline of
    its own is no gap."""
    if (found := _current.get()) is None:
        yield
        return
    recorder, method = found
    recorder.mark(method)
    method.waits.append(waits)
    try:
        yield
    finally:
        method.waits.remove(waits)
        recorder.mark(method, counts_gap=waits is not Waits.DEADLINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A member as the watcher sees it. pulse: the newest; None before the first. silent_s: how long the newest question
    has had no answer. called: the methods that the driver has called and that have not answered, the oldest first."""

    pulse: Pulse | None = None
    silent_s: float = 0.0
    called: Sequence[str] = ()

    @property
    def methods(self) -> Sequence[str]:
        """The methods under way."""
        return self.called or [call.method for call in (self.pulse.calls if self.pulse is not None else ())]


def hung_members(looks: Sequence[Look], timeout_s: float) -> dict[int, str]:
    """The members of a role that hang, by place, with the reason.

    A member that has answered before is silent after ``timeout_s``. A call is stuck after ``timeout_s`` without
    progress, if that is also ``GAP_FACTOR`` times the longest gap of its method, its own and its siblings'. A call of a
    method that has never returned is not stuck, nor is a wait with a deadline of its own.

    A silent member comes first: others may wait for it. Of stuck ones, those that wait for the other ranks hang only if
    all members do.
    """
    silent = {
        place: f"no answer for {look.silent_s:.0f} s {f'in {look.methods[0]}' if look.methods else 'between calls'}"
        for place, look in enumerate(looks)
        if look.pulse is not None and look.silent_s > timeout_s
    }
    if any(look.silent_s > timeout_s / 3 for look in looks):  # it may be silent soon
        return silent
    stuck = {place: call for place, look in enumerate(looks) if (call := _stuck_call(look, looks, timeout_s))}
    culprits = {place: call for place, call in stuck.items() if call.waits is Waits.NOT}
    if not culprits and len(stuck) == len(looks):
        culprits = stuck
    return {place: f"no progress for {call.idle_s:.0f} s in {_named(call)}" for place, call in culprits.items()}


def slow_first_calls(looks: Sequence[Look], timeout_s: float) -> dict[int, CallPulse]:
    """The members of a role, by place, whose first call of a method has made no progress for ``timeout_s`` and waits
    for nothing. It has no past to be judged by, and may well be at work: a user wants to know where it is."""
    return {
        place: call
        for place, look in enumerate(looks)
        if look.pulse is not None
        for call in look.pulse.calls
        if call.method not in look.pulse.gaps and call.waits is Waits.NOT and call.idle_s > timeout_s
    }


def _stuck_call(look: Look, looks: Sequence[Look], timeout_s: float) -> CallPulse | None:
    """The call of a member that has made no progress for too long."""
    if look.pulse is None:
        return None
    for call in look.pulse.calls:
        if call.method in look.pulse.gaps and call.waits is not Waits.DEADLINE:
            longest = max(each.pulse.gaps.get(call.method, 0.0) for each in looks if each.pulse is not None)
            if call.idle_s > max(timeout_s, GAP_FACTOR * longest):
                return call
    return None


def _named(call: CallPulse) -> str:
    return f"{call.method}, waiting for {call.waits}" if call.waits is Waits.PEERS else call.method
