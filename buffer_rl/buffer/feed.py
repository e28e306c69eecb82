"""Where the Buffer's fresh groups come from: the built-in data source, or deliveries of a user's one.

A user's data source runs in a process of its own, and the Buffer never blocks on another process. So it holds a stock
of groups that were delivered and not leased yet. Where the stock is too small, ``get_samples`` raises DeliveryNeeded
with the number of the next batch; the caller delivers it and tries again (``RolloutClient``). Two concurrent callers
get the same number: the batch is made once, and its second delivery is ignored.

The source's state after the newest batch, the stock and the counts are one record, which is saved and loaded as one:
a resumed run, and a source whose process died, go on with the very next group.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson

from buffer_rl.buffer.codec import group_from_json, group_to_json
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.data.custom import Delivery, DeliveryNeeded, DeliveryRequest, hash_state
from buffer_rl.data.source import PromptDataSource, SourceMark
from buffer_rl.errors import BufferStateError, CheckpointError, DataError
from buffer_rl.plugin.calls import place
from buffer_rl.records.groups import GroupUid, SampleGroup

Draw = SampleGroup | GroupUid
"""A group to lease, or the uid of a row that leaves its epoch without being leased."""


class Feed(Protocol):
    """The interface of both kinds of source."""

    def draw_prompts(self, num_groups: int) -> Sequence[Draw]:
        """The next ``num_groups`` groups, and the uids of rows that are passed over before them. Raises DeliveryNeeded,
        with nothing changed, if there are fewer."""
        ...

    def rollback(self, drawn: Sequence[Draw]) -> None:
        """Undo the last ``draw_prompts``, which gave ``drawn``."""
        ...

    def open_ticket(self, number: int, end: int) -> None:
        """A training ticket opens: its order of rows knows the rewards of steps and tickets before ``end``."""
        ...

    def recover(self) -> None:
        """Go on beside the rows that the ledger has, after ``seek`` or ``load_state_dict``."""
        ...

    def metrics_of(self, ticket: int) -> dict[str, float]:
        """What the order of rows knew when the ticket opened."""
        ...

    def group_of(self, uid: GroupUid, number: int) -> SampleGroup:
        """A group made again, as prompts; ``number`` counts all groups from 0. Raises an error of
        ``buffer_rl.errors`` if that cannot be done."""
        ...

    def has_source(self, source: str) -> bool:
        """Whether uids with this source may be of groups that come from here and were not leased yet."""
        ...

    def resize(self, group: SampleGroup, number: int) -> SampleGroup:
        """A saved group as it is; made again, as prompts, where fresh groups have another number of samples now, or it
        has prompts alone and the rows were changed."""
        ...

    def position(self) -> str:
        """Where the feed stands, for ``seek``; empty where it is unknown."""
        ...

    def seek(self, position: str) -> None:
        """Go to a ``position`` of the same data."""
        ...

    def num_rows(self) -> int:
        """Groups of one epoch; 0 without training data."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """JSON values for a checkpoint; None without training data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse. Raises CheckpointError, with nothing changed, if the state is of another source."""
        ...


class LocalFeed:
    """The built-in data source, or none.

    ledger: where an order by difficulty reads the rewards of rows, and which rows left their epoch; without it no
    reward is known.
    """

    def __init__(self, source: PromptDataSource | None, ledger: Ledger | None = None) -> None:
        self._source = source
        self._ledger = ledger if source is not None and source.pool_weights is not None else None
        self._before: SourceMark | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        if self._ledger is not None:
            self._ledger.keep_rewards()

    def draw_prompts(self, num_groups: int) -> list[Draw]:
        source = self._required()
        self._before = source.mark()
        try:
            return source.draw(num_groups)
        except BaseException:
            source.back_to(self._before)
            raise

    def rollback(self, drawn: Sequence[Draw]) -> None:
        assert self._before is not None  # of ``draw_prompts``
        self._required().back_to(self._before)

    def open_ticket(self, number: int, end: int) -> None:
        if self._source is None or self._ledger is None:
            return
        self._source.set_rewards(self._ledger.new_rewards(end))
        counts = self._source.pool_counts()
        self._metrics = {ticket: known for ticket, known in self._metrics.items() if ticket >= end}
        self._metrics[number] = {f"rollout/pool_{pool}": float(count) for pool, count in counts.items()}

    def recover(self) -> None:
        if self._source is not None and self._ledger is not None:
            self._ledger.forget_read_rewards()
            self._source.take_rows(self._ledger.rows_of)

    def metrics_of(self, ticket: int) -> dict[str, float]:
        return self._metrics.get(ticket, {})

    def group_of(self, uid: GroupUid, number: int) -> SampleGroup:
        return self._required().group_of(uid, number)

    def has_source(self, source: str) -> bool:
        return self._source is not None and source in self._source.source_hashes

    def resize(self, group: SampleGroup, number: int) -> SampleGroup:
        if self._source is None or not group.samples:  # finished elsewhere, and taken over
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
        return 0 if self._source is None else len(self._source)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._source is None else self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is not None and "reference" in state:
            raise _other_source(f"--data-source-path {state['reference']}", "no --data-source-path")
        if (self._source is None) != (state is None):
            raise CheckpointError("the checkpoint's Buffer and this one differ in having training data")
        if self._source is not None and state is not None:
            self._source.load_state_dict(state)

    def _required(self) -> PromptDataSource:
        if self._source is None:
            raise BufferStateError("there is no training data", hint="name it with --prompt-data")
        return self._source


class DeliveredFeed:
    """The Buffer's side of a data source in a process of its own.

    reference: the value of ``--data-source-path``.
    """

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._stock: deque[SampleGroup] = deque()
        self._number = 0  # of the next batch
        self._delivered = 0  # groups of all batches
        self._source_state = b""
        self._num_rows: int | None = None

    def draw_prompts(self, num_groups: int) -> list[SampleGroup]:
        missing = num_groups - len(self._stock)
        if missing > 0:
            raise DeliveryNeeded(
                DeliveryRequest(
                    number=self._number,
                    num_groups=missing,
                    first_group=self._delivered,
                    state_hash=hash_state(self._source_state),
                )
            )
        return [self._stock.popleft() for _ in range(num_groups)]

    def rollback(self, drawn: Sequence[Draw]) -> None:
        self._stock.extendleft(group for group in reversed(drawn) if isinstance(group, SampleGroup))

    def open_ticket(self, number: int, end: int) -> None:
        pass

    def recover(self) -> None:
        pass

    def metrics_of(self, ticket: int) -> dict[str, float]:
        return {}

    def group_of(self, uid: GroupUid, number: int) -> SampleGroup:
        """Raises BufferStateError: only the source's process could make a group again, and it has no such request."""
        raise BufferStateError(f"the group {uid} cannot be made again", where=place("data_source", self._reference))

    def has_source(self, source: str) -> bool:
        """Whether a group in stock is of it; ``deliver`` refuses the uid of a foreign group."""
        return any(group.uid.source == source for group in self._stock)

    def resize(self, group: SampleGroup, number: int) -> SampleGroup:
        """As it is: how many samples a group has is up to the source."""
        return group

    def position(self) -> str:
        """Empty: where the source stands is known to its own process."""
        return ""

    def seek(self, position: str) -> None:
        pass

    def deliver(self, delivery: Delivery, is_known: Callable[[GroupUid], bool]) -> None:
        """Take the next batch in; an older one was taken in before, and is ignored.

        is_known: whether a group of this uid was leased before. Raises DataError for a uid that comes again,
        BufferStateError for a batch that was not requested; nothing is changed then.
        """
        if delivery.number < self._number:
            return
        if delivery.number > self._number or not delivery.groups:
            raise BufferStateError(
                f"the delivery of batch {delivery.number} with {len(delivery.groups)} groups is refused",
                expected=f"batch {self._number}",
            )
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

    def source_state(self) -> tuple[int, bytes]:
        """The number of the next batch, and the source's state before it; empty before the first one."""
        return self._number, self._source_state

    def num_rows(self) -> int:
        """Raises BufferStateError before ``set_num_rows``."""
        if self._num_rows is None:
            raise BufferStateError("the length of the data source is not known", where="buffer")
        return self._num_rows

    def set_num_rows(self, num_rows: int) -> None:
        """Set the source's length, which only the source's process knows."""
        self._num_rows = num_rows

    def state_dict(self) -> dict[str, Any]:
        return {
            "reference": self._reference,
            "number": self._number,
            "delivered": self._delivered,
            "state": base64.b64encode(self._source_state).decode("ascii"),
            "stock": [group_to_json(group) for group in self._stock],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is None or state.get("reference") != self._reference:
            saved = f"--data-source-path {state['reference']}" if state and "reference" in state else "--prompt-data"
            raise _other_source(saved, f"--data-source-path {self._reference}")
        try:
            number, delivered = int(state["number"]), int(state["delivered"])
            source_state = base64.b64decode(state["state"], validate=True)
            stock = deque(group_from_json(group) for group in state["stock"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of the data source is damaged: {error!r}") from error
        self._number, self._delivered, self._source_state, self._stock = number, delivered, source_state, stock


def _other_source(saved: str, now: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's groups come from {saved}; this run has {now}",
        where="--load",
        hint="resume with the data source of the saved run, written in the same way",
    )
