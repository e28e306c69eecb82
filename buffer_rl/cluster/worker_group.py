"""A group of worker processes for programs of your own: a class, a process a rank, called as if it were one object.

    with ray_session(None), WorkerGroup(ClassWithArgs(Scorer, scale=2.0), ResourcePool([2])) as group:
        scores = group.score(["a", "b", "c"])

It is an ``ActorGroup`` whose methods are attributes. The caller waits for each answer, with a deadline; a worker waits
for answers that it gets as arguments, which calls before its own give.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from buffer_rl.cluster.actor_group import ActorGroup, FusedProcesses
from buffer_rl.cluster.calling import Call
from buffer_rl.cluster.dispatch import Cut, F, To, all_answers, declared_methods, settled
from buffer_rl.cluster.dispatch import dispatch as declare
from buffer_rl.cluster.environment import set_variables
from buffer_rl.cluster.member import Member
from buffer_rl.errors import ConfigError, DeadlineError, WorkerError
from buffer_rl.plan.layout import Layout


def register(dispatch: To | tuple[Cut, Callable[[list[Any]], Any]] = To.ALL) -> Callable[[F], F]:
    """Declare that a method of a worker's class is called through its group, and how.

    dispatch: see ``To``. The answer of ALL and of HEADS is the list of the workers' answers, by rank; that of ONE is
    the worker's; that of SCATTER the list of all rows' values. Or a pair of functions of your own: what each worker
    gets, ``(places, *arguments) -> {rank: tuple of its arguments}``; and the answer, ``(answers by rank) -> answer``.

    Raises ConfigError for a coroutine, and for parameters that can be given by name alone.
    """

    def register_method(method: F) -> F:
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
        if inspect.iscoroutinefunction(method) or kinds & by_name:
            what = "a worker's method is a coroutine, or has parameters that are given by name alone"
            where = method.__qualname__
            raise ConfigError(what, where=where, expected="a plain method, whose parameters may be given by place")
        if isinstance(dispatch, To):
            return declare(dispatch, collect=all_answers if dispatch is To.ALL else None)(method)
        cut, collect = dispatch
        return declare(cut, collect=lambda _, answers: collect(answers))(method)

    return register_method


class ClassWithArgs:
    """A worker before its construction, which happens in its own process: the class, and what its constructor gets."""

    def __init__(self, worker_class: type, /, *args: Any, **kwargs: Any) -> None:
        self.worker_class = worker_class
        self.make: Callable[[], Any] = partial(worker_class, *args, **kwargs)


@dataclass(frozen=True)
class ResourcePool:
    """What a group of workers takes of the cluster.

    processes: workers on a node, for each node; Ray chooses the nodes, and may choose one twice if it has room.
    cpus, gpus: of each worker; a fraction of a GPU is shared. timeout_s: the longest wait for them.
    """

    processes: Sequence[int]
    cpus: float = 0.0
    gpus: float = 0.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.processes or min(self.processes) < 1:
            what = f"a pool has {list(self.processes)} processes"
            raise ConfigError(what, where="ResourcePool", expected="at least one on each node")

    @property
    def size(self) -> int:
        """All processes."""
        return sum(self.processes)

    def local_ranks(self) -> list[tuple[int, int]]:
        """For each process its node, counted from 0, and its number there."""
        return [(node, local) for node, count in enumerate(self.processes) for local in range(count)]

    @contextmanager
    def reserved(self) -> Iterator[list[Any]]:
        """Ray's placement group of each node, for the length of the block, at whose end Ray ends the actors in it.
        Raises DeadlineError."""
        asked = {kind: amount for kind, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}
        deadline = time.monotonic() + self.timeout_s
        groups: dict[int, Any] = {}
        try:
            # One after the other, the largest first: a small one may have taken the room of a large one.
            for node in sorted(range(len(self.processes)), key=lambda node: -self.processes[node]):
                # Ray refuses empty ones: a byte is as nothing.
                bundles = [asked or {"memory": 1}] * self.processes[node]
                groups[node] = placement_group(bundles, strategy="STRICT_PACK")
                if not groups[node].wait(max(0.0, deadline - time.monotonic())):
                    what = f"no node has {asked} free for each of {len(bundles)} workers after {self.timeout_s:g} s"
                    hint = "ask for fewer workers on a node or less for each, or wait longer with timeout_s"
                    raise DeadlineError(what, where="ResourcePool", hint=hint)
            yield [groups[node] for node in range(len(self.processes))]
        finally:
            if ray.is_initialized():
                for group in groups.values():
                    remove_placement_group(group)


class WorkerGroup:
    """Workers of one class, a process each. Every method that the class registers is an attribute of the group.

    ``group.score(rows)`` waits for the answer, ``timeout_s`` at most. ``group.score.start(rows)`` returns at once: its
    result has ``wait(timeout_s)``, and is an argument of further calls, also of other groups, as if it were the answer.

    layout: replicas of several ranks; if it is absent, each worker is a replica of its own. name: in errors, which say
    ``name rank.method``. A worker finds ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` in its environment.

    Raises ConfigError for a class without registered methods, a layout of another size, and if Ray is not started;
    DeadlineError if the pool's resources are not free; WorkerError if a constructor fails.
    """

    def __init__(
        self,
        worker: ClassWithArgs,
        pool: ResourcePool,
        *,
        layout: Layout | None = None,
        name: str = "",
        timeout_s: float = 600.0,
    ) -> None:
        self._name = name or worker.worker_class.__name__
        self._methods = _checked_methods(worker.worker_class)
        ranks = layout or Layout(dp_size=pool.size)
        if ranks.world_size != pool.size:
            what = f"a layout of {ranks.world_size} ranks"
            raise ConfigError(what, where=self._name, expected=f"{pool.size}, as many as the pool has")
        if not ray.is_initialized():
            raise ConfigError("Ray is not started", where=self._name, hint="with ray_session(None): …")
        with ExitStack() as stack:
            reserved = stack.enter_context(pool.reserved())
            local = pool.local_ranks()

            def options(rank: int) -> dict[str, Any]:
                strategy = PlacementGroupSchedulingStrategy(reserved[local[rank][0]], local[rank][1])
                return {"num_cpus": pool.cpus, "num_gpus": pool.gpus, "scheduling_strategy": strategy}

            def members(rank: int) -> dict[str, Callable[[], _Worker]]:
                return {self._name: partial(_Worker, worker.make, rank, pool.size, local[rank][1])}

            start = partial(FusedProcesses(members, options).start_member, self._name)
            places = [ranks.topology(rank) for rank in range(pool.size)]
            self._members = ActorGroup(self._name, start, pool.size, places=places, timeout_s=timeout_s)
            self._members.call(Member.ready, timeout_s=timeout_s)
            self._stack = stack.pop_all()

    def __getattr__(self, name: str) -> GroupMethod:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            known = sorted(methods)
            raise AttributeError(f"{self.__dict__.get('_name')} registers no method {name!r}; expected: one of {known}")
        return GroupMethod(self._members, methods[name])

    def restart(self) -> None:
        """Replace all workers by new ones, after one died or hung. Raises what the start of the group does."""
        self._members.restart()

    def stop(self) -> None:
        """End the workers' processes, and give back what they had."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class GroupMethod:
    """A method of the workers of a group."""

    _members: ActorGroup
    _method: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The answer. Raises DeadlineError, a worker's error with its name, or what ``start`` raises."""
        return self.start(*args, **kwargs).wait()

    def start(self, *args: Any, **kwargs: Any) -> Call:
        """The call under way. Raises ConfigError for arguments that cannot be dispatched, TypeError for others than
        the method has."""
        bound = inspect.signature(self._method).bind(None, *args, **kwargs)
        if kwargs:
            bound.apply_defaults()
        try:
            return self._members.start(self._method, *bound.args[1:])
        except ValueError as error:
            raise ConfigError(str(error), where=f"{self._members.role}.{self._method.__name__}") from error


class _Worker:
    """A worker in its process: what its code raises to end the process is an error of the call."""

    def __init__(self, make: Callable[[], Any], rank: int, size: int, local_rank: int) -> None:
        set_variables({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)})
        self._made = _contained(make)

    def ready(self) -> None:
        """Answers once the worker is there."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(_contained, getattr(self._made, method))


def _contained(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*settled(args))
    except Exception:
        raise
    except BaseException as error:  # fault boundary: user code may raise SystemExit
        raise WorkerError(f"it raised {type(error).__name__}: {error}") from error


def _checked_methods(worker_class: type) -> dict[str, Callable[..., Any]]:
    methods = declared_methods(worker_class)
    if not methods:
        raise ConfigError("no method is registered", where=worker_class.__name__, expected="@register() above a method")
    if taken := sorted(name for name in methods if hasattr(WorkerGroup, name) or hasattr(_Worker, name)):
        what = f"the group has {taken} itself"
        raise ConfigError(what, where=worker_class.__name__, expected="methods of other names")
    return methods
