"""Where the Buffer's fresh groups come from: the built-in data source, or deliveries of a user's one.

A user's data source runs in a process of its own, and the Buffer never waits for another process: one thread at a time
works on its state, so that a source that hangs would stop every rollout worker, trainer and role. So the Buffer holds a
stock of groups that were delivered and not leased yet. If the stock is too small, ``get_samples`` raises
DeliveryNeeded, and the caller (``RolloutClient``) has the source's process deliver a batch, and tries again. That
process asks the Buffer for the request of the batch and delivers it, in one call: it is the only producer, and no other
process carries groups.

The source's state after the newest batch, the stock and the counts are one record, which is saved and loaded as one:
a resumed run, and a source whose process died, go on with the very next group.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from buffer_rl.buffer.codec import group_from_json, group_to_json
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.data.custom import Delivery, DeliveryNeeded, DeliveryRequest
from buffer_rl.data.source import PromptDataSource, SourceMark
from buffer_rl.errors import BufferStateError, CheckpointError, DataError
from buffer_rl.plugin.calls import place
from buffer_rl.records.groups import GroupUid, SampleGroup

Draw = SampleGroup | GroupUid
"""A group to lease, or the uid of a row that leaves its epoch without being leased."""


class Feed:
    """No training data; the base of both kinds of source, which have what this one lacks."""

    origin = "no training data"
    """The option that names the source, for errors."""

    def draw_prompts(self, num_groups: int) -> Sequence[Draw]:
        """The next ``num_groups`` groups, and the uids of rows that are passed over before them. Raises DeliveryNeeded,
        with nothing changed, if there are fewer."""
        raise BufferStateError("there is no training data", hint="name it with --prompt-data")

    def rollback(self, drawn: Sequence[Draw]) -> None:
        """Undo the last ``draw_prompts``, which gave ``drawn``."""

    def open_ticket(self, number: int, end: int) -> None:
        """A training ticket opens: its order of rows knows the rewards of steps and tickets before ``end``."""

    def recover(self) -> None:
        """Go on beside the rows that the ledger has, after ``seek`` or ``load_state_dict``."""

    def metrics_of(self, ticket: int) -> dict[str, float]:
        """What the order of rows knew when the ticket opened."""
        return {}

    def group_of(self, uid: GroupUid, number: int) -> SampleGroup:
        """A group made again, as prompts; ``number`` counts all groups from 0. Raises an error of
        ``buffer_rl.errors`` if that cannot be done."""
        raise BufferStateError(f"the group {uid} cannot be made again", where=self.origin)

    def has_source(self, source: str) -> bool:
        """Whether uids with this source may be of groups that come from here and were not leased yet."""
        return False

    def resize(self, group: SampleGroup, number: int) -> SampleGroup:
        """A saved group as it is; made again, as prompts, if fresh groups have another number of samples now, or it has
        prompts alone and the rows were changed."""
        return group

    def position(self) -> str:
        """Where the feed stands, for ``seek``; empty if only another process knows."""
        return ""

    def seek(self, position: str) -> None:
        """Go to a ``position`` of the same data."""

    def num_rows(self) -> int:
        """Groups of one epoch; 0 if there is none, or only another process knows."""
        return 0

    def state_dict(self) -> dict[str, Any] | None:
        """JSON values for a checkpoint; None without training data."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse. Raises CheckpointError, with nothing changed, if the state is of another source."""
        saved = Feed.origin if state is None else LocalFeed.origin
        if state is not None and "reference" in state:
            saved = f"--data-source-path {state['reference']}"
        if saved != self.origin:
            what = f"the checkpoint's groups come from {saved}; this run has {self.origin}"
            hint = "resume with the data source of the saved run, written in the same way"
            raise CheckpointError(what, where="--load", hint=hint)


