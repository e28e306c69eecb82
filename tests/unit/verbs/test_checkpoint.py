"""``buffer-rl checkpoint verify``, as a user runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from buffer_rl.cli import main
from buffer_rl.driver.folders import folder_lock
from buffer_rl.files.checkpoint import opened_checkpoint
from harness.checkpoints import write_checkpoint


def fill(folder: Path) -> None:
    (folder / "trainer").mkdir()
    (folder / "trainer" / "weights.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "buffer.json").write_text('{"queue": []}')


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    for step in (999_999, 1_000_000, 3):
        write_checkpoint(tmp_path / "saves", step, fill, {})
    return tmp_path / "saves"


def verified(capsys: pytest.CaptureFixture[str], path: Path | str) -> tuple[int, list[str], str]:
    status = main(["checkpoint", "verify", str(path)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_whole_checkpoints_are_called_whole_the_oldest_first(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["step_000003", "step_999999", "step_1000000"]
    assert verified(capsys, saves) == (0, [f"{saves / step}: whole" for step in steps], "")
    assert verified(capsys, saves / "step_000003") == (0, [f"{saves / 'step_000003'}: whole"], "")


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "removed", "manifest cut", "manifest removed"])
def test_damage_is_named_and_the_others_are_checked_too(
    saves: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saves / "step_000003"
    weights, manifest = folder / "trainer" / "weights.bin", folder / "manifest.json"
    file, said = weights, "damaged"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "longer":
        weights.write_bytes(weights.read_bytes() + b"x")
    elif damage == "flipped":
        content = bytearray(weights.read_bytes())
        content[1234] ^= 1
        weights.write_bytes(content)
    elif damage == "removed":
        weights.unlink()
        said = "missing"
    else:
        file, said = manifest, "cannot be read"
        manifest.write_bytes(manifest.read_bytes()[:-10]) if damage == "manifest cut" else manifest.unlink()
    status, out, err = verified(capsys, saves)
    assert status == 2
    assert [line.partition(": ")[2][:7] for line in out] == ["DAMAGED", "whole", "whole"]
    assert f"{file}: " in err
    assert said in err
    assert verified(capsys, folder)[0] == 2
    assert verified(capsys, saves / "step_999999")[0] == 0


def test_every_damaged_file_is_named(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saves / "step_000003"
    (folder / "buffer.json").write_text("{}")
    (folder / "trainer" / "weights.bin").unlink()
    status, out, err = verified(capsys, folder)
    assert (status, out) == (2, [f"{folder}: DAMAGED, 2 faults"])
    assert "buffer.json" in err
    assert "weights.bin" in err


def test_where_there_is_no_checkpoint_nothing_is_called_whole(
    saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = verified(capsys, tmp_path / "nothing")
    assert (status, out) == (2, [])
    assert "there is no such folder" in err
    status, out, err = verified(capsys, saves / "step_000003" / "trainer")
    assert (status, out) == (2, [])
    assert "holds no checkpoint" in err


def test_checkpoints_in_a_store_and_copies_from_one_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    url = f"file://{store}"
    write_checkpoint(url, 1, fill, {})
    assert verified(capsys, url) == (0, [f"{store / 'step_000001'}: whole"], "")
    write_checkpoint("memory://verify", 5, fill, scratch=tmp_path)
    assert verified(capsys, "memory://verify") == (0, ["memory://verify: the checkpoint after 5 steps is whole"], "")
    import fsspec

    system = fsspec.filesystem("memory")
    weights = next(name for name in system.find("/verify") if name.endswith("weights.bin"))
    copy = tmp_path / "copy"
    system.get("/verify", str(copy), recursive=True)
    assert verified(capsys, copy)[0] == 0
    system.pipe_file(weights, b"x" * 2560)
    assert verified(capsys, "memory://verify")[0] == 2
    file = next(copy.rglob("weights.bin"))
    file.write_bytes(b"x" * 2560)
    status, _, err = verified(capsys, copy)
    assert status == 2
    assert str(file) in err
    shutil.rmtree(copy)


def evaluated_saves(folder: Path) -> Path:
    for step, score in ((1, 0.25), (2, 0.75), (3, 0.5)):
        facts = {"saved": f"2030-01-0{step}T00:00:00+00:00", "changed": {"--run-dir": "runs/a", "--lr": 0.5}}
        write_checkpoint(folder / "evaluated", step, fill, facts | {"options": {"keep_best": None}})
        (folder / "evaluated" / f"step_00000{step}" / "evaluation.json").write_text(f'{{"eval/dev": {score}}}')
    return folder / "evaluated"


def test_the_list_has_step_size_time_evaluation_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = evaluated_saves(tmp_path)
    write_checkpoint(saves, 4, fill, {"changed": {"--prompt-data": ["a.jsonl", "b c.jsonl"]}})
    assert main(["checkpoint", "list", str(saves)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["step", "size", "saved", "eval/dev", "run"],
        ["1", "2.57", "kB", "2030-01-01T00:00:00+00:00", "0.25", "1"],
        ["2", "2.57", "kB", "2030-01-02T00:00:00+00:00", "0.75*", "1"],
        ["3", "2.57", "kB", "2030-01-03T00:00:00+00:00", "0.5", "1"],
        ["4", "(newest)", "2.57", "kB", "2"],
        ["run", "1:", "--run-dir", "runs/a", "--lr", "0.5"],
        ["run", "2:", "--prompt-data", "a.jsonl", "'b", "c.jsonl'"],
    ]


def test_the_star_is_at_the_lowest_if_the_run_keeps_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = evaluated_saves(tmp_path)
    write_checkpoint(saves, 4, fill, {"options": {"keep_best": "-eval/dev"}})
    assert main(["checkpoint", "list", str(saves)]) == 0
    assert "0.25*" in capsys.readouterr().out


def test_checkpoints_at_a_url_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint("memory://listed", 7, fill, {"saved": "2030"})
    assert main(["checkpoint", "list", "memory://listed"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["7", "(newest)", "2.57", "kB", "2030", "1"]


def test_pruning_shows_first_and_then_removes_all_but_the_newest_and_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = evaluated_saves(tmp_path)
    command = ["checkpoint", "prune", str(saves), "--keep-last", "1", "--keep-best=-eval/dev"]
    assert main([*command, "--dry-run"]) == 0
    words = ["kept", "would be removed", "kept"]
    steps = ["step_000001", "step_000002", "step_000003"]
    assert capsys.readouterr().out.splitlines() == [f"{s}  2.57 kB  {w}" for s, w in zip(steps, words, strict=True)]
    assert sorted(path.name for path in saves.iterdir()) == steps
    with opened_checkpoint(saves / "step_000002"):
        assert main(command) == 0
        assert "step_000002  2.57 kB  kept: it is being read" in capsys.readouterr().out
    assert main(command) == 0
    assert "step_000002  2.57 kB  removed" in capsys.readouterr().out
    assert sorted(path.name for path in saves.glob("step_*")) == ["step_000001", "step_000003"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--keep-last", "0"], "at least 1"),
        (["--keep-last", "1", "--keep-best", "eval/dve"], "eval/dev"),
    ],
)
def test_pruning_without_a_meaning_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    saves = evaluated_saves(tmp_path)
    assert main(["checkpoint", "prune", str(saves), *argv]) == 2
    assert words in capsys.readouterr().err
    assert len(list(saves.glob("step_*"))) == 3


def test_the_folder_of_a_run_at_work_is_not_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = evaluated_saves(tmp_path)
    with folder_lock(saves):
        assert main(["checkpoint", "prune", str(saves), "--keep-last", "1"]) == 2
    assert "another run is at work" in capsys.readouterr().err
    assert len(list(saves.glob("step_*"))) == 3


@pytest.mark.parametrize("verb", ["list", "prune"])
def test_a_folder_without_checkpoints_is_named(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--keep-last", "1"] if verb == "prune" else []
    for folder in (tmp_path, tmp_path / "absent"):
        assert main(["checkpoint", verb, str(folder), *options]) == 2
        assert str(folder) in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()
