"""What a run removes of its checkpoints, and what it notes beside them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.folders import retain, save_lock, with_start
from buffer_rl.errors import ConfigError
from buffer_rl.files.checkpoint import folder_at, held_checkpoints, opened_checkpoint
from buffer_rl.options.section import compose
from harness.checkpoints import write_checkpoint


def options(folder: Path, **changes: Any) -> Any:
    chosen = {"run_dir": str(folder / "run"), "save": str(folder / "saves"), "keep_last": 2, **changes}
    return compose(CORE_SECTIONS)(**chosen)


def save(args: Any, *steps: int, lineage: str = "x") -> None:
    for step in steps:
        write_checkpoint(args.save, step, facts={"lineage": lineage})


def evaluated(folder: Path, **scores: float) -> None:
    """Write the metrics of evaluations after the steps ``sN``."""
    (folder / "run").mkdir(exist_ok=True)
    lines = [{"step": int(name[1:]), "kind": "eval", "eval/dev": score} for name, score in scores.items()]
    lines.append({"step": 1, "kind": "train", "train/loss": 1.0})
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps_in(args: Any) -> list[int]:
    return list(held_checkpoints(folder_at(args.save)))


def test_the_last_remain_and_the_best_with_what_its_evaluation_said(tmp_path: Path) -> None:
    args = options(tmp_path, keep_best="eval/dev")
    save(args, 1, 2)
    evaluated(tmp_path, s1=0.9, s2=0.1)
    retain(args)  # as after each save; the evaluation of the newest one comes later
    save(args, 3)
    evaluated(tmp_path, s1=0.9, s2=0.1, s3=0.2)
    retain(args)
    assert steps_in(args) == [1, 2, 3]
    save(args, 4)
    (tmp_path / "run" / "metrics.jsonl").write_text("")  # of a run that goes on in another folder
    retain(args)
    assert steps_in(args) == [1, 3, 4]
    assert held_checkpoints(folder_at(args.save))[1].scores == {"eval/dev": 0.9}
    retain(options(tmp_path, keep_best="-eval/dev", keep_last=1))
    assert steps_in(args) == [3, 4]


def test_without_keep_last_all_remain_and_evaluations_are_noted(tmp_path: Path) -> None:
    args = options(tmp_path, keep_last=None)
    save(args, 1, 2, 3)
    evaluated(tmp_path, s2=0.1)
    retain(args)
    assert [held.scores for held in held_checkpoints(folder_at(args.save)).values()] == [{}, {"eval/dev": 0.1}, {}]


def test_checkpoints_of_another_run_and_folders_of_the_user_stay(tmp_path: Path) -> None:
    args = options(tmp_path, keep_last=1)
    save(args, 1, 3, lineage="other")
    save(args, 2, 4, 5)
    evaluated(tmp_path)
    (tmp_path / "saves" / "step_000000").mkdir()
    (tmp_path / "saves" / "best_of_all").mkdir()
    write_checkpoint(args.save, 6, facts={})  # of a version without lineages
    retain(args)
    assert steps_in(args) == [1, 2, 3, 4, 5, 6]
    save(args, 7)
    retain(args)
    assert steps_in(args) == [1, 3, 6, 7]
    assert {"step_000000", "best_of_all"} <= set(os.listdir(args.save))


def test_at_a_url_the_same_remain(tmp_path: Path) -> None:
    args = options(tmp_path, save="memory://kept", keep_best="eval/dev")
    save(args, 1, 2, 3, 4)
    evaluated(tmp_path, s3=0.1, s4=0.3)
    retain(args)
    save(args, 5, 6)
    retain(args)
    assert steps_in(args) == [4, 5, 6]
    MemoryFileSystem.store.clear()


def test_at_a_url_what_a_kill_left_of_a_removal_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = options(tmp_path, save="memory://left", keep_last=1)
    save(args, 1, 2)
    evaluated(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", lambda *_args, **_named: None)  # as if the process had ended there
        retain(args)
    assert sorted(folder_at(args.save).names()) == ["step_000001", "step_000002"]
    save(args, 3)
    retain(args)
    assert folder_at(args.save).names() == ["step_000003"]
    MemoryFileSystem.store.clear()


def test_the_checkpoint_that_a_run_has_open_goes_when_the_run_ends(tmp_path: Path) -> None:
    args = options(tmp_path, keep_last=1)
    save(args, 1)
    evaluated(tmp_path)
    with save_lock(args), opened_checkpoint(args.save):
        retain(args)
        assert steps_in(args) == [1]
        save(args, 2)
        retain(args)
        assert steps_in(args) == [1, 2]
    assert steps_in(args) == [2]


def test_a_run_that_saved_nothing_removes_nothing(tmp_path: Path) -> None:
    args = options(tmp_path, keep_last=1)
    save(args, 1, 2)
    evaluated(tmp_path)
    with save_lock(args):
        pass
    assert steps_in(args) == [1, 2]


def test_what_cannot_be_removed_is_logged_and_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = options(tmp_path, keep_last=1)
    save(args, 1, 2)
    evaluated(tmp_path)
    (tmp_path / "saves" / "step_000001" / "manifest.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        retain(args)
    assert "step_000001" in caplog.text
    assert sorted(os.listdir(args.save)) == ["step_000001", "step_000002"]


def test_load_auto_is_the_newest_checkpoint_in_save_or_the_start(tmp_path: Path) -> None:
    args = options(tmp_path, load="auto")
    assert with_start(args).load is None
    save(args, 3)
    assert with_start(args).load == args.save
    url = options(tmp_path, load="auto", save="memory://auto")
    assert with_start(url).load is None
    save(url, 3)
    assert with_start(url).load == "memory://auto"
    MemoryFileSystem.store.clear()


def test_load_auto_without_a_folder_to_save_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        with_start(options(tmp_path, load="auto", save=None))
    assert (caught.value.where, caught.value.hint) == ("--load auto", "add --save PATH")
