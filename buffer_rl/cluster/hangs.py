"""Watchers of processes: of members that hang, whose pulse is asked for, and of actors that Ray starts again.

A member that hangs is ended with a stack of its threads.

Who waits for whom: nothing waits for the watcher. It runs on the thread of the driver's watchers, and waits for a
process that hangs a few seconds, while it takes the stack (``NODE_S`` twice at most, if its node is lost). What follows
is what follows a death.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, Generic, TypeVar, cast

import ray
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.cluster.calling import PATIENCE_S
from buffer_rl.cluster.member import PULSE, end_process, frames_of, take_stack
from buffer_rl.observe.pulse import CallPulse, Look, Pulse, hung_members, slow_first_calls

T = TypeVar("T")

NODE_S = 20.0
"""Deadline for a task on the node of a process that hangs."""
FIRST_S = 5.0
"""How long the members, which are ready, may take to answer for the first time."""
MAX_INTERVAL_S = 5.0


@dataclass(slots=True, eq=False)
class _Watched:
    """A member. question: under way; asked: when the newest one began. pulse: None until the process has answered."""

    actor: Any
    question: Any = None
    asked: float = 0.0
    silent_s: float = 0.0
    pulse: Pulse | None = None
    is_constructed: bool = False

    def look(self, now: float, since_last: float, interval_s: float, timeout_s: float, called: Sequence[str]) -> Look:
        """Read the answer, and ask again. since_last: time since the last look that counts as silence. called: as in
        the answer. timeout_s: after which one that has never answered is looked up in Ray's tables."""
        if self.question is not None:
            if ray.wait([self.question], timeout=0)[0]:
                question, self.question, self.silent_s = self.question, None, 0.0
                try:
                    self.pulse = ray.get(question, timeout=NODE_S)
                except ray.exceptions.RayError:  # it died: a process in its place has yet to answer
                    self.pulse = None
            else:
                self.silent_s += since_last
                if self.pulse is None and self.silent_s > timeout_s:
                    self._look_at_process()
        if self.question is None and now - self.asked >= interval_s:
            self.ask(now)
        return Look(pulse=self.pulse, silent_s=self.silent_s, called=called)

    def _look_at_process(self) -> None:
        """Take what Ray knows of the process for a pulse, if it is silent although its constructor has ended."""
        process = process_of(self.actor)
        if process is not None and not self.is_constructed:
            self.is_constructed, self.silent_s = True, 0.0  # before, it was at work
        else:
            self.pulse = process

    def ask(self, now: float) -> None:
        """Ask for the pulse."""
        self.question, self.asked = getattr(self.actor, PULSE).options(concurrency_group=PULSE).remote(), now


@dataclass(eq=False)
class HangWatch:
    """A watcher of the driver. groups: their members are of classes derived from ``Member`` and are ready. timeout_s:
    see ``hung_members``. notice: called with a line for each process that is ended, and once for each whose first call
    of a method takes long."""

    groups: InitVar[Sequence[ActorGroup]]
    _timeout_s: float
    _notice: Callable[[str], None]
    now: Callable[[], float] = time.monotonic

    def __post_init__(self, groups: Sequence[ActorGroup]) -> None:
        self._looked = self.now()
        self._interval_s = min(self._timeout_s / 4, MAX_INTERVAL_S)
        self._told: set[tuple[int, str]] = set()
        self._groups = {group: [_Watched(actor) for actor in group.actors] for group in groups}
        watched = [member for members in self._groups.values() for member in members]
        for member in watched:
            member.ask(self._looked)
        if watched:  # what hangs before it has answered once has no known process
            ray.wait([member.question for member in watched], num_returns=len(watched), timeout=FIRST_S)

    def __call__(self) -> None:
        """One look."""
        now = self.now()
        # If this process was stopped meanwhile, the members were not silent for all that time.
        since_last, self._looked = min(now - self._looked, self._timeout_s / 2), now
        hung: dict[tuple[str, int], tuple[Look, str, str]] = {}  # by process: roles may share one
        for group, members in self._groups.items():
            for rank, actor in enumerate(group.actors):
                if members[rank].actor is not actor:  # it was replaced
                    members[rank] = _Watched(actor)
            looks = [
                member.look(now, since_last, self._interval_s, self._timeout_s, group.under_way(rank))
                for rank, member in enumerate(members)
            ]
            for rank, reason in hung_members(looks, self._timeout_s).items():
                if (pulse := looks[rank].pulse) is not None:
                    hung.setdefault((pulse.node, pulse.pid), (looks[rank], group.name_of(rank), reason))
            for rank, call in slow_first_calls(looks, self._timeout_s).items():
                self._tell(cast("Pulse", looks[rank].pulse), call, group.name_of(rank))
        for look, name, reason in hung.values():
            self._end(cast("Pulse", look.pulse), look.methods, name, reason)

    def _tell(self, pulse: Pulse, call: CallPulse, name: str) -> None:
        """Say once where the first call of a method is, which nothing ends but its own deadline."""
        if (pulse.pid, call.method) in self._told:
            return
        self._told.add((pulse.pid, call.method))
        at = f"its first {call.method} {_at_work(pulse, call.method, stops=False)}"
        self._notice(f"{name}: no progress for {call.idle_s:.0f} s in {at}; it is waited for")

    def _end(self, pulse: Pulse, methods: Sequence[str], name: str, reason: str) -> None:
        """Take the stack of a process, end it, and have its calls fail with the reason."""
        what = f"hung: {reason} {_at_work(pulse, methods[0] if methods else '', stops=True)}"
        for group, members in self._groups.items():
            for rank, member in enumerate(members):
                if member.actor is not group.actors[rank] or member.pulse is None:  # it was replaced meanwhile
                    continue
                if (member.pulse.node, member.pulse.pid) == (pulse.node, pulse.pid):
                    group.hung[group.name_of(rank)] = what
                    members[rank] = _Watched(member.actor)
        self._notice(f"{name} {what}; its process is ended, and {pulse.log or 'its log'} has the stack of all threads")
        _on_node(pulse.node, end_process, pulse.pid)


