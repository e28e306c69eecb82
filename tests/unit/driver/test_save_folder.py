"""A folder of checkpoints holds one lineage, and one run at a time writes to it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.folders import check_lineage, folder_lock, save_lock, with_start
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.options.section import compose, dump_args
from harness.checkpoints import write_checkpoint


def options(folder: Path, **changes: Any) -> Any:
    chosen = {"run_dir": str(folder / "run"), "save": str(folder / "saves"), "num_rollout": 10, **changes}
    return compose(CORE_SECTIONS)(**chosen)


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w")


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Checkpoints of the steps 1 and 3."""
    for step in (1, 3):
        write_checkpoint(tmp_path / "saves", step, fill, {})
    return tmp_path / "saves"


@pytest.mark.parametrize("first_step", [0, 1, 2])
def test_a_checkpoint_beyond_the_first_step_is_refused_with_the_ways_out(
    saves: Path, tmp_path: Path, first_step: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_lineage(options(tmp_path), first_step)
    assert caught.value.where == f"--save {saves}"
    assert f"step 3, and this run begins at step {first_step}" in caught.value.what
    assert f"--load {saves}" in caught.value.hint
    check_lineage(options(tmp_path, save=str(tmp_path / "others")), first_step)


def test_the_newest_one_is_gone_on_from(saves: Path, tmp_path: Path) -> None:
    check_lineage(options(tmp_path), 3)
    check_lineage(options(tmp_path), 4)  # of another folder, in which it comes after these


def test_a_checkpoint_that_was_being_replaced_counts_and_an_unfinished_one_does_not(
    saves: Path, tmp_path: Path
) -> None:
    (saves / "step_000003").rename(saves / ".step_000003.replaced")
    with pytest.raises(ConfigError, match="step 3"):
        check_lineage(options(tmp_path), 1)
    (saves / ".step_000003.replaced").rename(saves / ".step_000003.abcdefgh")
    check_lineage(options(tmp_path), 1)


@pytest.mark.parametrize(
    ("changes", "first_step"),
    [({"save": None}, 0), ({"num_rollout": 0}, 0), ({"num_rollout": 2}, 2), ({"debug_rollout_only": True}, 0)],
)
def test_a_run_that_saves_nothing_is_not_asked(
    saves: Path, tmp_path: Path, changes: dict[str, Any], first_step: int
) -> None:
    check_lineage(options(tmp_path, **changes), first_step)


def test_a_run_of_epochs_is_asked(saves: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step 3"):
        check_lineage(options(tmp_path, num_rollout=None, num_epoch=1), 0)


def test_urls_are_looked_into_and_what_has_no_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    args = options(tmp_path, save="memory://key:secret@lineage/saves")
    check_lineage(args, 0)  # no folder yet
    for step in (2, 5):
        write_checkpoint(args.save, step, fill, scratch=tmp_path)
    with pytest.raises(ConfigError, match="step 5") as caught:
        check_lineage(args, 2)
    assert "secret" not in str(caught.value)
    system = MemoryFileSystem()
    files = (path for path in system.find("/") if "lineage/saves/step_000005" in path)
    (manifest,) = (path for path in files if path.endswith("manifest.json"))
    system.rm(manifest)
    check_lineage(args, 2)
    with pytest.raises(ConfigError, match="step 2"):
        check_lineage(args, 0)


def test_a_url_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise PermissionError("403")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuses)
    with pytest.raises(CheckpointError, match=r"memory://elsewhere.*403"):
        check_lineage(options(tmp_path, save="memory://elsewhere"), 0)


HOLD = """
import sys
from buffer_rl.options.section import load_args
from buffer_rl.driver.folders import save_lock
with save_lock(load_args(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_with_the_same_folder_is_refused_while_the_first_one_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, dump_args(options(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        other = {"run_dir": str(tmp_path / "other")}
        with pytest.raises(ConfigError, match="another run is at work") as caught, save_lock(options(tmp_path)):
            pass
        assert (caught.value.where, caught.value.hint) == ("--save", "add --save PATH")
        for free in ({"save": str(tmp_path / "b")}, {"save": None}, {"save": "memory://b"}):
            with save_lock(options(tmp_path, **other, **free)):
                pass
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "saves"]
        holder.kill()
    with save_lock(options(tmp_path)):
        pass


def test_checkpoints_may_be_in_the_runs_folder_itself(tmp_path: Path) -> None:
    args = options(tmp_path, save=f"file://{tmp_path}/run")
    with folder_lock(Path(args.run_dir)), save_lock(args):
        pass


def test_who_has_the_folder_to_himself_removes_what_killed_runs_left_and_nothing_else(
    saves: Path, tmp_path: Path
) -> None:
    shutil.copytree(saves / "step_000003", saves / ".step_000002.replaced")
    for name in (".step_000004.k3x_9abc", ".step_000003.00000000", ".load.a1b2c3d4", ".others.a1b2c3d4"):
        (saves / name).mkdir()
        fill(saves / name)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".load.a1b2c3d4").mkdir()
    with folder_lock(tmp_path / "run"), save_lock(options(tmp_path)):
        names = sorted(path.name for path in saves.iterdir() if path.is_dir())
        assert names == [".others.a1b2c3d4", ".step_000002.replaced", "step_000001", "step_000003"]
        assert not (tmp_path / "run" / ".load.a1b2c3d4").exists()


def test_a_run_that_loads_what_it_saves_starts_where_there_is_nothing_yet(saves: Path, tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    assert with_start(options(tmp_path, save=new, load=f"{new}/")).load is None
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".lock").touch()  # of a run that was killed before its first checkpoint
    assert with_start(options(tmp_path, save=new, load=new)).load is None
    assert with_start(options(tmp_path, save="memory://none", load="memory://none/")).load is None
    resumed = options(tmp_path, load=str(saves))
    assert with_start(resumed) is resumed
    other = options(tmp_path, save=new, load=str(tmp_path / "absent"))
    assert with_start(other).load == str(tmp_path / "absent")
    assert with_start(options(tmp_path, save=None, load=new)).load == new