class LocalFeed(Feed):
    """The built-in data source.

    ledger: where an order by difficulty reads the rewards of rows, and which rows left their epoch; without it no
    reward is known.
    """

    origin = "--prompt-data"

    def __init__(self, source: PromptDataSource, ledger: Ledger | None = None) -> None:
        self._source = source
        self._ledger = ledger if source.pool_weights is not None else None
        self._before: SourceMark | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        if self._ledger is not None:
            self._ledger.keep_rewards()

    def draw_prompts(self, num_groups: int) -> list[Draw]:
        self._before = self._source.mark()
        try:
            return self._source.draw(num_groups)
        except BaseException:
            self._source.back_to(self._before)
            raise

    def rollback(self, drawn: Sequence[Draw]) -> None:
        assert self._before is not None  # of ``draw_prompts``
        self._source.back_to(self._before)

    def open_ticket(self, number: int, end: int) -> None:
        if self._ledger is None:
            return
        self._source.set_rewards(self._ledger.rewards.new(end))
        counts = self._source.pool_counts()
        self._metrics = {ticket: known for ticket, known in self._metrics.items() if ticket >= end}
        self._metrics[number] = {f"rollout/pool_{pool}": float(count) for pool, count in counts.items()}

    def recover(self) -> None:
        if self._ledger is not None:
            self._ledger.rewards.read_until = None
            self._source.take_rows(self._ledger.rows_of)

    def metrics_of(self, ticket: int) -> dict[str, float]:
        return self._metrics.get(ticket, {})

    def group_of(self, uid: GroupUid, number: int) -> SampleGroup:
        return self._source.group_of(uid, number)

    def has_source(self, source: str) -> bool:
        return source in self._source.source_hashes

    def resize(self, group: SampleGroup, number: int) -> SampleGroup:
        if not group.samples:  # finished elsewhere, and taken over
            return group
        fresh = self.group_of(group.uid, number)
        saved = {sample.sample_index for sample in group}  # a sample may be there in several parts
        begun = any(sample.response_length for sample in group)
        same = len(saved) == len(fresh) and (begun or not self._source.has_changed)
        return group if same else replace(fresh, attempt=group.attempt)

    def position(self) -> str:
        return orjson.dumps(self.state_dict()).decode()

    def seek(self, position: str) -> None:
        self.load_state_dict(orjson.loads(position))

    def num_rows(self) -> int:
        return len(self._source)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        super().load_state_dict(state)
        assert state is not None  # else it was refused
        self._source.load_state_dict(state)


class DeliveredFeed(Feed):
    """The Buffer's side of a data source in a process of its own, which alone can make a group again.

    reference: the value of ``--data-source-path``.
    """

    def __init__(self, reference: str) -> None:
        self.origin = f"--data-source-path {reference}"
        self._reference = reference
        self._stock: deque[SampleGroup] = deque()
        self._number = 0  # of the next batch
        self._delivered = 0  # groups of all batches
        self._source_state = b""

    def draw_prompts(self, num_groups: int) -> list[SampleGroup]:
        if num_groups > len(self._stock):
            raise DeliveryNeeded(num_groups)
        return [self._stock.popleft() for _ in range(num_groups)]

    def rollback(self, drawn: Sequence[Draw]) -> None:
        self._stock.extendleft(group for group in reversed(drawn) if isinstance(group, SampleGroup))

    def has_source(self, source: str) -> bool:
        """Whether a group in stock is of it; ``deliver`` refuses the uid of a foreign group."""
        return any(group.uid.source == source for group in self._stock)

    def request(self, num_groups: int) -> DeliveryRequest | None:
        """The next batch, with which the stock would have ``num_groups`` groups; None if it has them."""
        if (missing := num_groups - len(self._stock)) <= 0:
            return None
        return DeliveryRequest(
            number=self._number, num_groups=missing, first_group=self._delivered, state=self._source_state
        )

    def deliver(self, delivery: Delivery, is_known: Callable[[GroupUid], bool]) -> None:
        """Take the next batch in; an older one was taken in before, and is ignored.

        is_known: whether a group of this uid was leased before. Raises DataError for a uid that comes again,
        BufferStateError for a batch that was not requested; nothing is changed then.
        """
        if delivery.number < self._number:
            return
        if delivery.number > self._number or not delivery.groups:
            what = f"the delivery of batch {delivery.number} with {len(delivery.groups)} groups is refused"
            raise BufferStateError(what, expected=f"batch {self._number}")
        seen = {group.uid for group in self._stock}
        for group in delivery.groups:
            if group.uid in seen or is_known(group.uid):
                raise DataError(
                    f"the uid {group.uid} was used before",
                    where=place("data_source", self._reference),
                    expected="another uid for each group",
                    hint="a row that comes again in the next epoch has another epoch in its uid; without a uid, one is "
                    "given",
                )
            seen.add(group.uid)
        self._stock.extend(delivery.groups)
        self._number += 1
        self._delivered += len(delivery.groups)
        self._source_state = delivery.state

    def state_dict(self) -> dict[str, Any]:
        return {
            "reference": self._reference,
            "number": self._number,
            "delivered": self._delivered,
            "state": base64.b64encode(self._source_state).decode("ascii"),
            "stock": [group_to_json(group) for group in self._stock],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        super().load_state_dict(state)
        assert state is not None  # else it was refused
        try:
            number, delivered = int(state["number"]), int(state["delivered"])
            source_state = base64.b64decode(state["state"], validate=True)
            stock = deque(group_from_json(group) for group in state["stock"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of the data source is damaged: {error!r}") from error
        self._number, self._delivered, self._source_state, self._stock = number, delivered, source_state, stock