@dataclass(eq=False)
class ReplacementWatch(Generic[T]):
    """A watcher of the driver: asks actors that Ray starts again which process each is in.

    question: a method of theirs. pid_of: the process in its answer. patience_s: the longest wait for one in a look.
    replaced: called with the place of an actor, and its process, if that is another one than before. silent: called
    with the place of one that has not answered, and for how many seconds; returns whether to ask it again. gone: called
    with the place of one that is not started again, and Ray's error.
    """

    actors: InitVar[Sequence[Any]]
    question: InitVar[Callable[[Any], T | Awaitable[T]]]
    _: KW_ONLY
    replaced: Callable[[int, int], None]
    pid_of: Callable[[T], int] = lambda answer: cast("int", answer)
    silent: Callable[[int, float], bool] = lambda place, seconds: False
    gone: Callable[[int, Exception], None] = lambda place, error: None
    patience_s: float = 0.0
    now: Callable[[], float] = time.monotonic

    def __post_init__(self, actors: Sequence[Any], question: Callable[[Any], T | Awaitable[T]]) -> None:
        self._methods = [getattr(actor, question.__name__) for actor in actors]
        self._pids: dict[int, int] = {}
        self._asked: list[tuple[Any, float] | None] = [self._ask(method) for method in self._methods]

    def _ask(self, method: Any) -> tuple[Any, float]:
        return method.remote(), self.now()

    def __call__(self, patience_s: float | None = None) -> None:
        """One look."""
        for place, method in enumerate(self._methods):
            question, since = self._asked[place] = self._asked[place] or self._ask(method)
            if ray.wait([question], timeout=self.patience_s if patience_s is None else patience_s)[0]:
                self._asked[place] = None
                self._look(place, question)
            elif self.silent(place, self.now() - since):
                self._asked[place] = None

    def close(self) -> None:
        """The last looks, which wait: a process that was replaced just before the run ended is reported, too."""
        for _ in range(2):  # the first may find a question that its process did not live to answer
            self(PATIENCE_S)

    def _look(self, place: int, question: Any) -> None:
        try:
            pid = self.pid_of(ray.get(question, timeout=PATIENCE_S))  # it is there
        except ray.exceptions.ActorDiedError as error:
            self.gone(place, error)
        except ray.exceptions.RayError:  # it is started again; its callers wait for the next one, or end the run
            pass
        else:
            if self._pids.setdefault(place, pid) != pid:
                self._pids[place] = pid
                self.replaced(place, pid)


def process_of(actor: Any) -> Pulse | None:
    """The process of an actor, in Ray's tables; None if its constructor has not ended, or if it is gone."""
    with contextlib.suppress(ray.exceptions.RayError, AttributeError, KeyError):  # Ray has no public way to ask
        found = cast("Any", actors)(getattr(actor, "process", actor)._actor_id.hex())
        if found["State"] == "ALIVE":
            address = found["Address"]
            return Pulse(pid=found["Pid"], node=address["NodeID"], host=address["IPAddress"])
    return None


def _at_work(pulse: Pulse, method: str, *, stops: bool) -> str:
    """A process, and the newest frames of the thread that executes ``method``. stops: see ``take_stack``."""
    stack = _on_node(pulse.node, take_stack, pulse.pid, pulse.log, stops) or ""
    return f"(process {pulse.pid} on {pulse.host}), stack: {frames_of(stack, method) or 'none'}"


def _on_node(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """The answer of ``function``, called on a node; None if the node does not answer."""
    if node == ray.get_runtime_context().get_node_id():
        return function(*args)
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    try:
        task = cast("Any", ray.remote)(num_cpus=0, max_retries=0, scheduling_strategy=place)(function)
        return ray.get(task.remote(*args), timeout=NODE_S)
    except ray.exceptions.RayError:  # fault boundary: what is on a lost node dies with it
        return None
