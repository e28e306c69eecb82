"""A role's processes, and those that replace them: fakes that answer like actors, without Ray's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.errors import DeadlineError, PluginError, TrainError, WorkerDiedError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.plan.roles import Role as Row
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.trainer.role_worker import RoleWorker, own_stage
from harness.recorded_rows import recorded_rows


class Member:
    """What an actor of a role looks like from outside. dead: no call comes back; hangs: none is answered."""

    def __init__(self) -> None:
        self.version = 0
        self.dead = False
        self.hangs = False

    def __getattr__(self, method: str) -> Any:
        return _Remote(lambda *args: self._call(method, *args))

    def _call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.dead:
            future.set_exception(ActorDiedError())
        elif method == "update_weights_from_disk":
            self.version = args[1]
            future.set_result(None)
        elif method == "stream" and self.version != args[0]:
            future.set_exception(TrainError("other weights"))
        elif not self.hangs:
            future.set_result(WorkReport(num_rows=1) if method == "stream" else None)
        return future


class _Remote:
    def __init__(self, call: Callable[..., Future[Any]]) -> None:
        self._call = call

    def remote(self, *args: Any) -> Any:
        future = self._call(*args)
        return type("Ref", (), {"future": lambda self: future})()


class Role:
    """A group of two members, and all members that there ever were."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.members: list[list[Member]] = []
        self.next_are_dead = False
        self.group = ActorGroup("actor_fwd", self._start, 2, timeout_s=timeout_s)

    def _start(self, rank: int) -> Member:
        if rank == 0:
            self.members.append([])
        self.members[-1].append(Member())
        self.members[-1][-1].dead = self.next_are_dead
        return self.members[-1][-1]

    def update(self, version: int) -> bool:
        return self.group.call_and_keep(RoleWorker.update_weights_from_disk, f"v{version}", version)

    def stream(self, rollout_id: int) -> Any:
        return self.group.call(RoleWorker.stream, rollout_id, timeout_s=1)


def test_replaced_processes_have_the_weights_of_those_that_died() -> None:
    role = Role()
    role.update(3)
    role.members[0][1].dead = True
    with pytest.raises(WorkerDiedError):
        role.stream(3)
    role.group.restart()
    assert role.stream(3).num_rows == 2
    assert [len(members) for members in role.members] == [2, 2]
    assert [member.version for member in role.members[1]] == [3, 3]


def test_a_process_that_dies_before_or_during_a_publication_is_found_by_the_next_call_and_gets_the_new_weights() -> (
    None
):
    role = Role()
    assert role.update(1)
    role.members[0][0].dead = True
    assert not role.update(2)
    with pytest.raises(WorkerDiedError):
        role.stream(2)
    role.group.restart()
    assert role.stream(2).num_rows == 2


def test_a_replacement_that_dies_at_once_is_an_error() -> None:
    role = Role()
    role.next_are_dead = True
    with pytest.raises(WorkerDiedError) as caught:
        role.group.restart()
    assert caught.value.where == "actor_fwd 0.ready"


def test_processes_that_hang_are_named_when_the_deadline_passes() -> None:
    role = Role(timeout_s=0.01)
    for member in role.members[0]:
        member.hangs = True
    with pytest.raises(DeadlineError, match=r"actor_fwd\.ready"):
        role.group.call(RoleWorker.ready, timeout_s=0.01)


OWN = """
import numpy as np


class Own:
    def __init__(self, args):
        self.answer = args

    def compute(self, batch):
        return {"score": self.answer(batch.columns["response_length"])}
"""


def test_what_a_role_of_ones_own_returns_has_the_batches_rows_or_names_the_role(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    batch = recorded_rows(0, 2)

    def compute(answer: Callable[[np.ndarray], Any]) -> Any:
        row = Row(name="own", fields=("score",))
        stage = own_stage(f"{tmp_path / 'own.py'}:Own", row, answer, PluginRegistry())
        columns = stage.compute(batch)
        stage.check(batch, columns)
        return columns["score"]

    assert len(compute(lambda lengths: np.zeros(len(lengths)))) == len(batch)
    assert len(compute(lambda lengths: [np.zeros(length) for length in lengths])) == len(batch)
    for wrong in (
        lambda lengths: np.zeros(len(lengths) - 1),
        lambda lengths: [np.zeros(length + 1) for length in lengths],
        lambda lengths: None,
    ):
        with pytest.raises(PluginError, match=r"(?s)own\.py:Own'.*expected: score: for \d+ rows"):
            compute(wrong)
