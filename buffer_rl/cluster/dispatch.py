"""Which members of a group a call goes to, what each gets of its arguments, and how their answers become one: declared
beside each method.

Pure logic, without Ray. A method without a declaration goes to all members, and the first one's answer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a method declares with ``dispatch``."""

    to: To = To.ALL
    collect: Collect = first_answer


def dispatch(to: To = To.ALL, *, collect: Collect | None = None) -> Callable[[F], F]:
    """Declare how a method of a member's class is called through its group.

    collect: makes one answer of those of the members that answer. Where absent: the first member's for ALL and ONE, the
    list of all for HEADS, the joined rows for SCATTER.
    """
    default = first_answer if to in (To.ALL, To.ONE) else all_answers

    def declare(method: F) -> F:
        setattr(method, _ATTRIBUTE, Dispatch(to, collect or default))
        return method

    return declare


def dispatch_of(method: Callable[..., Any]) -> Dispatch:
    """What is declared for a method of a class; ``Dispatch()`` if nothing is."""
    return getattr(method, _ATTRIBUTE, Dispatch())


def plan_calls(
    declared: Dispatch, args: tuple[Any, ...], places: Sequence[Topology], turn: int = 0
) -> tuple[dict[int, tuple[Any, ...]], Collect]:
    """What each member that is called gets, by rank, and what makes one answer of theirs.

    places: of the members, in rank order. turn: how many calls to ONE member there were before. The caller's arguments
    are not changed. Raises ValueError for arguments that cannot be scattered."""
    ranks = list(range(len(places)))
    heads = [rank for rank in ranks if places[rank].is_head]
    if declared.to is To.SCATTER:
        return _scattered(declared, args, places, heads)
    chosen = {To.ALL: ranks, To.HEADS: heads, To.ONE: [turn % len(ranks)]}[declared.to]
    return dict.fromkeys(chosen, args), declared.collect


def _scattered(
    declared: Dispatch, args: tuple[Any, ...], places: Sequence[Topology], heads: list[int]
) -> tuple[dict[int, tuple[Any, ...]], Collect]:
    """Every replica gets as many rows as the others: where they do not divide, the first rows again, whose answers are
    dropped."""
    lengths = {index: len(arg) for index, arg in enumerate(args) if isinstance(arg, list | TrainBatch)}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"arguments to scatter have the lengths {list(lengths.values())}; expected: at least one list or "
            "TrainBatch, all with as many rows"
        )
    num_rows, num_replicas = next(iter(lengths.values())), places[0].dp_size
    size = -(-num_rows // num_replicas)
    shares = [[row % num_rows for row in range(k * size, (k + 1) * size)] for k in range(num_replicas)]

    def own(rows: list[int]) -> tuple[Any, ...]:
        return tuple(_rows_of(arg, rows) if index in lengths else arg for index, arg in enumerate(args))

    def join(role: str, answers: list[Any]) -> Any:
        of_heads = sorted((places[rank].dp_rank, rank) for rank in heads)
        parts = [answers[rank] for _, rank in of_heads]
        if wrong := [part for part in parts if not (isinstance(part, list) and len(part) == size)]:
            raise WorkerError(f"a member answered {wrong[0]!r:.200}", where=role, expected=f"a list of {size} values")
        return declared.collect(role, [value for part in parts for value in part][:num_rows])

    per_replica = [own(rows) for rows in shares]
    return {rank: per_replica[place.dp_rank] for rank, place in enumerate(places)}, join


def _rows_of(arg: Any, rows: list[int]) -> Any:
    return arg.select(rows) if isinstance(arg, TrainBatch) else [arg[row] for row in rows]
