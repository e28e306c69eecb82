"""Weights in a folder that others poll: no reader sees a part of a version, and the pointer only moves forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.options.section import compose
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.follow import POINTER, FollowFolder, Newest, read_newest
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import FakeEngines, local_senders

NUM_FILES = 20


class Trainer:
    """Writes ``version`` into each of the files of a folder."""

    def __init__(self) -> None:
        self.version = 0
        self.fails_after = NUM_FILES + 1

    def save_hf(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        for number in range(NUM_FILES):
            if number >= self.fails_after:
                raise OSError("no space left on device")
            Path(path, str(number)).write_text(str(self.version))


def read(folder: Path, newest: Newest) -> set[str]:
    """What stands in the files of a version. Raises FileNotFoundError if one is not there."""
    return {(folder / newest.folder / str(number)).read_text() for number in range(NUM_FILES)}


def write(follow: FollowFolder, trainer: Trainer, version: int) -> None:
    trainer.version = version
    follow.write(version)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_version_is_a_folder_and_the_pointer_names_the_newest(tmp_path: Path) -> None:
    trainer = Trainer()
    follow = FollowFolder(tmp_path / "shared", trainer.save_hf, keep=2)
    assert read_newest(tmp_path / "shared") is None
    for version in range(1, 6):
        write(follow, trainer, version)
        follow.write(version)  # engines alone have lost it: nothing new
    folder = tmp_path / "shared"
    kept = ["v000003", "v000004", "v000005"]
    assert names(folder) == [POINTER, *kept]
    newest = read_newest(folder)
    assert newest == Newest(publication=5, version=5, folder="v000005", kept=kept)
    assert read(folder, newest) == {"5"}


@pytest.mark.parametrize("keep", [0, 2])
def test_a_reader_that_polls_sees_whole_versions_in_order(tmp_path: Path, keep: int) -> None:
    trainer, end, problems, seen = Trainer(), threading.Event(), [], []
    follow = FollowFolder(tmp_path, trainer.save_hf, keep=keep)

    def poll() -> None:
        last = 0
        while True:
            is_last = end.is_set()
            newest = read_newest(tmp_path)
            if newest is not None and newest.publication < last:
                problems.append(f"from {last} back to {newest.publication}")
            if newest is not None and newest.publication > last:
                last = newest.publication
                try:
                    found = read(tmp_path, newest)
                except FileNotFoundError:
                    now = read_newest(tmp_path)
                    if now is None or now.publication <= newest.publication + keep:
                        problems.append(f"{newest} is not whole at {now}")
                else:
                    seen.append(newest.version)
                    if found != {str(newest.version)}:
                        problems.append(f"{newest} has {found}")
            if is_last:
                return

    readers = [threading.Thread(target=poll) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 150):
        write(follow, trainer, version)
    end.set()
    for reader in readers:
        reader.join()
    assert problems == []
    assert seen.count(149) == 2


def fail(*_: object) -> Any:
    raise OSError("the network is gone")


@pytest.mark.parametrize("at", ["files", "folder", "pointer"])
def test_a_version_that_cannot_be_written_leaves_the_one_before_and_the_next_one_is_whole(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    follow = FollowFolder(tmp_path, trainer.save_hf, keep=1)
    write(follow, trainer, 1)
    before = read_newest(tmp_path)
    with monkeypatch.context() as patch:
        if at == "files":
            trainer.fails_after = 3
        else:
            patch.setattr(Path, {"folder": "rename", "pointer": "replace"}[at], fail)
        with pytest.raises(CheckpointError, match="version 2 could not be written for followers"):
            write(follow, trainer, 2)
    trainer.fails_after = NUM_FILES + 1
    assert read_newest(tmp_path) == before
    assert before is not None
    assert read(tmp_path, before) == {"1"}
    write(follow, trainer, 2)
    newest = read_newest(tmp_path)
    assert newest is not None
    assert (newest.publication, newest.version, read(tmp_path, newest)) == (2, 2, {"2"})
    assert names(tmp_path) == sorted([POINTER, *newest.kept])


def test_a_run_that_resumes_from_an_older_checkpoint_moves_the_pointer_forward_and_rewrites_no_folder(
    tmp_path: Path,
) -> None:
    trainer = Trainer()
    first = FollowFolder(tmp_path, trainer.save_hf, keep=2)
    for version in (4, 5, 6):
        write(first, trainer, version)
    (tmp_path / ".v000007.tmp").mkdir()  # it was killed
    second = FollowFolder(tmp_path, trainer.save_hf, keep=2)
    write(second, trainer, 5)
    newest = read_newest(tmp_path)
    assert newest == Newest(publication=4, version=5, folder="v000005.4", kept=["v000005", "v000006", "v000005.4"])
    write(second, trainer, 6)
    assert names(tmp_path) == [POINTER, "v000005.4", "v000006", "v000006.5"]
    (tmp_path / ".v000006.6.tmp").mkdir()  # it was killed again
    write(FollowFolder(tmp_path, trainer.save_hf, keep=0), trainer, 7)
    assert names(tmp_path) == [POINTER, "v000007"]


def test_what_is_no_version_stays(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    trainer = Trainer()
    write(FollowFolder(tmp_path, trainer.save_hf, keep=0), trainer, 1)
    assert names(tmp_path) == [POINTER, "tokenizer", "v000001"]


def test_a_pointer_of_something_else_is_named(tmp_path: Path) -> None:
    for content in ("{", '{"a": 1}', "[]"):
        (tmp_path / POINTER).write_text(content)
        with pytest.raises(CheckpointError, match="no pointer to published weights"):
            read_newest(tmp_path)


def test_a_trainer_that_writes_elsewhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not on the driver's node"):
        FollowFolder(tmp_path, lambda path: None, keep=0).write(1)


def test_a_run_has_it_if_it_is_asked_for_and_not_where_its_engines_read(tmp_path: Path) -> None:
    make: Callable[..., Any] = compose(CORE_SECTIONS)
    assert FollowFolder.from_args(make(), fail) is None
    follow = FollowFolder.from_args(make(publish_follow=str(tmp_path), publish_follow_keep=0), Trainer().save_hf)
    assert follow is not None
    follow.write(1)
    follow.write(2)
    assert names(tmp_path) == [POINTER, "v000002"]
    for where in ({"run_dir": str(tmp_path)}, {"update_weight_disk_dir": str(tmp_path / "weights")}):
        with pytest.raises(ConfigError, match="take their weights from the same folder"):
            FollowFolder.from_args(make(publish_follow=str(tmp_path / "weights"), **where), fail)


def test_followers_find_a_version_once_the_engines_have_it(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    trainer, engines, found = Trainer(), FakeEngines(), []
    follow = FollowFolder(tmp_path / "shared", trainer.save_hf, keep=2)

    def write(version: int) -> None:
        found.append((engines.version, engines.paused, read_newest(tmp_path / "shared")))
        follow.write(version)

    senders = local_senders(DiskTransport, args, lambda: iter(()))
    publisher: Any = Publisher(DiskTransport(args), senders, engines, follow=write)  # type: ignore[arg-type]  # a fake
    metrics = publisher.publish(1)
    assert found == [(1, False, None)]
    assert "perf/publish_follow" in metrics
    newest = read_newest(tmp_path / "shared")
    assert newest is not None
    assert newest.version == 1
