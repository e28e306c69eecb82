"""Groups of real actors, and the Buffer's client: deadlines, deaths and errors, each told by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import ray

from buffer_rl.buffer.actor import start_buffer
from buffer_rl.buffer.calls import NumberedCall
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.actor_group import ActorGroup, FusedProcesses
from buffer_rl.cluster.dispatch import To, all_answers, dispatch
from buffer_rl.cluster.hangs import HangWatch
from buffer_rl.cluster.member import Member as Watched
from buffer_rl.errors import BufferStateError, DeadlineError, PluginError, TrainError, WorkerDiedError, WorkerError
from buffer_rl.options.section import dump_args
from harness.processes import descendants, holds_within
from harness.tickets import close_rollout

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test module


class Member:
    """An actor that does as it is told."""

    def __init__(self, rank: int, broken: bool = False) -> None:
        if broken:
            raise PluginError("the module has no attribute 'scor'", hint="did you mean score?")
        self._rank = rank

    def pid(self) -> int:
        return os.getpid()

    def rank(self) -> int:
        return self._rank

    def ready(self) -> None:
        pass

    @dispatch(collect=all_answers)
    def pids(self) -> int:
        return os.getpid()

    @dispatch(collect=all_answers)
    def ranks(self) -> int:
        return self._rank

    @dispatch(To.ONE)
    def next_rank(self) -> int:
        return self._rank

    def fail(self, victim: int, kind: str) -> None:
        if self._rank != victim:
            threading.Event().wait()
        if kind == "named":
            raise TrainError("the loss is not finite")
        if kind == "unexpected":
            raise ZeroDivisionError("by zero")
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        threading.Event().wait()


@contextmanager
def group(count: int, **options: Any) -> Iterator[ActorGroup]:
    members = ActorGroup.of("train", Member, lambda rank: (rank,), count, **options)
    try:
        yield members
    finally:
        members.stop()


def test_a_call_goes_to_all_members_or_to_the_next_one(ray_cluster: None) -> None:
    with group(2) as members:
        assert members.call(Member.ranks, timeout_s=60) == [0, 1]
        assert [members.call(Member.next_rank, timeout_s=60) for _ in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("named", TrainError, r"train 1\.fail: the loss is not finite"),
        ("unexpected", WorkerError, r"(?s)train 1\.fail: ZeroDivisionError: by zero.*in fail"),
        ("death", WorkerError, r"train 1\.fail: the process died"),
    ],
)
def test_one_failing_member_ends_a_call_that_the_other_would_never_answer(
    ray_cluster: None, kind: str, error: type[Exception], message: str
) -> None:
    with group(2) as members, pytest.raises(error, match=message):
        members.call(Member.fail, 1, kind, timeout_s=60)


def test_a_member_that_hangs_is_named_at_the_deadline_and_stopped_though_it_never_says_farewell(
    ray_cluster: None,
) -> None:
    with group(1) as members:
        pid = members.call(Member.pid, timeout_s=60)
        with pytest.raises(DeadlineError, match=r"train\.hang: no answer within 0\.1 s"):
            members.call(Member.hang, timeout_s=0.1)
        members.stop(Member.rank, timeout_s=0.1)
        wait_for_end(pid)
        members.stop(Member.rank, timeout_s=0.1)  # the members are gone: nothing is raised
        with pytest.raises(WorkerError, match="died"):
            members.call(Member.rank, timeout_s=60)


def test_a_constructor_that_fails_is_told_in_its_own_words(ray_cluster: None) -> None:
    broken = ActorGroup.of("rollout", Member, lambda rank: (rank, True), 1)
    with pytest.raises(WorkerError, match="has no attribute 'scor'"):
        broken.call(Member.rank, timeout_s=60)


def test_roles_of_one_process_die_and_are_replaced_together_and_have_their_own_threads(ray_cluster: None) -> None:
    processes = FusedProcesses(lambda rank: {role: partial(Member, rank) for role in ("ref", "teacher")})
    groups = [ActorGroup(role, partial(processes.start_member, role), 2) for role in ("ref", "teacher")]
    try:
        pids = [group.call(Member.pids, timeout_s=60) for group in groups]
        assert pids[0] == pids[1]
        assert len(set(pids[0])) == 2
        hanging = groups[0].start(Member.hang)
        assert groups[1].call(Member.ranks, timeout_s=60) == [0, 1]
        os.kill(pids[0][0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"ref 0\.hang"):
            hanging.wait(60)
        for group in groups:
            group.restart()
        again = [group.call(Member.pids, timeout_s=60) for group in groups]
        assert again[0] == again[1]
        assert not set(again[0]) & set(pids[0])
    finally:
        for group in groups:
            group.stop()


def wait_for_end(pid: int) -> None:
    deadline = threading.Event()
    for _ in range(300):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        deadline.wait(0.1)
    raise AssertionError(f"process {pid} is still there")


def pid_of(actor: Any) -> int:
    function = cast("Any", actor).__ray_call__
    return int(ray.get(function.remote(lambda self: os.getpid()), timeout=60))


def test_a_buffer_that_hangs_is_named_at_the_callers_deadline_and_a_repeat_changes_nothing(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    actor = start_buffer(dump_args(make_options()))
    client = BufferClient(actor, timeout_s=60)
    ticket = client.call(BufferState.generate, 0)
    pid = pid_of(actor)
    hasty = BufferClient(actor, timeout_s=0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"buffer: the Buffer did not answer get_samples within 0\.2 s"):
            hasty.call(BufferState.get_samples, ticket, 2)
    finally:
        os.kill(pid, signal.SIGCONT)
    # The late call was executed. Its repeat, under the same caller and sequence, finds the same groups leased.
    caller, sequence = hasty._caller, 0
    message = NumberedCall(sequence, sequence, "get_samples", (ticket, 2))
    groups = ray.get(actor.execute.remote(caller, [message]), timeout=60)[0]
    again = ray.get(actor.execute.remote(caller, [message]), timeout=60)[0]
    other = client.call(BufferState.get_samples, ticket, 1)
    assert [group.uid for group in again] == [group.uid for group in groups]
    assert other[0].uid not in {group.uid for group in groups}
    assert client.call(BufferState.get_progress)["leased"] == 3
    for leased in groups:
        columns = {"tokens": [np.zeros(3, np.int32)], "loss_mask": [np.ones(2, np.float32)]}
        client.call(BufferState.finish, ticket, leased.uid, leased.attempt, [leased[0].row_id], columns)
    with pytest.raises(BufferStateError, match="not leased"):
        client.call(BufferState.finish, ticket, groups[0].uid, groups[0].attempt, [groups[0][0].row_id], columns)
    close_rollout(client, ticket)
    assert client.get_data(0).row_ids == client.get_data(0).row_ids
    ray.kill(actor)
    assert holds_within(30, lambda: pid not in {process.pid for process in descendants(os.getpid())})
    with pytest.raises(WorkerError, match=r"buffer\.generate: the process of the Buffer died"):
        client.call(BufferState.generate, 1)


class StopsAtOnce(Watched):
    """Its process stops when it is asked for its pulse for the first time."""

    def pulse(self) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)

    def work(self) -> None:
        """Return at once."""


class StartsSlowly(Watched):
    """Takes many times the deadline to be constructed."""

    def __init__(self) -> None:
        time.sleep(2.0)

    def ready(self) -> None:
        """Answer once it is there."""


def test_a_process_that_stops_before_its_first_answer_hangs_and_one_that_starts_does_not(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_rl.cluster.hangs.FIRST_S", 0.0)
    stopped, slow = (ActorGroup.of(str(each.__name__), each, lambda _: (), 1) for each in (StopsAtOnce, StartsSlowly))
    notices: list[str] = []
    watch = HangWatch([stopped, slow], 0.2, notices.append)
    working, starting = stopped.start(StopsAtOnce.work), slow.start(StartsSlowly.ready)

    def looked() -> bool:
        watch()
        return bool(notices) and starting.ended()

    assert holds_within(60, looked)
    assert [notice.partition(":")[0] for notice in notices] == ["StopsAtOnce hung"]
    with pytest.raises(WorkerDiedError, match="no answer for"):
        working.wait(60)
    starting.wait(60)
    slow.stop()
