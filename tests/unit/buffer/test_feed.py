"""Groups of a user's data source in the Buffer: each once and in order, whoever asks, whatever is lost on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.feed import DeliveredFeed
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.custom import CustomSource, Delivery, DeliveryNeeded, DeliveryRequest
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferStateError, CheckpointError, DataError
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket
from harness.saved_state import load_saved, saved_state
from harness.tickets import close_rollout

REFERENCE = "mine:Source"


def make_group(row: int) -> SampleGroup:
    uid = GroupUid("s", row, 0)
    return SampleGroup(uid=uid, samples=[Sample(uid=uid, prompt=f"p{row}", group_index=row)])


def delivery(number: int, *rows: int, state: bytes = b"") -> Delivery:
    return Delivery(number=number, groups=[make_group(row) for row in rows], state=state)


def make_state(source: Any = None, groups_per_step: int = 2) -> BufferState:
    return BufferState(
        source or DeliveredFeed(REFERENCE),
        ledger=Ledger.in_memory(),
        groups_per_step=groups_per_step,
    )


def rows(groups: list[SampleGroup]) -> list[int]:
    return [group.uid.row for group in groups]


def needed(state: BufferState, ticket: Ticket, num_groups: int, *chosen: GroupUid) -> DeliveryRequest | None:
    """What the source's process is asked for on behalf of a lease that must wait."""
    with pytest.raises(DeliveryNeeded) as caught:
        state.get_samples(ticket, num_groups, chosen or None)
    return state.get_delivery_request(caught.value.num_groups)


def request(number: int, num_groups: int, first_group: int, state: bytes = b"") -> DeliveryRequest:
    return DeliveryRequest(number=number, num_groups=num_groups, first_group=first_group, state=state)


def test_what_is_missing_is_asked_for_by_number_and_nothing_is_leased_before_it_is_there() -> None:
    state = make_state()
    ticket = state.generate(0)
    assert needed(state, ticket, 2) == request(0, 2, 0)
    state.deliver(delivery(0, 0))
    assert needed(state, ticket, 2) == request(1, 1, 1)  # fewer than asked came: the rest
    state.deliver(delivery(1, 1))
    assert rows(state.get_samples(ticket, 2)) == [0, 1]
    assert needed(state, ticket, 1) == request(2, 1, 2)
    assert state.get_progress()["leased"] == 2


def test_two_who_wait_at_once_get_one_batch_between_them() -> None:
    state = make_state()
    ticket = state.generate(0)
    assert needed(state, ticket, 3) == request(0, 3, 0)
    assert needed(state, ticket, 1) == request(0, 1, 0)
    state.deliver(delivery(0, 0, 1, 2, state=b"after 3"))
    assert state.get_delivery_request(1) is None
    state.deliver(delivery(0, 7, state=b"after 1"))  # late, of a process that died
    assert rows(state.get_samples(ticket, 1)) == [0]
    assert needed(state, ticket, 3) == request(1, 1, 3, b"after 3")


def test_the_queue_comes_before_the_source_and_is_untouched_while_a_batch_is_missing() -> None:
    state = make_state()
    ticket = state.generate(0)
    state.deliver(delivery(0, 0, 1))
    leased = state.get_samples(ticket, 2)
    state.add_samples(ticket, [(leased[1].uid, leased[1].attempt)])
    assert needed(state, ticket, 3) == request(1, 2, 2)
    assert needed(state, ticket, 3, GroupUid("s", 1, 0)) == request(1, 2, 2)
    assert state.get_buffer_length() == 1
    state.deliver(delivery(1, 2, 3))
    assert rows(state.get_samples(ticket, 3)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (delivery(2, 5), BufferStateError, "batch 2 with 1 groups is refused"),
        (delivery(1), BufferStateError, "batch 1 with 0 groups is refused"),
        (delivery(1, 7, 7), DataError, "the uid s:7:0 was used before"),
        (delivery(1, 1), DataError, "s:1:0"),  # still in stock
        (delivery(1, 5, 0), DataError, "s:0:0"),  # leased
    ],
)
def test_a_refused_delivery_changes_nothing(batch: Delivery, error: type[Exception], words: str) -> None:
    state = make_state()
    ticket = state.generate(0)
    state.deliver(delivery(0, 0, 1, state=b"x"))
    state.get_samples(ticket, 1)
    before = state.state_dict()
    with pytest.raises(error) as caught:
        state.deliver(batch)
    assert words in str(caught.value)
    if error is DataError:
        assert f"data_source '{REFERENCE}'" in str(caught.value)
    assert state.state_dict() == before


def test_a_rejected_groups_uid_cannot_come_again() -> None:
    state = make_state()
    ticket = state.generate(0)
    state.deliver(delivery(0, 0))
    (group,) = state.get_samples(ticket, 1)
    state.reject(ticket, group.uid, group.attempt, "dull")
    with pytest.raises(DataError, match="s:0:0"):
        state.deliver(delivery(1, 0))


