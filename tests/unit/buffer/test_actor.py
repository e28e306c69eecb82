"""The Buffer's process, called in this one: what is kept of answers, and what may be called."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.actor import STATE_FILE, BufferActor, can_restart
from buffer_rl.buffer.calls import NumberedCall, answer_of, changes_state
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.columns import assemble
from buffer_rl.buffer.ledger_audit import ledger_writer
from buffer_rl.buffer.ledger_file import new_ledger
from buffer_rl.buffer.readers import ALL_ROWS, Share
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.calling import Answers
from buffer_rl.errors import BufferRestartedError, BufferStateError, CheckpointError, DeadlineError, WorkerError
from buffer_rl.options.section import compose, dump_args
from buffer_rl.records.groups import SampleGroup


def make_actor(folder: Path, num_rows: int = 6, rollout_batch_size: int = 2) -> BufferActor:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": 2**64 + i}) + "\n" for i in range(num_rows)))
    args: Any = compose(CORE_SECTIONS)(
        run_dir=str(folder / "run"),
        prompt_data=str(path),
        rollout_batch_size=rollout_batch_size,
        n_samples_per_prompt=2,
    )
    return BufferActor(dump_args(args), new_ledger(args))


class Caller:
    def __init__(self, actor: BufferActor, name: str = "me") -> None:
        self._actor = actor
        self._name = name
        self._sequence = 0

    def change(self, method: str, *args: Any) -> Any:
        self._sequence += 1
        call = NumberedCall(self._sequence, self._sequence, method, args)
        return answer_of(self._actor.execute(self._name, [call]))


def read(actor: BufferActor, method: str, *args: Any) -> Any:
    return answer_of(actor.execute("reader", [NumberedCall(-1, -1, method, args)]))


def test_payloads_are_gone_when_their_step_is_released(tmp_path: Path) -> None:
    actor = make_actor(tmp_path)
    caller = Caller(actor)
    ticket = caller.change("generate", 0, False)
    payloads = []
    for group in caller.change("get_samples", ticket, 2):
        tokens = [np.zeros(5, dtype=np.int32) for _ in group]
        payloads += [weakref.ref(row) for row in tokens]
        columns = {"tokens": tokens, "loss_mask": [np.ones(2, dtype=np.float32) for _ in group]}
        caller.change("finish", ticket, group.uid, group.attempt, [sample.row_id for sample in group], columns)
        del tokens, columns
    caller.change("end_ticket", ticket)
    caller.change("close_selection", 0)
    for rank in range(2):
        assert len(assemble(read(actor, "plan_data", 0, Share(rank, 2)))) == 2
    assert all(payload() is not None for payload in payloads)
    caller.change("commit", 0, 1)
    released = caller.change("release", 1)
    assert 0.01 < released["peak"]["host"] < 100  # GB, of this process
    gc.collect()
    assert [payload() for payload in payloads] == [None] * 4


def test_every_public_method_of_the_state_is_a_change_or_a_read() -> None:
    own = {"state_dict", "load_state_dict"}  # reached by save and load
    own |= {"get_data"}  # for a state in the caller's process: the client reads plans
    public = {name for name in dir(BufferState) if callable(getattr(BufferState, name)) and not name.startswith("_")}
    assert {name for name in public if changes_state(getattr(BufferState, name)) is None} == own


def test_an_operation_is_sent_by_its_name_with_positional_arguments_and_a_number_if_it_changes_something() -> None:
    sent: list[Any] = []
    client = BufferClient(SimpleNamespace(execute=SimpleNamespace(remote=lambda *call: sent.append(call))), timeout_s=1)

    def wait(name: str, submit: Callable[[], None]) -> list[None]:
        submit()
        return [None]

    client._answers = cast("Any", SimpleNamespace(wait=wait))
    client.call(BufferState.generate, 3, True)
    client.call(BufferState.get_headers)
    client.call(BufferState.plan_data, 3, Share(num_steps=2))
    client.call(BufferState.commit, 3, 4)
    assert [caller for caller, _ in sent] == [client._caller] * 4
    assert [call for _, (call,) in sent] == [
        (0, 0, "generate", (3, True)),
        (-1, -1, "get_headers", ()),
        (-1, -1, "plan_data", (3, Share(num_steps=2))),
        (1, 1, "commit", (3, 4)),
    ]


def test_changes_of_one_message_have_an_answer_or_an_error_each_and_are_executed_once(tmp_path: Path) -> None:
    actor = make_actor(tmp_path)
    driver = Caller(actor, "driver")
    ticket = driver.change("generate", 0, False)
    first, second = driver.change("get_samples", ticket, 2)
    columns = {"tokens": [np.zeros(2, dtype=np.int32)] * 2}

    def report(number: int, group: SampleGroup, attempt: int) -> NumberedCall:
        rows = [sample.row_id for sample in group]
        return NumberedCall(number, 0, "finish", (ticket, group.uid, attempt, rows, columns))

    message = [report(0, first, first.attempt), report(1, second, 7), report(2, second, second.attempt)]
    for _ in range(2):  # as Ray may deliver it
        answers = actor.execute("worker", message)
        assert [answers[0], answers[2]] == [None, None]
        assert isinstance(answers[1], BufferStateError)
        assert ("attempt 7" in str(answers[1]), answers[1].where) == (True, "buffer.finish")
    with pytest.raises(BufferStateError, match="is refused"):
        answer_of(actor.execute("worker", [report(3, first, first.attempt)]))


def test_anything_else_is_refused(tmp_path: Path) -> None:
    actor = make_actor(tmp_path)
    for method in ("_take", "wait_change", "state_dict", "absent"):
        with pytest.raises(BufferStateError, match=f"no operation '{method}'"):
            Caller(actor).change(method)


def test_what_was_saved_is_loaded_and_a_missing_state_is_an_error(tmp_path: Path) -> None:
    first = make_actor(tmp_path)
    caller = Caller(first)
    ticket = caller.change("generate", 0, False)
    leased = caller.change("get_samples", ticket, 2)
    read(first, "save", str(tmp_path))
    again = Caller(make_actor(tmp_path))
    again.change("load", str(tmp_path))
    ticket = again.change("generate", 0, False)
    restored = again.change("get_samples", ticket, 2)
    assert [group.uid for group in restored] == [group.uid for group in leased]
    assert [[sample.label for sample in group] for group in restored] == [[2**64 + g.uid.row] * 2 for g in leased]
    with pytest.raises(CheckpointError, match=r"cannot be read.*absent|absent.*cannot be read"):
        Caller(make_actor(tmp_path)).change("load", str(tmp_path / "absent"))


def test_a_state_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / STATE_FILE).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left") as caught:
        read(make_actor(tmp_path), "save", str(tmp_path / "saves"))
    assert caught.value.where == str(tmp_path / "saves" / STATE_FILE)


def test_the_ledger_names_the_process_that_writes_it_also_after_it_went_back_to_a_copy(tmp_path: Path) -> None:
    actor = make_actor(tmp_path)
    (ledger,) = tmp_path.rglob("ledger.sqlite")
    assert ledger_writer(ledger) == os.getpid()
    (tmp_path / "saves").mkdir()
    read(actor, "save", str(tmp_path / "saves"))
    copy = sqlite3.connect(tmp_path / "saves" / "ledger.sqlite")
    copy.execute("UPDATE facts SET value = '1 0' WHERE key = 'note:pid'")
    copy.commit()
    copy.close()
    Caller(actor).change("load", str(tmp_path / "saves"))
    assert ledger_writer(ledger) == os.getpid()


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen within 30 s")


def test_readers_that_wait_are_woken_by_a_finished_group_and_by_a_cleared_pool_and_by_nothing_else(
    tmp_path: Path,
) -> None:
    actor = make_actor(tmp_path)
    caller = Caller(actor)
    ticket = caller.change("generate", 0, False)
    group = caller.change("get_samples", ticket, 1)[0]
    rows = [sample.row_id for sample in group]
    columns = {"tokens": [np.zeros(5, dtype=np.int32) for _ in rows]}
    for method, arguments in (
        ("finish", (ticket, group.uid, group.attempt, rows, columns)),
        ("end_ticket", (ticket,)),
        ("close_selection", (0,)),
        ("clear", (ticket.task,)),
    ):
        if method == "clear":
            caller.change("commit", 0, 1)
        revision = actor._state.revision
        waiting = [threading.Thread(target=actor.wait_change, args=(revision, 600.0), daemon=True) for _ in range(70)]
        for thread in waiting:
            thread.start()
        wait_for(lambda: len(actor._changed._waiters) == 70)  # type: ignore[attr-defined]
        read(actor, "get_headers")
        caller.change("update_metadata", {"a": 1})
        assert all(thread.is_alive() for thread in waiting)
        caller.change(method, *arguments)
        for thread in waiting:
            thread.join(30)  # of the 600 that it asked for
        assert not any(thread.is_alive() for thread in waiting), method


def test_a_full_object_store_is_told_with_the_option_that_enlarges_it() -> None:
    answers = Answers(who="storage-0", role="storage-0", timeout_s=1.0, flag="--buffer-timeout-s")
    error = answers.named("finish", ray.exceptions.OutOfDiskError("no space"))
    assert isinstance(error, WorkerError)
    assert (error.where, "--object-store-gb" in error.hint) == ("storage-0.finish", True)


def test_an_actor_that_is_being_restarted_for_too_long_is_a_deadline() -> None:
    answers = Answers(who="the Buffer", role="buffer", timeout_s=0.5, flag="--buffer-timeout-s")
    asked = 0

    def ask() -> object:
        nonlocal asked
        asked += 1
        raise ray.exceptions.ActorUnavailableError("it is restarted", b"0" * 16)

    with pytest.raises(DeadlineError, match=r"did not answer commit within 0.5 s"):
        answers.wait("commit", ask)
    with pytest.raises(DeadlineError, match=r"did not answer commit within 0.5 s"):
        asyncio.run(answers.until("commit", ask))
    assert asked >= 4


def test_a_buffer_that_begins_with_the_ledger_of_another_one_says_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(6)))
    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path / "run"), prompt_data=str(path), rollout_batch_size=2)
    place = new_ledger(args)
    first = Caller(BufferActor(dump_args(args), place))
    ticket = first.change("generate", 0, False)
    first.change("get_samples", ticket, 2)
    second = BufferActor(dump_args(args), place)
    assert second.get_progress()["queued"] == 2
    with pytest.raises(BufferRestartedError):
        Caller(second).change("end_ticket", ticket)
    with pytest.raises(BufferStateError, match="another Buffer has opened the ledger"):  # the first one wakes up
        first.change("get_samples", ticket, 1)


@pytest.mark.parametrize(
    ("options", "restarts"),
    [
        ({}, True),
        ({"data_source_path": "mine:Source"}, False),
        ({"load_debug_rollout_data": "r_{rollout_id}"}, False),
    ],
)
def test_a_buffer_whose_groups_cannot_be_made_again_is_not_replaced(options: dict[str, Any], restarts: bool) -> None:
    assert can_restart(compose(CORE_SECTIONS)(**options)) is restarts


def test_threads_that_change_and_read_at_one_time_do_it_one_after_another(tmp_path: Path) -> None:
    """Large payloads are reported by threads of their own; a transaction of one must not be part of another's."""
    actor = make_actor(tmp_path, num_rows=64, rollout_batch_size=64)
    ticket = Caller(actor).change("generate", 0, False)
    failures: list[BaseException] = []

    def work(name: str) -> None:
        caller = Caller(actor, name)
        try:
            while groups := caller.change("get_samples", ticket, 1):
                group = groups[0]
                if group.uid.epoch > 0:  # all 64 rows were leased
                    caller.change("add_samples", ticket, [(group.uid, group.attempt)])
                    return
                read(actor, "get_headers")
                columns = {"tokens": [np.full(3, group.uid.row, np.int32) for _ in group]}
                caller.change("finish", ticket, group.uid, group.attempt, [s.row_id for s in group], columns)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"worker {index}",)) for index in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    driver = Caller(actor, "driver")
    report = driver.change("end_ticket", ticket)
    assert (report.num_groups, report.drops) == (64, {})
    assert driver.change("close_selection", 0)[0].num_groups == 64
    batch = assemble(read(actor, "plan_data", 0, ALL_ROWS))
    assert [int(tokens[0]) for tokens in batch.columns["tokens"]] == [row_id.uid.row for row_id in batch.row_ids]
    assert sorted({row_id.uid.row for row_id in batch.row_ids}) == list(range(64))


def test_a_display_gets_the_counts_of_a_ticket_whose_selection_is_not_open(tmp_path: Path) -> None:
    actor = make_actor(tmp_path)
    caller = Caller(actor)
    ticket = caller.change("generate", 0, False)
    caller.change("get_samples", ticket, 1)
    progress = actor.get_progress()
    assert (progress["incarnation"], progress["busy_s"]) == (ticket.incarnation, 0.0)
    counts = [progress[name] for name in ("task", "wanted", "leased", "finished", "dropped")]
    assert counts == ["train_0", ticket.num_groups, 1, 0, {}]
