"""Which members of a group a call goes to, what each gets of its arguments, and how their answers become one: declared
beside each method.

Pure logic, without Ray. A method without a declaration goes to all members, and the first one's answer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, TypeVarTuple

from buffer_rl.errors import WorkerError
from buffer_rl.records.groups import Topology, TrainBatch

F = TypeVar("F", bound=Callable[..., Any])
Ts = TypeVarTuple("Ts")
Method = Callable[[Any, *Ts], object]
"""A method of a class whose objects are in other processes, such as ``TrainRank.fetch``, with what it takes."""
Collect = Callable[[str, list[Any]], Any]
"""Makes one answer of the members' answers: ``(role, answers in rank order) -> answer``."""

Cut = Callable[..., Mapping[int, tuple[Any, ...]]]
"""What each member that is called gets, by rank: ``(places of the members, *arguments) -> {rank: its arguments}``."""

_ATTRIBUTE = "_buffer_rl_dispatch"


class To(StrEnum):
    """The members that a call goes to.

    ALL: every member, with equal arguments. HEADS: the head of each replica. ONE: the next member, in turn. SCATTER:
    every member, with its replica's share of each argument that is a list or a ``TrainBatch``; the heads answer with
    one value for each of their rows, and these are joined in the order of the caller's rows.
    """

    ALL = "all"
    HEADS = "heads"
    ONE = "one"
    SCATTER = "scatter"


def first_answer(role: str, answers: list[Any]) -> Any:
    """For methods that all members answer alike, and for single members."""
    return answers[0]


def all_answers(role: str, answers: list[Any]) -> list[Any]:
    """The answers of the members that were called, in rank order."""
    return answers


class Later:
    """An answer that is not there yet. As an argument of another call it is waited for by the member that gets it."""

    __slots__ = ()

    def wait(self, timeout_s: float | None = None) -> Any:
        """The answer, once it is there. Raises DeadlineError after ``timeout_s``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a method declares with ``dispatch``."""

    to: To | Cut = To.ALL
    collect: Collect = first_answer


def dispatch(to: To | Cut = To.ALL, *, collect: Collect | None = None) -> Callable[[F], F]:
    """Declare how a method of a member's class is called through its group.

    to: or a function of the caller's own that says what each member gets.
    collect: makes one answer of those of the members that answer. Where absent: the first member's for ALL and ONE, the
    list of all for HEADS and for a function, the joined rows for SCATTER.
    """
    default = first_answer if to in (To.ALL, To.ONE) else all_answers

    def declare(method: F) -> F:
        setattr(method, _ATTRIBUTE, Dispatch(to, collect or default))
        return method

    return declare


def dispatch_of(method: Callable[..., Any]) -> Dispatch:
    """What is declared for a method of a class; ``Dispatch()`` if nothing is."""
    return getattr(method, _ATTRIBUTE, Dispatch())


def declared_methods(member_class: type) -> dict[str, Callable[..., Any]]:
    """The methods of a class that declare how they are called, by name."""
    found = {name: getattr(member_class, name, None) for name in dir(member_class)}
    return {name: method for name, method in found.items() if callable(method) and hasattr(method, _ATTRIBUTE)}


def plan_calls(
    declared: Dispatch, args: tuple[Any, ...], places: Sequence[Topology], turn: int = 0
) -> tuple[dict[int, tuple[Any, ...]], Collect]:
    """What each member that is called gets, by rank, and what makes one answer of theirs.

    places: of the members, in rank order. turn: how many calls to ONE member there were before. The caller's arguments
    are not changed. Raises ValueError for arguments that cannot be scattered, and for ranks that there are not."""
    ranks = list(range(len(places)))
    heads = [rank for rank in ranks if places[rank].is_head]
    if not isinstance(declared.to, To):
        own = dict(sorted(declared.to(places, *args).items()))
        if not own or set(own) - set(ranks) or not all(isinstance(given, tuple) for given in own.values()):
            raise ValueError(f"a dispatch gave {own!r:.200}; expected: a tuple of arguments for some of ranks {ranks}")
        return own, declared.collect
    if declared.to is To.SCATTER:
        return _scattered(declared, args, places, heads)
    chosen = {To.ALL: ranks, To.HEADS: heads, To.ONE: [turn % len(ranks)]}[declared.to]
    return dict.fromkeys(chosen, args), declared.collect


