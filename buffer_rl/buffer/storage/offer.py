"""A call with large columns that take another way than the call: their producer holds them until the owner has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from buffer_rl.buffer.calling import Answers

NumberedCall = tuple[str, int, int, str, tuple[Any, ...]]
"""A call that changes the Buffer: the arguments of ``BufferActor.change``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Stands for a large column in the arguments of a call: its producer has it under ``key``."""

    key: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUnit:
    """A process that owns payloads, and its name in messages. buffer: the actor that it passes calls on to; None where
    it is the Buffer itself."""

    actor: Any
    name: str
    buffer: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Who has the offered columns of a call, and who is to own them; the call goes by way of the owner.

    producer: the actor, a ``PayloadProducer``. timeout_s: for the Buffer's answer; half of it for the columns.
    """

    producer: Any
    unit: StorageUnit
    timeout_s: float

    def ask(self, call: NumberedCall) -> Any:
        """Make the call; returns the reference to its answer."""
        passed_to = () if self.unit.buffer is None else (self.unit.buffer,)
        return self.unit.actor.change_with_payloads.remote(self.producer, self.timeout_s, call, *passed_to)

    @property
    def answers(self) -> Answers:
        """Waits for the answer of the owner: longer than it waits, so that it can say for whom."""
        who = "the Buffer" if self.unit.buffer is None else self.unit.name
        return Answers(who=who, role=self.unit.name, timeout_s=2 * self.timeout_s, flag="--buffer-timeout-s")
