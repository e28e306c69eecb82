"""The ``buffer`` that a rollout function receives, over a ``FakeBuffer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.records.groups import GroupUid, SampleGroup
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.user_rollout import render
from buffer_rl.testing.fake_buffer import FakeBuffer


class _Calls:
    """The calls of a ``BufferClient``, executed on ``fake``. It is the encoder, too: the fake stores groups."""

    def __init__(self, fake: FakeBuffer) -> None:
        self._fake = fake
        self._groups: dict[GroupUid, SampleGroup] = {}

    def encode(self, group: SampleGroup, evaluation: bool) -> tuple[list[Any], dict[str, Any]]:
        self._groups[group.uid] = group
        return [], {}

    def call(self, operation: Callable[..., Any], *args: Any) -> Any:
        own: Any = getattr(self, operation.__name__, None)
        return own(*args) if own is not None else getattr(self._fake, operation.__name__)(*args)

    async def acall(self, operation: Callable[..., Any], *args: Any) -> Any:
        return self.call(operation, *args)

    def get_samples(self, ticket: Any, num_samples: int, chosen: Any) -> list[SampleGroup]:
        groups = self._fake.get_samples(num_samples)
        self._groups.update((group.uid, group) for group in groups)
        return groups

    def add_samples(self, ticket: Any, leases: Sequence[tuple[GroupUid, int]], kept: Any) -> None:
        self._fake.add_samples([self._groups[uid] for uid, _ in leases])

    def finish(self, ticket: Any, uid: GroupUid, *rows: Any) -> None:
        self._fake.finish(self._groups[uid])

    def reject(self, ticket: Any, uid: GroupUid, attempt: int, reason: str, reward: float | None = None) -> None:
        self._fake.reject(self._groups[uid], reason)

    def quarantine(self, ticket: Any, uid: GroupUid, attempt: int, reason: str) -> None:
        self._fake.quarantine(self._groups[uid], reason)

    def count_failure(self, ticket: Any, uid: GroupUid, kind: str) -> tuple[int, int]:
        return self._fake.count_failure(self._groups[uid], kind)


def client_of(fake: FakeBuffer, context: RolloutContext) -> RolloutClient:
    """As a rollout worker makes it."""
    calls = _Calls(fake)
    on_lease = partial(render, context.prompts) if context.renders else None
    return RolloutClient(cast("BufferClient", calls), fake.ticket, calls, on_lease=on_lease)
