"""The base class of data sources under slime's name; the Buffer reads ``--prompt-data`` and keeps the queue itself."""

from __future__ import annotations

import abc
from typing import Any


class DataSource(abc.ABC):
    """A data source of the user's (``--data-source-path``). ``add_samples`` is never called: the queue is the
    Buffer's. ``rollout_id`` counts batches, and ``args.save`` and ``args.load`` are a folder for this state alone."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Any]:
        """The next prompt groups, each the list of its samples."""

    @abc.abstractmethod
    def save(self, rollout_id: Any) -> None:
        """Write where the source stands into files below ``args.save``."""

    @abc.abstractmethod
    def load(self, rollout_id: Any = None) -> None:
        """Go on from the files below ``args.load``."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of rows."""


def pop_first(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
    """The oldest entries of the queue, which are taken out of the list ``buffer``."""
    taken, buffer[:num_samples] = buffer[:num_samples], []
    return taken
