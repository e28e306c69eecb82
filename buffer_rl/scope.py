"""What an estimator, a loss or a post-processor says of itself: whether it can work on finished groups while a rollout
still runs."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar


class Scope(StrEnum):
    """What an estimator, a loss or a post-processor must see before it can answer."""

    GROUP = "group"
    ROLLOUT = "rollout"


F = TypeVar("F", bound=Callable[..., Any])


def scoped(scope: Scope | str) -> Callable[[F], F]:
    """Decorator that declares the scope of a plugin's function: ``@scoped("group")``.

    An advantage estimator of scope ``group`` reads nothing beyond the rows of one prompt. A loss of scope ``group`` is
    a sum over rows that it divides by ``inputs.total_rows`` or ``inputs.total_tokens``, whichever
    ``args.loss_agg_mode`` names. Only these can work on finished groups while a rollout still runs. What declares
    nothing has scope ``rollout``.
    """

    def declare(function: F) -> F:
        function.scope = Scope(scope)  # type: ignore[attr-defined]
        return function

    return declare


def scope_of(function: object) -> Scope:
    """The scope that ``scoped`` declared, or the attribute ``scope`` of an object; ``rollout`` where there is none."""
    return Scope(getattr(function, "scope", Scope.ROLLOUT))
