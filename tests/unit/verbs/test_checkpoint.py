"""``buffer-rl checkpoint verify``, as a user runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from buffer_rl.cli import main
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
