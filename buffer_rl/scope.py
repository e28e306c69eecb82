"""Marks on plugin functions: the rows that they need together, and whether rows of data may choose them.

An estimator, a loss or a post-processor: which rows it must see together, and so whether it can work on finished groups
while a rollout still runs, and on a rank's share of the rows. A reward: whether rows of data may choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar


class Scope(StrEnum):
    """What an estimator, a loss or a post-processor must see together before it can answer: a row by itself, all rows
    of a prompt, or all rows of a rollout."""

    ROW = "row"
    GROUP = "group"
    ROLLOUT = "rollout"


F = TypeVar("F", bound=Callable[..., Any])


def scoped(scope: Scope | str, *, needs: Iterable[str] = ()) -> Callable[[F], F]:
    """Decorator that declares the scope of a plugin's function: ``@scoped("group")``.

    An advantage estimator of scope ``group`` reads nothing beyond the rows of one prompt, and one of scope ``row``
    computes each row from that row alone. A loss of scope ``group`` (or ``row``, which means the same for it) is a sum
    over rows that it divides by ``inputs.total_samples`` or ``inputs.total_tokens``, whichever
    ``args.loss_agg_mode`` names. Only these can work on finished groups while a rollout still runs. What declares
    nothing has scope ``rollout``.

    needs: of an advantage estimator, the log-probabilities that it reads: ``ref_log_probs``, ``old_log_probs``. It is
    called when they are there. Whatever the rollout itself gives need not be named.
    """
    named = frozenset([needs] if isinstance(needs, str) else needs)

    def declare(function: F) -> F:
        function.scope = Scope(scope)  # type: ignore[attr-defined]
        function.needs = named  # type: ignore[attr-defined]
        return function

    return declare


def scope_of(function: object) -> Scope:
    """The scope that ``scoped`` declared, or the attribute ``scope`` of an object; ``rollout`` where there is none."""
    return declared_scope(function) or Scope.ROLLOUT


def declared_scope(function: object) -> Scope | None:
    """``scope_of``, but None where nothing is declared. An attribute ``scope`` with another value declares nothing."""
    scope = getattr(function, "scope", None)
    return Scope(scope) if isinstance(scope, str) and scope in set(Scope) else None


def needs_of(function: object) -> frozenset[str]:
    """The fields that ``scoped`` declared as needed; none where nothing was declared."""
    needs = getattr(function, "needs", None)
    return needs if isinstance(needs, frozenset) else frozenset()


def rows_may_choose(reward: F) -> F:
    """Decorator that marks a reward as safe for data to choose: a function, asynchronous or not, a class, an instance.

    It promises that the reward treats everything in a row and in a response as text to compare: it evaluates nothing
    as code, opens no file that they name, and sends nothing elsewhere. Rows may choose it by the name ``rm_type`` in
    their metadata where the run lists that name in ``--row-rm-types``.
    """
    reward.rows_may_choose = True  # type: ignore[attr-defined]
    return reward


def is_for_rows(reward: object) -> bool:
    """Whether the author marked a reward with ``rows_may_choose``."""
    return getattr(reward, "rows_may_choose", None) is True
