"""Which checkpoints remain, and that a removed one is whole or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.errors import CheckpointError
from buffer_rl.files.checkpoint import (
    EVALUATION,
    LocalFolder,
    best_step,
    folder_at,
    held_checkpoints,
    kept_steps,
    newest_step,
    open_checkpoint,
    opened_checkpoint,
    remove_unfinished,
)
from harness.checkpoints import write_checkpoint

SCORES = st.dictionaries(
    st.integers(1, 30),
    st.dictionaries(st.sampled_from(["eval/a", "eval/b"]), st.none() | st.integers(-3, 3).map(float)),
    max_size=12,
)


@given(SCORES, st.integers(1, 5), st.sampled_from([None, "eval/a", "-eval/a", "eval/absent"]))
def test_the_newest_and_the_best_remain_and_nothing_else(
    scores: Mapping[int, Mapping[str, float | None]], last: int, best: str | None
) -> None:
    kept = kept_steps(scores, last, best)
    newest = sorted(scores, reverse=True)[:last]
    assert kept.issuperset(newest)
    assert kept <= scores.keys()
    assert len(kept) <= last + (best is not None)
    values = {step: found["eval/a"] for step, found in scores.items() if found.get("eval/a") is not None}
    if best in ("eval/a", "-eval/a") and values:
        wanted = (max if best == "eval/a" else min)(values.values())
        assert max(step for step in values if values[step] == wanted) in kept
    elif best != "eval/a":
        assert kept == set(newest)


def test_the_best_is_the_newest_of_equal_ones_and_none_without_scores() -> None:
    scores = {1: {"eval/a": 0.5}, 2: {"eval/a": 0.5}, 3: {"eval/a": 0.1}, 4: {"eval/a": None}, 5: {}}
    assert best_step(scores, "eval/a") == 2
    assert best_step(scores, "-eval/a") == 3
    assert best_step(scores, "eval/b") is None
    assert kept_steps(scores, 1, "eval/a") == {2, 5}


def fill(folder: Path) -> None:
    (folder / "trainer").mkdir()
    (folder / "trainer" / "weights").write_bytes(b"w" * 1000)


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    for step in (1, 2):
        write_checkpoint(tmp_path / "saves", step, fill)
    return tmp_path / "saves"


@pytest.mark.parametrize("scheme", ["file://", "memory://"])
def test_at_a_url_scores_are_noted_and_a_checkpoint_is_removed_as_a_whole(tmp_path: Path, scheme: str) -> None:
    root = f"{scheme}{tmp_path}/saves"
    for step in (1, 2, 10):
        write_checkpoint(root, step, fill, {"n": step})
    folder = folder_at(root)
    folder.put("step_000002", EVALUATION, b'{"eval/a":0.5}')
    found = held_checkpoints(folder)
    assert [(step, held.name, held.scores) for step, held in found.items()] == [
        (1, "step_000001", {}),
        (2, "step_000002", {"eval/a": 0.5}),
        (10, "step_000010", {}),
    ]
    assert list(held_checkpoints(folder, newest=2)) == [2, 10]
    folder.remove("step_000002")
    folder.remove("step_000010")
    assert folder.names() == ["step_000001"]
    assert newest_step(root) == 1
    with opened_checkpoint(root, tmp_path) as checkpoint:
        assert (checkpoint.folder / "trainer" / "weights").read_bytes() == b"w" * 1000
    MemoryFileSystem.store.clear()


def test_at_a_url_a_removal_that_was_cut_off_leaves_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_checkpoint("memory://cut", step, fill)
    folder = folder_at("memory://cut")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", lambda *_args, **_named: None)  # as if the process had ended there
        folder.remove("step_000002")
    assert list(held_checkpoints(folder)) == [1]
    assert newest_step("memory://cut") == 1
    MemoryFileSystem.store.clear()


def test_scores_that_a_kill_cut_off_are_none(saves: Path) -> None:
    folder = LocalFolder(str(saves))
    folder.put("step_000001", EVALUATION, b'{"eval/a": 0.')
    assert [held.scores for held in held_checkpoints(folder).values()] == [{}, {}]
    open_checkpoint(saves / "step_000001")  # they are no part of what its manifest covers


KILLED = """
import os, shutil, signal, sys
from buffer_rl.files.checkpoint import LocalFolder
real = shutil.rmtree
def rmtree(path, **options):
    if str(path).endswith(".removed") and os.path.exists(path):
        os.unlink(os.path.join(path, "trainer", "weights"))
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, **options)
shutil.rmtree = rmtree
LocalFolder(sys.argv[1]).remove("step_000001")
"""


def test_a_kill_between_rename_and_removal_leaves_a_hidden_folder_that_the_next_run_removes(saves: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(saves)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(saves)) == [".step_000001.removed", "step_000002"]
    assert list(held_checkpoints(LocalFolder(str(saves)))) == [2]
    remove_unfinished(saves)
    assert os.listdir(saves) == ["step_000002"]


def test_an_older_content_of_the_step_does_not_come_back(saves: Path) -> None:
    """Which a kill in the middle of replacing the checkpoint leaves under a hidden name, and readers take."""
    (saves / ".step_000001.replaced").mkdir()
    LocalFolder(str(saves)).remove("step_000001")
    assert os.listdir(saves) == ["step_000002"]


def test_a_checkpoint_that_is_being_read_stays_until_it_is_not(saves: Path) -> None:
    folder = LocalFolder(str(saves))
    with opened_checkpoint(saves / "step_000001"), opened_checkpoint(saves / "step_000001"):
        folder.remove("step_000001")
        open_checkpoint(saves / "step_000001")
    folder.remove("step_000001")
    assert os.listdir(saves) == ["step_000002"]


def test_a_manifest_that_is_damaged_is_an_error(saves: Path) -> None:
    (saves / "step_000001" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step_000001"):
        held_checkpoints(LocalFolder(str(saves)))