def test_stock_state_and_counts_are_saved_and_loaded_as_one() -> None:
    state = make_state()
    ticket = state.generate(0)
    state.deliver(delivery(0, 0, 1, 2, state=b"\x00\xff"))
    state.get_samples(ticket, 1)
    saved = saved_state(state)
    again = make_state()
    load_saved(again, saved)
    ticket = again.generate(0)
    assert needed(again, ticket, 4) == request(1, 1, 3, b"\x00\xff")
    groups = again.get_samples(ticket, 3)  # the leased one first, then the stock
    assert rows(groups) == [0, 1, 2]
    assert groups[2][0].prompt == "p2"


def test_the_state_of_another_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "label": "x"}\n')
    args: Any = compose(CORE_SECTIONS)(prompt_data=[str(tmp_path / "rows.jsonl")])
    makers: dict[str, Callable[[], BufferState]] = {
        "--data-source-path mine:Source": make_state,
        "--data-source-path other:Source": lambda: make_state(DeliveredFeed("other:Source")),
        "--prompt-data": lambda: make_state(PromptDataSource(args)),
    }
    for saved, save in makers.items():
        for now, load in makers.items():
            if saved == now:
                load_saved(load(), saved_state(save()))
                continue
            with pytest.raises(CheckpointError) as caught:
                load_saved(load(), saved_state(save()))
            assert f"the checkpoint's groups come from {saved}" in str(caught.value) or now == "--prompt-data"


@pytest.mark.parametrize("change", [{"state": "%"}, {"number": None}, {"stock": [{}]}, {"stock": None}])
def test_a_damaged_state_is_named(change: dict[str, Any]) -> None:
    feed = DeliveredFeed(REFERENCE)
    with pytest.raises(CheckpointError, match="damaged"):
        feed.load_state_dict({**feed.state_dict(), **change})


def test_what_epochs_leave_over_makes_whole_steps_together() -> None:
    steps = make_state(groups_per_step=4).get_num_rollout_per_epoch
    assert steps(1, None) == 0  # the source's process alone knows its length
    assert [steps(num_epochs, 11) for num_epochs in (1, 2, 3, 4)] == [2, 5, 8, 11]  # 2 steps and 3 groups
    assert [steps(num_epochs, 3) for num_epochs in (1, 2, 4)] == [1, 1, 3]


def test_a_buffer_with_data_of_its_own_takes_no_deliveries(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "label": "x"}\n')
    args: Any = compose(CORE_SECTIONS)(prompt_data=[str(tmp_path / "rows.jsonl")])
    with pytest.raises(BufferStateError, match="reads its data itself"):
        make_state(PromptDataSource(args)).deliver(delivery(0, 0))


class Counting:
    """A user's data source that counts. A batch is as long as ``args.draw`` says, and at most as long as asked: made
    again, it is another one."""

    def __init__(self, args: Any) -> None:
        self.draw: random.Random = args.draw
        self.next_row = 0

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        batch = range(self.next_row, self.next_row + self.draw.randint(1, num_samples))
        self.next_row = batch.stop
        return [make_group(row) for row in batch]

    def save(self, path: str) -> None:
        Path(path).write_text(str(self.next_row))

    def load(self, path: str) -> None:
        self.next_row = int(Path(path).read_text())

    def __len__(self) -> int:
        return 1000


REGISTRY = PluginRegistry()


def host(draw: random.Random) -> CustomSource:
    args = SimpleNamespace(data_source_path=f"{__name__}:Counting", n_samples_per_prompt=1, draw=draw)
    return CustomSource(args, REGISTRY)


def finish(state: BufferState, ticket: Ticket, group: SampleGroup) -> None:
    columns: dict[str, Any] = {"tokens": [np.ones(2, np.int32)], "loss_mask": [np.ones(1, np.float32)]}
    state.finish(ticket, group.uid, group.attempt, [group[0].row_id], columns)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=75)
def test_whatever_is_lost_interrupted_or_asked_twice_every_group_is_trained_once_and_in_order(seed: int) -> None:
    """Deliveries that are late or lost, of processes that were killed at random moments, and restarts of the run from
    a checkpoint."""
    draw = random.Random(seed)
    state, source = make_state(), host(draw)
    late: list[Callable[[], object]] = []  # what is under way, from a process that may be dead by now
    trained: list[int] = []

    def ask(num_groups: int) -> None:
        if (request := state.get_delivery_request(num_groups)) is None:
            return
        act = partial(state.deliver, source.take(request))
        if draw.random() < 0.5:
            late.append(act)
        else:
            act()

    def lease(ticket: Ticket, count: int) -> list[SampleGroup]:
        nonlocal source
        while True:
            if late and draw.random() < 0.3:
                late.pop(draw.randrange(len(late)))()
            if draw.random() < 0.3:
                source = host(draw)
            try:
                return state.get_samples(ticket, count)
            except DeliveryNeeded as error:
                ask(error.num_groups)

    for step in range(6):
        ticket = state.generate(step)
        leased: list[SampleGroup] = []
        while len(leased) < ticket.num_groups:
            leased += lease(ticket, draw.randint(1, 2))
            if draw.random() < 0.2:  # killed; the run goes on from what was saved
                saved = saved_state(state)
                state, source, leased = make_state(), host(draw), []
                late.clear()
                load_saved(state, saved)
                ticket = state.generate(step)
        for group in leased:
            finish(state, ticket, group)
        close_rollout(state, ticket)
        trained += rows(leased[: ticket.num_groups])
        state.commit(step, step + 1)
        state.release(step + 1)
    assert trained == list(range(12))
