"""Marks on plugin functions: the rows that they need together, and whether rows of data may choose them.

An estimator or a post-processor: which rows it must see together, and so whether it can work on finished groups while a
rollout still runs. A loss: which rows no micro-batch and no rank may separate. A reward: whether rows of data may
choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar

from buffer_rl.errors import ConfigError


class Scope(StrEnum):
    """What an estimator or a post-processor must see together before it can answer: a row by itself, all rows of a
    prompt, or all rows of a rollout."""

    ROW = "row"
    GROUP = "group"
    ROLLOUT = "rollout"


F = TypeVar("F", bound=Callable[..., Any])


def scoped(scope: Scope | str, *, needs: Iterable[str] = ()) -> Callable[[F], F]:
    """Decorator that declares the scope of a plugin's function: ``@scoped("group")``.

    An advantage estimator of scope ``group`` reads nothing beyond the rows of one prompt, and one of scope ``row``
    computes each row from that row alone. Only these can work on finished groups while a rollout still runs. One of
    scope ``rollout``, and one that declares nothing, is called once with all rows of a rollout, before ranks and
    optimizer steps share them.

    needs: columns that an advantage estimator reads. It is called when they are there. Of ``ref_log_probs``,
    ``teacher_log_probs`` and ``old_log_probs`` it sees only those that are named; ``old_log_probs`` are computed before
    the first optimizer step only if something names them (``buffer_rl.plan.algorithm.old_log_probs_pass``).
    """
    return _marked(scope=Scope(scope), needs=_names(needs))


class Unit(StrEnum):
    """What a loss must see together: a token by itself, all tokens of a row, or all rows of a prompt."""

    TOKEN = "token"
    ROW = "row"
    GROUP = "group"


def loss_unit(unit: Unit | str, *, needs: Iterable[str] = ()) -> Callable[[F], F]:
    """Decorator that declares what a loss must see together: ``@loss_unit("group")`` for one that compares the rows of
    a prompt, whose rows then stay in one micro-batch on one rank. A loss that declares nothing has the unit ``row``.

    needs: columns that the loss reads beside the usual ones; a run whose rows lack one ends with its name.
    """
    return _marked(unit=str(unit), needs=_names(needs))  # looked at by unit_of


def unit_of(function: object) -> Unit:
    """The unit that ``loss_unit`` declared, or the attribute ``unit`` of an object; ``row`` where there is none.

    Raises ConfigError for another text, and for a loss that declares a scope, as losses did, in place of a unit."""
    unit = getattr(function, "unit", None)
    hint = "write @buffer_rl.kinds.marks.loss_unit('group') if it compares the rows of a prompt, else loss_unit('row')"
    if unit is None and declared_scope(function) is not None:
        raise ConfigError("the loss declares a scope", where=str(function), expected="a unit", hint=hint)
    if isinstance(unit, str) and unit not in set(Unit):
        raise ConfigError(f"there is no unit {unit!r}", where=str(function), expected="token, row or group", hint=hint)
    return Unit(unit) if isinstance(unit, str) else Unit.ROW


def _names(needs: Iterable[str]) -> frozenset[str]:
    return frozenset([needs] if isinstance(needs, str) else needs)


def _marked(**marks: object) -> Callable[[F], F]:
    def mark(function: F) -> F:
        for name, value in marks.items():
            setattr(function, name, value)
        return function

    return mark


def scope_of(function: object) -> Scope:
    """The scope that ``scoped`` declared, or the attribute ``scope`` of an object; ``rollout`` where there is none."""
    return declared_scope(function) or Scope.ROLLOUT


def declared_scope(function: object) -> Scope | None:
    """``scope_of``, but None where nothing is declared. An attribute ``scope`` with another value declares nothing."""
    scope = getattr(function, "scope", None)
    return Scope(scope) if isinstance(scope, str) and scope in set(Scope) else None


def needs_of(function: object) -> frozenset[str]:
    """The columns that ``scoped`` or ``loss_unit`` declared as needed; none where nothing was declared."""
    needs = getattr(function, "needs", None)
    return _names(needs) if isinstance(needs, str | frozenset | set | tuple | list) else frozenset()


def rows_may_choose(reward: F) -> F:
    """Decorator that marks a reward as safe for data to choose: a function, asynchronous or not, a class, an instance.

    It promises that the reward treats everything in a row and in a response as text: it evaluates nothing as code but
    in a sandbox, opens no file that they name, and sends them to no address but one of the run's options. Rows may
    choose it by ``rm_type`` or ``rewards`` in their metadata if the run lists its name in ``--row-rm-types``.
    """
    return _marked(rows_may_choose=True)(reward)


def at_once(reward: F) -> F:
    """Decorator that marks a synchronous reward as one that takes microseconds: it is called in the rollout worker,
    where the samples are, in place of a process of its own.

    It promises that its time grows with the length of its texts at most linearly, and that it never waits. Nothing ends
    a call: ``--rm-timeout-s`` does not apply.
    """
    return _marked(at_once=True)(reward)


def is_at_once(reward: object) -> bool:
    """Whether the author marked a reward with ``at_once``."""
    return getattr(reward, "at_once", None) is True


def is_for_rows(reward: object) -> bool:
    """Whether the author marked a reward with ``rows_may_choose``."""
    return getattr(reward, "rows_may_choose", None) is True
