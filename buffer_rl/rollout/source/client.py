"""The data source's process as rollout workers see it."""

from __future__ import annotations

from functools import partial
from typing import Any

from buffer_rl.buffer.calling import Answers
from buffer_rl.data.custom import Delivery, DeliveryRequest


class SourceClient:
    """Asks the actor of a user's data source for batches; a ``BatchSource`` of ``buffer_rl.buffer.rollout_client``.

    Raises DeadlineError after ``timeout_s``, WorkerError if its process died, and what the source raised.
    """

    def __init__(self, actor: Any, *, timeout_s: float) -> None:
        self._actor = actor
        self._answers = Answers(
            who="the data source", role="data_source", timeout_s=timeout_s, flag="--data-source-timeout-s"
        )

    def take(self, request: DeliveryRequest) -> Delivery | None:
        """The batch that ``request`` names; None if the Buffer has it already."""
        delivery: Delivery | None = self._answers.wait("take", partial(self._actor.take.remote, request))
        return delivery

    async def atake(self, request: DeliveryRequest) -> Delivery | None:
        """``take`` for an event loop."""
        delivery: Delivery | None = await self._answers.until("take", partial(self._actor.take.remote, request))
        return delivery
