"""Checkpoints: whole or absent, and damage is always found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from buffer_rl.errors import CheckpointError, DeadlineError
from buffer_rl.files.checkpoint import newest_step, open_checkpoint, read_manifest
from harness.checkpoints import write_checkpoint


def fill(folder: Path) -> None:
    (folder / "trainer").mkdir()
    (folder / "trainer" / "weights.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "buffer.json").write_text('{"queue": []}')


def test_what_was_written_is_opened_and_the_newest_step_is_chosen(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 9, fill, {"note": "a"})
    write_checkpoint(tmp_path, 10, fill, {"note": "b"})
    newest = open_checkpoint(tmp_path)
    assert (newest.step, newest.facts, newest.folder.name) == (10, {"note": "b"}, "step_000010")
    assert open_checkpoint(tmp_path / "step_000009").facts == {"note": "a"}
    assert (newest.folder / "trainer" / "weights.bin").read_bytes() == bytes(range(256)) * 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000009", "step_000010"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, fill, {"note": "old"})
    write_checkpoint(tmp_path, 1, fill, {"note": "new"})
    assert open_checkpoint(tmp_path).facts == {"note": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_failure_while_writing_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, fill, {})

    def breaks(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write_checkpoint(tmp_path, 2, breaks, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert open_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged: 2559 bytes"),
        (lambda path: path.write_bytes(b"\x01" + path.read_bytes()[1:]), "hash differs"),
        (lambda path: path.unlink(), "missing"),
    ],
    ids=["truncated", "flipped", "removed"],
)
def test_damage_is_named_and_no_older_checkpoint_is_taken_instead(tmp_path: Path, damage: object, message: str) -> None:
    write_checkpoint(tmp_path, 1, fill, {})
    folder = write_checkpoint(tmp_path, 2, fill, {})
    assert callable(damage)
    damage(folder / "trainer" / "weights.bin")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.where.endswith("step_000002/trainer/weights.bin")
    assert caught.value.hint.endswith(f"--load {tmp_path}/step_000001")


def test_a_copy_that_was_cut_off_is_named_with_the_checkpoint_before_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, fill, {})
    write_checkpoint(tmp_path, 2, fill, {})
    (tmp_path / "step_000010").mkdir()
    for read in (open_checkpoint, read_manifest):
        with pytest.raises(CheckpointError, match=f"hint: .*--load {tmp_path}/step_000002$"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', "[]"])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path, 1, fill, {})
    (folder / "manifest.json").write_text(text)
    for read in (open_checkpoint, read_manifest):
        with pytest.raises(CheckpointError, match=r"manifest(.|\n)*hint: copy it again; there is none before it here"):
            read(tmp_path)


def test_a_missing_folder_and_an_empty_one_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("missing", ["step", "facts", "files"])
def test_a_manifest_that_lacks_a_part_is_an_error(tmp_path: Path, missing: str) -> None:
    folder = write_checkpoint(tmp_path, 1, fill, {})
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[missing]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"manifest is damaged: KeyError\\('{missing}'\\)"):
        open_checkpoint(tmp_path)


def test_a_deadline_that_passes_while_writing_stays_a_deadline(tmp_path: Path) -> None:
    late = DeadlineError("no answer within 5 s", where="train.save")

    def waits(folder: Path) -> None:
        raise late

    with pytest.raises(DeadlineError) as caught:
        write_checkpoint(tmp_path, 1, waits, {})
    assert caught.value is late


def test_the_names_of_new_folders_above_the_checkpoint_are_flushed_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[Path] = set()
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    root = tmp_path / "runs" / "a" / "saves"
    write_checkpoint(root, 1, fill, {})
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "a", root} <= flushed
    assert tmp_path.parent not in flushed


def test_the_newest_step_is_0_where_there_is_no_checkpoint_or_no_folder(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "absent") == newest_step(tmp_path) == 0
    for step in (9, 1_000_000):
        write_checkpoint(tmp_path, step, fill, {})
    assert newest_step(tmp_path) == 1_000_000


def test_what_a_killed_writer_left_of_a_step_goes_when_the_step_is_written_again(tmp_path: Path) -> None:
    for name in (".step_000004.k3x", ".step_000005.abc"):
        fill_into = tmp_path / name
        fill_into.mkdir()
        fill(fill_into)
    write_checkpoint(tmp_path, 4, fill, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_000005.abc", "step_000004"]
    assert open_checkpoint(tmp_path).step == 4
