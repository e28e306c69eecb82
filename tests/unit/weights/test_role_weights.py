"""The actor's weights for roles: what a role, its replacements and checkpoints of a reference get, by either way."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.errors import EngineError, WorkerDiedError
from buffer_rl.weights.publish import ATTEMPTS
from buffer_rl.weights.role_weights import FolderUpdates, RoleBroadcasts, RolePublisher
from harness.fake_roles import FakePublisher


class Writer:
    """Writes a file whose text is the number of writes so far."""

    def __init__(self) -> None:
        self.writes = 0

    def save_hf(self, path: str) -> None:
        self.writes += 1
        Path(path).mkdir(parents=True)
        (Path(path) / "model.safetensors").write_text(str(self.writes))


class Reference:
    """Reads what it is given, as a process with the reference model does."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, int]] = []

    def load(self, path: str, version: int) -> bool:
        self.loads.append(((Path(path) / "model.safetensors").read_text(), version))
        return True


def test_the_reference_takes_the_newest_weights_and_a_checkpoint_those_that_it_has(tmp_path: Path) -> None:
    reference, folder = Reference(), tmp_path / "weights_ref"
    updates = FolderUpdates(Writer().save_hf, reference.load, folder)
    updates.save(tmp_path / "initial")
    assert not (tmp_path / "initial").exists()
    updates.update(2)
    (folder / "vocabulary").mkdir()  # of somebody else
    updates.update(4)
    assert reference.loads == [("1", 2), ("2", 4)]
    assert sorted(path.name for path in folder.iterdir()) == ["v000004", "vocabulary"]
    updates.save(tmp_path / "checkpoint" / "ref")
    assert (tmp_path / "checkpoint" / "ref" / "model.safetensors").read_text() == "2"


def test_a_resumed_reference_is_that_of_the_checkpoint_and_saved_again(tmp_path: Path) -> None:
    reference, saved = Reference(), tmp_path / "saved"
    updates = FolderUpdates(Writer().save_hf, reference.load, tmp_path / "weights_ref")
    updates.restore(saved, 5)
    assert reference.loads == []
    Writer().save_hf(str(saved))
    updates.restore(saved, 5)
    assert reference.loads == [("1", 5)]
    shutil.rmtree(saved)  # older checkpoints are removed while a run goes on
    updates.save(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_text() == "1"
    updates.update(6)
    assert [path.name for path in (tmp_path / "weights_ref").iterdir()] == ["v000006"]


def test_a_restored_reference_leaves_the_checkpoint_as_it_is(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    Writer().save_hf(str(saved))
    updates = FolderUpdates(Writer().save_hf, Reference().load, tmp_path / "weights_ref")
    updates.restore(saved, 5)
    updates.update(6)
    assert (saved / "model.safetensors").read_text() == "1"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_role_that_is_down_is_passed_over_by_name(is_there: bool) -> None:
    said: list[str] = []
    RolePublisher(None, "actor_fwd", lambda version: is_there, said.append).publish(3)
    replacement = "its replacement takes version 3 before it works"
    assert said == ([] if is_there else [f"actor_fwd is down and passed over: {replacement}"])


def test_a_role_that_has_a_version_is_left_alone_when_it_is_published_to_the_engines_again() -> None:
    engines, updates = FakePublisher(), []
    publisher = RolePublisher(engines, "actor_fwd", lambda version: updates.append(version) or True, print)  # type: ignore[arg-type, func-returns-value]
    for version in (1, 1, 2):
        publisher.publish(version)
    assert (engines.versions, updates) == ([1, 1, 2], [1, 2])


class Member:
    """What an actor looks like from outside. dead: no call comes back."""

    def __init__(self) -> None:
        self.dead = False

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *args: Any) -> Any:
        return self

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ActorDiedError()) if self.dead else future.set_result(None)
        return future


class Transport:
    """Notes what it sends to the receivers, as ``connect`` and the versions. fails: what its next sends raise."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.fails: list[Exception] = []

    def connect(self, trainer: Any, receivers: Any) -> None:
        receivers.server_info()
        self.sent.append("connect")

    def publish(self, version: int) -> None:
        if self.fails:
            raise self.fails.pop()
        self.sent.append(version)


def broadcasts(**options: Any) -> tuple[Transport, ActorGroup, RoleBroadcasts]:
    transport, role = Transport(), ActorGroup("actor_fwd", lambda rank: Member(), 2)
    trainer: Any = None
    return transport, role, RoleBroadcasts(role, transport, trainer, timeout_s=5.0, **options)  # type: ignore[arg-type]


def test_a_role_is_connected_once_and_its_replacements_are_sent_the_newest_version_again() -> None:
    transport, role, updates = broadcasts()
    assert [updates.update(version) for version in (1, 2)] == [True, True]
    role.restart()
    assert updates.update(3)
    assert transport.sent == ["connect", 1, 2, "connect", 2, 3]


def test_a_broadcast_that_fails_is_sent_through_another_group_and_the_last_failure_is_raised() -> None:
    transport, _, updates = broadcasts()
    transport.fails = [EngineError("broken")] * (ATTEMPTS - 1)
    assert updates.update(1)
    assert transport.sent == ["connect"] * ATTEMPTS + [1]
    transport.fails = [EngineError("broken")] * ATTEMPTS
    with pytest.raises(EngineError, match="broken"):
        updates.update(2)


def test_a_role_whose_process_is_dead_is_no_error_but_a_dead_trainer_is() -> None:
    transport, role, updates = broadcasts()
    role.actors[1].dead = True
    assert not updates.update(1)
    assert transport.sent == []
    role.actors[1].dead = False
    transport.fails = [WorkerDiedError("the process died", where="train 0.broadcast")]
    with pytest.raises(WorkerDiedError, match="train 0"):
        updates.update(2)


def test_a_trainer_that_works_on_a_rollout_sends_nothing_to_a_replacement_and_the_run_begins_again() -> None:
    transport, role, updates = broadcasts(trainer_is_busy=True)
    assert updates.update(1)
    with pytest.raises(WorkerDiedError, match="lacks version 1, and the trainer cannot send it") as caught:
        role.restart()
    assert caught.value.where == "actor_fwd"
    assert updates.update(2)
    assert transport.sent == ["connect", 1, 2]
