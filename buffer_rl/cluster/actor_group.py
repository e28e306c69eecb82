"""The members of a role: actors that are started, called, replaced and stopped together; their log files.

A process has the member of one role or of several: fused roles share a place and a device, and die together.

Who waits for whom: the caller waits for ``Call.wait``, with a deadline. A member waits for no other through the group.
The calls of a fused role follow one another on a thread of its own, so that no role waits for another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import ray

from buffer_rl.cluster.calling import PATIENCE_S, Call
from buffer_rl.cluster.dispatch import Method, To, Ts, dispatch_of, plan_calls
from buffer_rl.cluster.member import PULSE, Member, write_stack_at_signal
from buffer_rl.errors import WorkerDiedError
from buffer_rl.records.groups import Topology


@dataclass(eq=False)
class ActorGroup:
    """The members of one role.

    A call names a method of the members' class: ``group.call(TrainRank.fetch, 3, timeout_s=60)``. What the method
    declares with ``dispatch`` says where the call goes, and what its answer is.

    start_member: starts the actor of a rank, at first and in place of one that died. places: of the members among the
    ranks of a trainer; where absent, each is a replica of its own.
    independent: members do not share their work, so that a restart replaces the dead alone. timeout_s: deadline of each
    call that a restart makes.
    hung: of members whose processes were ended because they hung, by name, what is to be said of it.
    """

    role: str
    start_member: Callable[[int], Any]
    size: InitVar[int] = 1
    _: KW_ONLY
    places: Sequence[Topology] = ()
    independent: bool = False
    timeout_s: float = 60.0

    def __post_init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"the group {self.role!r} has no members")
        self.hung: dict[str, str] = {}
        self.actors = [self.start_member(rank) for rank in range(size)]
        self.places = list(self.places) or [Topology(dp_rank=rank, dp_size=size) for rank in range(size)]
        self._turns = itertools.count()
        self._under_way: dict[tuple[int, int], str] = {}
        self._order = threading.Lock()
        self._kept: Callable[[], object] = lambda: None

    @classmethod
    def of(cls, role: str, member_class: type, args: Callable[[int], tuple[Any, ...]], size: int, **more: Any) -> Self:
        """A group of ``size`` members that Ray starts: their constructors get ``args(rank)``.

        more: ``options``, of a rank for its actor (``num_gpus``, ``runtime_env``, …), and what the class takes."""
        options: Callable[[int], Mapping[str, Any]] = more.pop("options", lambda rank: {})

        def start(rank: int) -> Any:
            chosen = {"num_cpus": 0, "max_restarts": 0, **options(rank)}
            if issubclass(member_class, Member):
                chosen["concurrency_groups"] = {PULSE: 1}
            return cast("Any", ray.remote)(**chosen)(member_class).remote(*args(rank))

        return cls(role, start, size, **more)

    def start(self, method: Method[*Ts], *args: *Ts) -> Call:
        """Call ``method`` on the members that it is dispatched to; returns at once."""
        name, declared = method.__name__, dispatch_of(method)
        calls, collect = plan_calls(declared, args, self.places, next(self._turns) if declared.to is To.ONE else 0)
        with self._order:  # of two threads' calls, which have members wait for each other, the same for all
            refs = {rank: getattr(self.actors[rank], name).remote(*own) for rank, own in calls.items()}
        futures = {rank: ref.future() for rank, ref in refs.items()}
        for rank, future in futures.items():
            self._note(rank, name, future)
        return Call(
            role=self.role,
            method=name,
            members=[self.name_of(rank) for rank in calls],
            futures=[*futures.values()],
            collect=collect,
            hung=self.hung,
            timeout_s=self.timeout_s,
            refs=[*refs.values()],
        )

    def _note(self, rank: int, method: str, future: Future[Any]) -> None:
        key = rank, id(future)
        self._under_way[key] = method
        future.add_done_callback(lambda _: self._under_way.pop(key, None))

    def under_way(self, rank: int) -> list[str]:
        """The methods that were called on a member and have not answered, the oldest first."""
        return [method for (member, _), method in list(self._under_way.items()) if member == rank]

    def name_of(self, rank: int) -> str:
        """What errors and notices call a member."""
        return f"{self.role} {rank}" if len(self.actors) > 1 else self.role

    def call(self, method: Method[*Ts], *args: *Ts, timeout_s: float) -> Any:
        """``start`` and wait for the answer. Raises DeadlineError, or a member's error, named."""
        return self.start(method, *args).wait(timeout_s)

    def call_and_keep(self, method: Method[*Ts], *args: *Ts) -> bool:
        """``do_and_keep`` of ``call`` with these."""
        return self.do_and_keep(partial(self.call, method, *args, timeout_s=self.timeout_s))

    def do_and_keep(self, give: Callable[[], object]) -> bool:
        """Call ``give``, which brings the members to a state, now and for those that replace them, in place of what was
        kept before. Returns whether it was done; that a member died is not an error here, since the next call fails
        with its death and has it replaced."""
        self._kept = give
        try:
            give()
        except WorkerDiedError as error:
            if not error.where.startswith(self.role):  # a process that gives
                raise
            return False
        return True

    def restart(self) -> None:
        """Replace the members: those that died where they are independent, else all of them, which are ready then and
        have been brought to the state that was kept."""
        for rank, actor in enumerate(self.actors):
            if not self.independent or is_dead(actor):
                _kill(actor)
                self.hung.pop(self.name_of(rank), None)
                self.actors[rank] = self.start_member(rank)
        if self.independent:
            with contextlib.suppress(WorkerDiedError):  # the next call finds who died
                self._kept()
            return
        self.call(Member.ready, timeout_s=self.timeout_s)
        self._kept()

    def stop(self, close: Method[()] | None = None, timeout_s: float = 0.0) -> None:
        """End the members' processes. Never raises: it is called while another error is on its way.

        close: a method that every member is asked to execute first, within ``timeout_s`` for all of them.
        """
        if close is not None:
            asked: list[Future[Any]] = []
            for actor in self.actors:
                with contextlib.suppress(Exception):  # fault boundary: a member, or Ray itself, may be gone
                    asked.append(getattr(actor, close.__name__).remote().future())
            wait(asked, timeout=timeout_s)
        for actor in self.actors:
            _kill(actor)


