"""The real Buffer without its process: a rollout's client calls the state itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.rollout_client import GroupEncoder, RolloutClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.records.groups import Ticket


class DirectCalls:
    """The calls of a ``BufferClient``, executed on ``state`` at once."""

    def __init__(self, state: BufferState) -> None:
        self._state = state

    def call(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self._state, operation.__name__)(*args, **kwargs)

    async def acall(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.call(operation, *args, **kwargs)


def local_state(args: Any, ledger: Ledger, **options: Any) -> BufferState:
    """A Buffer of ``args.prompt_data``, with ``args.rollout_batch_size`` groups a step and payloads in this process.

    options: others of ``BufferState``."""
    return BufferState(
        PromptDataSource(args),
        ledger=ledger,
        groups_per_step=args.rollout_batch_size,
        **options,
    )


def local_client(state: BufferState, ticket: Ticket, encoder: GroupEncoder) -> RolloutClient:
    """The ``buffer`` of the ticket's rollout."""
    return RolloutClient(cast("BufferClient", DirectCalls(state)), ticket, encoder)
