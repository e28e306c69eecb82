"""What travels between the Buffer and a user's data source, which lives in a process of its own.

The Buffer says which batch it needs next (``DeliveryRequest``); who asked the Buffer for groups gets the batch from
the source's process (``Delivery``) and hands it in. Batches are numbered from 0, so that one is made once and handed
in once, whoever asks, and however often.
"""

from __future__ import annotations

from dataclasses import dataclass

from buffer_rl.errors import BufferStateError
from buffer_rl.types import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRequest:
    """The batch that the Buffer needs before it can lease as many groups as it was asked for.

    number: of the batch. num_groups: how many groups it should have, at least 1. first_group: how many groups all
    batches before it had.
    """

    number: int
    num_groups: int
    first_group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One batch: at least one group, and the source's state after it, as its ``save`` wrote it."""

    number: int
    groups: list[SampleGroup]
    state: bytes


class DeliveryNeeded(BufferStateError):
    """The Buffer has too few groups, and leased none: hand in the batch that ``request`` names, and ask again."""

    def __init__(self, request: DeliveryRequest) -> None:
        super().__init__("the next batch of the data source must be delivered first", where="buffer")
        self.request = request
