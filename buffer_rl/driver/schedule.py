"""The mode as data: how far generation may run ahead of training, and what may overlap with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """The modes that ``--schedule`` takes."""

    LOCKSTEP = "lockstep"
    PIPELINED = "pipelined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """max_staleness (S): rollout r may start once the weights of version ``r - S`` are published, so at most
    S + 1 rollouts hold slots at a time. With S = 0 every sample is of exactly the version that trains on it.
    """

    mode: Mode
    max_staleness: int = 0

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must not be negative, it is {self.max_staleness}")
        if self.max_staleness != 0:
            raise ValueError(f"{self.mode} trains on samples of exactly the current version: max_staleness is 0")

    @classmethod
    def named(cls, name: str) -> Schedule:
        """The schedule that ``--schedule name`` means. Raises ``ValueError`` for an unknown name."""
        return cls(mode=Mode(name))

    @property
    def streams(self) -> bool:
        """Whether roles work on a rollout's finished groups while the rest of it is still generated; else they start
        after its last group."""
        return self.mode is not Mode.LOCKSTEP

    def may_start(self, rollout_id: int, published_version: int) -> bool:
        """Whether rollout ``rollout_id`` may start while ``published_version`` is the newest published one."""
        return rollout_id <= published_version + self.max_staleness
