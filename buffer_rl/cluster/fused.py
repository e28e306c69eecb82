"""Processes with the members of one role or of several: fused roles share a place and a device, and die together.

Who waits for whom: the calls of a role follow one another on a thread of its own, so that no role waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import ray


@dataclass(frozen=True, slots=True)
class Deferred:
    """A member before its construction, which happens in the process that it is sent to."""

    member_class: type
    args: tuple[Any, ...] = ()

    def construct(self) -> Any:
        """The member. Raises what its constructor raises."""
        return self.member_class(*self.args)


class FusedProcess:
    """A process with one member of each role."""

    def __init__(self, members: Mapping[str, Deferred]) -> None:
        self._members = {role: member.construct() for role, member in members.items()}

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the member of ``role``."""
        return getattr(self._members[role], method)(*args)


@dataclass(frozen=True, slots=True)
class FusedMember:
    """The member of one role of a process, called as an actor of its own."""

    process: Any
    role: str

    def __getattr__(self, method: str) -> Any:
        return _Method(self.process, self.role, method)


@dataclass(frozen=True, slots=True)
class _Method:
    process: Any
    role: str
    method: str

    def remote(self, *args: Any) -> Any:
        call = self.process.call.options(concurrency_group=self.role)
        return call.remote(self.role, self.method, args)


class FusedProcesses:
    """Starts one process a rank for the members of all its roles, when the first role asks for it.

    members: of a rank, by role. options: of a rank, for its actor.
    """

    def __init__(
        self,
        members: Callable[[int], Mapping[str, Deferred]],
        options: Callable[[int], Mapping[str, Any]] = lambda rank: {},
    ) -> None:
        self._members = members
        self._options = options
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
        threads = {"concurrency_groups": dict.fromkeys(members, 1)}
        options = {"num_cpus": 0, "max_restarts": 0, **self._options(rank), **threads}
        return cast(Any, ray.remote)(**options)(FusedProcess).remote(members)