@dataclass(frozen=True, slots=True)
class _Share:
    """The rows of one replica, of an argument that is not there yet. num_rows: of the others; None if all are late."""

    of: Later
    replica: int
    num_replicas: int
    num_rows: int | None


def _scattered(
    declared: Dispatch, args: tuple[Any, ...], places: Sequence[Topology], heads: list[int]
) -> tuple[dict[int, tuple[Any, ...]], Collect]:
    num_replicas = places[0].dp_size
    late = next((arg for arg in args if isinstance(arg, Later)), None)
    rows = [arg for arg in args if isinstance(arg, list | TrainBatch)]
    known = _common_length(rows) if rows or late is None else None

    def own(replica: int) -> tuple[Any, ...]:
        shares = [_Share(arg, replica, num_replicas, known) if isinstance(arg, Later) else arg for arg in args]
        chosen = [] if known is None else rows_of_replica(known, replica, num_replicas)
        return tuple(_take(arg, chosen) if isinstance(arg, list | TrainBatch) else arg for arg in shares)

    def join(role: str, answers: list[Any]) -> Any:
        num_rows = len(late.wait()) if known is None and late is not None else known or 0
        size = len(rows_of_replica(num_rows, 0, num_replicas))
        of_heads = sorted((places[rank].dp_rank, rank) for rank in heads)
        parts = [answers[rank] for _, rank in of_heads]
        if wrong := [part for part in parts if not (isinstance(part, list) and len(part) == size)]:
            raise WorkerError(f"a member answered {wrong[0]!r:.200}", where=role, expected=f"a list of {size} values")
        return declared.collect(role, [value for part in parts for value in part][:num_rows])

    per_replica = [own(replica) for replica in range(num_replicas)]
    return {rank: per_replica[place.dp_rank] for rank, place in enumerate(places)}, join


def rows_of_replica(num_rows: int, replica: int, num_replicas: int) -> list[int]:
    """The rows that a replica gets, as many as the others: if they do not divide, the first ones again at the end,
    whose answers are dropped."""
    size = -(-num_rows // num_replicas)
    return [row % num_rows for row in range(replica * size, (replica + 1) * size)]


def settled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """In the process that is called: the arguments with answers in place of those that were not there yet. Raises
    what these calls did, and ValueError for rows that cannot be scattered."""
    shares = [arg for arg in args if isinstance(arg, _Share)]
    values = {id(share): share.of.wait() for share in shares}
    if shares:
        num_rows = _common_length([*values.values()], shares[0].num_rows)
        chosen = rows_of_replica(num_rows, shares[0].replica, shares[0].num_replicas)
        values = {key: _take(value, chosen) for key, value in values.items()}
    return tuple(
        values[id(arg)] if isinstance(arg, _Share) else arg.wait() if isinstance(arg, Later) else arg for arg in args
    )


def _common_length(rows: Sequence[Any], known: int | None = None) -> int:
    lengths = [len(each) if isinstance(each, list | TrainBatch) else type(each).__name__ for each in rows]
    lengths += [] if known is None else [known]
    if len(set(lengths)) != 1 or not isinstance(lengths[0], int):
        expected = "at least one list or TrainBatch, all with as many rows"
        raise ValueError(f"arguments to scatter have the lengths {lengths}; expected: {expected}")
    return lengths[0]


def _take(arg: Any, rows: list[int]) -> Any:
    return arg.select(rows) if isinstance(arg, TrainBatch) else [arg[row] for row in rows]
