"""A list that is made when it is first read, and travels as what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from buffer_rl.records.groups import Sample

T = TypeVar("T")


class LazyList(MutableSequence[T]):
    """``make(*args)``, which is called when an item is first read or written; ``length`` items.

    Pickled before that, it is ``make`` and ``args``, and arrives as the list that these give; afterwards it is a list.
    Whatever ``args`` hold is shared by all lists that are made of them, so ``make`` copies what may be changed.
    """

    def __init__(self, length: int, make: Callable[..., list[T]], *args: Any) -> None:
        self._source = length, make, args
        self._made: list[T] | None = None

    @property
    def is_made(self) -> bool:
        """Whether an item was read or written."""
        return self._made is not None

    def unmade(self) -> LazyList[T]:
        """The list as it was before an item was read."""
        length, make, args = self._source
        return LazyList(length, make, *args)

    @property
    def _items(self) -> list[T]:
        if self._made is None:
            _, make, args = self._source
            self._made = make(*args)
        return self._made

    def __len__(self) -> int:
        return self._source[0] if self._made is None else len(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._items[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._items[index]

    def insert(self, index: int, value: T) -> None:
        self._items.insert(index, value)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self._items, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self._items]

    def copy(self) -> list[T]:
        """A list of the items."""
        return [*self._items]

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """As of a list."""
        self._items.sort(key=key, reverse=reverse)

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, LazyList) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        _, make, args = self._source
        return (make, args) if self._made is None else (list, (self._made,))


def prompt_copies(prompt: Sample, count: int) -> list[Sample]:
    """``count`` copies of one prompt, made when they are first read. Their ``sample_index`` and ``index`` count up from
    those of ``prompt``; they share no value that can be changed, multimodal ones excepted: these may be large."""
    return cast("list[Sample]", LazyList(count, _copies, prompt, count))


def _copies(prompt: Sample, count: int) -> list[Sample]:
    def copied(value: Any) -> Any:
        return value if value is None or isinstance(value, str) else deepcopy(value)

    return [prompt.as_prompt(number, copied) for number in range(count)]
