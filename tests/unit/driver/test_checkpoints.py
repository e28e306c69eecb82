"""A run's checkpoint: what is asked of whom, and that errors keep their class."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.actor import BufferActor
from buffer_rl.driver import local_roles
from buffer_rl.driver.local_roles import RunCheckpoints
from buffer_rl.errors import BufferRLError, CheckpointError, DeadlineError, TrainError
from buffer_rl.files.checkpoint import open_checkpoint
from buffer_rl.options.section import compose
from buffer_rl.train.rank import TrainRank
from buffer_rl.weights.role_weights import FolderUpdates


class Ranks:
    """A trainer group that writes a file for each call. late: what it answers when it is asked whether it has written,
    one after another."""

    def __init__(self, failure: BufferRLError | None = None, late: Sequence[bool | BufferRLError] = ()) -> None:
        self.role = "train"
        self._failure = failure
        self._late = list(late)
        self.limits: list[float] = []

    def call(self, method: Callable[..., object], path: str = "", *, timeout_s: float) -> bool | None:
        self.limits.append(timeout_s)
        if method == TrainRank.is_saved:
            answer = self._late.pop(0) if self._late else True
            if isinstance(answer, BufferRLError):
                raise answer
            return answer
        if method == TrainRank.save_hf and self._failure is not None:
            raise self._failure
        Path(path).mkdir(exist_ok=True)
        Path(path, method.__name__).write_text(method.__name__)
        return None


class SavingBuffer:
    def call(self, operation: Any, folder: str) -> None:
        assert operation is BufferActor.save
        Path(folder, "buffer.json").write_text("{}")


def checkpoints(folder: Path, *ranks: Ranks, **options: Any) -> RunCheckpoints:
    args: Any = compose(CORE_SECTIONS)(save=str(folder), save_timeout_s=17.0, lr=0.5, **options)
    trained = cast("Any", dict(zip(("train", "critic"), ranks, strict=False)))
    return RunCheckpoints(args, buffer=cast("Any", SavingBuffer()), trained=trained)


def save(writer: RunCheckpoints, step: int) -> None:
    writer.save(step)
    writer.seal()


def test_a_checkpoint_holds_the_ranks_the_model_the_buffer_and_the_options(tmp_path: Path) -> None:
    ranks = Ranks()
    save(checkpoints(tmp_path, ranks), 12)
    opened = open_checkpoint(tmp_path)
    assert opened.step == 12
    assert opened.facts["options"]["lr"] == 0.5
    names = sorted(str(path.relative_to(opened.folder)) for path in opened.folder.rglob("*") if path.is_file())
    assert names == ["buffer.json", "hf/save_hf", "manifest.json", "trainer/save"]
    assert 16.0 < ranks.limits[1] < ranks.limits[0] <= 17.0  # one deadline for both


def test_each_trained_role_has_a_folder_and_the_actor_gives_the_model(tmp_path: Path) -> None:
    save(checkpoints(tmp_path, Ranks(), Ranks(TrainError("a critic has no model to give"))), 1)
    opened = open_checkpoint(tmp_path)
    names = sorted(str(path.relative_to(opened.folder)) for path in opened.folder.rglob("*") if path.is_file())
    assert names == ["buffer.json", "critic/save", "hf/save_hf", "manifest.json", "trainer/save"]


def test_a_reference_that_was_updated_has_a_folder(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(save=str(tmp_path / "saves"), save_timeout_s=17.0)
    (tmp_path / "weights").mkdir()
    folder = tmp_path / "weights"
    reference = FolderUpdates(os.mkdir, lambda path, version: Path(path, "weights").touch() is None, folder)
    reference.update(3)
    trained = cast("Any", {"train": Ranks()})
    save(RunCheckpoints(args, buffer=cast("Any", SavingBuffer()), trained=trained, reference=reference), 4)
    assert (open_checkpoint(tmp_path / "saves").folder / "ref" / "weights").is_file()


def test_what_a_rank_raises_names_the_folder_whose_disk_may_be_full(tmp_path: Path) -> None:
    full = TrainError("OSError: [Errno 28] No space left on device", where="train 0.save_hf")
    with pytest.raises(TrainError) as caught:
        checkpoints(tmp_path / "saves", Ranks(full)).save(1)
    assert caught.value.where == f"train 0.save_hf, which writes to {tmp_path / 'saves'}"


@pytest.mark.parametrize("failure", [TrainError("asleep"), DeadlineError("no answer within 17 s", where="train.save")])
def test_what_a_rank_raises_is_raised_as_it_is_and_nothing_is_left(tmp_path: Path, failure: BufferRLError) -> None:
    with pytest.raises(type(failure)) as caught:
        checkpoints(tmp_path, Ranks(failure)).save(1)
    assert caught.value is failure
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_checkpoint_is_there_once_all_ranks_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_roles, "SAVE_POLL_S", 0.0)
    actor, critic = Ranks(late=[False, False, True]), Ranks(late=[False, True])
    writer = checkpoints(tmp_path, actor, critic, async_save=True)
    writer.save(3)
    assert [path.name[:13] for path in tmp_path.iterdir()] == [".step_000003."]  # no run takes it for a checkpoint
    assert (len(actor.limits), len(critic.limits)) == (2, 0)
    writer.save_next()
    assert (len(actor.limits), len(critic.limits)) == (2, 1)
    writer.seal()
    assert open_checkpoint(tmp_path).step == 3
    assert (len(actor.limits), len(critic.limits)) == (5, 3)
    assert actor.limits[:2] == sorted(actor.limits[:2], reverse=True)  # one deadline for all
    assert min(actor.limits[2:]) > 1200.0  # a rank answers when its own work is done, which has a deadline of its own


def test_ranks_that_do_not_end_are_waited_for_with_the_deadline_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_roles, "SAVE_POLL_S", 0.0)
    ranks = Ranks(late=[False] * 3)
    writer = checkpoints(tmp_path, ranks, async_save=True)
    writer.save(3)
    left = iter([9.0, 4.0, 4.0, 0.0, 0.0])
    monkeypatch.setattr(writer, "time_left", lambda: next(left))
    with pytest.raises(DeadlineError, match=r"(?s)did not write their part within 17 s.*--save-timeout-s"):
        writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_write_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    full = CheckpointError("the checkpoint cannot be written: no space", where="train 1")
    writer = checkpoints(tmp_path, Ranks(late=[True, full]), async_save=True)
    save(writer, 3)
    writer.save(5)
    with pytest.raises(CheckpointError, match="no space"):
        writer.seal()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]