class FusedProcess:
    """A process with one member of each role. members: what makes each, in the process that it is sent to."""

    def __init__(self, members: Mapping[str, Callable[[], Any]]) -> None:
        self._members = {role: make() for role, make in members.items()}

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the member of ``role``."""
        return getattr(self._members[role], method)(*args)


@dataclass(frozen=True, slots=True)
class FusedMember:
    """The member of one role of a process, called as an actor of its own."""

    process: Any
    role: str

    def __getattr__(self, method: str) -> Any:
        call = self.process.call.options(concurrency_group=PULSE if method == PULSE else self.role)
        handle = SimpleNamespace(remote=lambda *args: call.remote(self.role, method, args))
        handle.options = lambda **_: handle
        return handle


@dataclass(eq=False)
class FusedProcesses:
    """Starts one process a rank for the members of all its roles, when the first role asks for it.

    members: of a rank, by role, what makes each in its process. options: of a rank, for its actor.
    """

    _members: Callable[[int], Mapping[str, Callable[[], Any]]]
    _options: Callable[[int], Mapping[str, Any]] = lambda rank: {}

    def __post_init__(self) -> None:
        self._processes: dict[int, Any] = {}
        self._given: dict[tuple[str, int], Any] = {}

    def start_member(self, role: str, rank: int) -> FusedMember:
        """The member of a role, for ``ActorGroup``; asked for again, one of a process that replaces the one before,
        which may have been started for another role already."""
        process = self._processes.get(rank)
        if process is None or process is self._given.get((role, rank)):
            process = self._processes[rank] = self._started(rank)
        self._given[role, rank] = process
        return FusedMember(process, role)

    def _started(self, rank: int) -> Any:
        members = self._members(rank)
        threads = {"concurrency_groups": dict.fromkeys((*members, PULSE), 1)}
        options = {"num_cpus": 0, "max_restarts": 0, **self._options(rank), **threads}
        return cast("Any", ray.remote)(**options)(FusedProcess).remote(members)


def _kill(actor: Any) -> None:
    if not ray.is_initialized():  # or the call would start it
        return
    with contextlib.suppress(Exception):  # fault boundary: a member, or Ray itself, may be gone
        ray.kill(getattr(actor, "process", actor), no_restart=True)


def is_dead(actor: Any) -> bool:
    """Whether an actor's process is gone. One that does not answer at once is at work."""
    asked = actor.__ray_ready__.remote()
    with contextlib.suppress(Exception):  # fault boundary: whatever it answers, it is there
        try:
            ray.get(asked, timeout=PATIENCE_S)
        except ray.exceptions.RayActorError:
            return True
    return False


def redirect_output(path: str) -> None:
    """Send this process's standard output and error, and those of its children, to the end of ``path``; at a signal,
    the stack of its threads too."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Python's own streams may write to Ray's copies of the descriptors: point them at the file as well.
    # What user code prints may be any text, and no locale's encoding may fail for it.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    write_stack_at_signal()
