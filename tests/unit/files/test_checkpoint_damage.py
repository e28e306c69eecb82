"""Whatever happens to a checkpoint, or to who writes it: the last good one loads, or an error says which file is bad.

Kills are real: a child process ends itself with SIGKILL at its n-th operation on a file or folder, for every n.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer_rl.cli import main
from buffer_rl.errors import CheckpointError
from buffer_rl.files.checkpoint import manifest_content, open_checkpoint, parse_manifest
from harness.checkpoints import write_checkpoint

FILES = {"trainer/weights.bin": bytes(range(256)) * 40, "trainer/trainer.json": b'{"step": 7}', "buffer.json": b"{}"}

HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # for the tests' own modules

KILLS = """
import json, os, signal, sys
from pathlib import Path
from buffer_rl.files.checkpoint import open_checkpoint
from harness.checkpoints import write_checkpoint
from buffer_rl.errors import CheckpointError

EVENTS = ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir", "tempfile.mkdtemp", "shutil.rmtree")
FILES = ("trainer/weights.bin", "trainer/trainer.json", "buffer.json")

def fill(text):
    def write(folder):
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(text * 1000)
    return write

def content(root):
    try:
        checkpoint = open_checkpoint(root)
    except CheckpointError as error:
        return str(error)
    texts = {(checkpoint.folder / name).read_bytes()[:3].decode() for name in FILES}
    return [checkpoint.step, *texts]

def killed(root, number):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count, last = 0, ""
    def hook(event, args):
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    write_checkpoint(root, 7, fill(b"new"), {"n": 1})
    os._exit(0)

base, scenario = Path(sys.argv[1]), sys.argv[2]
results, number = [], 0
while True:
    number += 1
    root = base / str(number)
    if scenario == "over an older step":
        write_checkpoint(root, 6, fill(b"old"), {})
    elif scenario == "in place of the same step":
        write_checkpoint(root, 7, fill(b"old"), {})
    elif scenario == "after a kill in place of the same step":
        write_checkpoint(root, 7, fill(b"old"), {})
        (root / "step_000007").rename(root / ".step_000007.replaced")
    status = killed(root, number)
    found = content(root)
    write_checkpoint(root, 7, fill(b"new"), {"n": 1})  # the next run goes on and saves again
    results.append({"status": status, "found": found, "after": content(root)})
    if status == 0:
        break
print(json.dumps(results))
"""

GOOD_BEFORE: dict[str, object] = {
    "over an older step": [6, "old"],
    "in place of the same step": [7, "old"],
    "after a kill in place of the same step": [7, "old"],
    "as the first": None,
}


@pytest.mark.parametrize("scenario", GOOD_BEFORE)
def test_a_writer_that_is_killed_anywhere_leaves_the_last_good_checkpoint(scenario: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), scenario],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=HERE,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) > 12  # a kill before each operation, and one run to the end
    assert [result["status"] for result in results] == [-9] * (len(results) - 1) + [0]
    before, whole = GOOD_BEFORE[scenario], [7, "new"]
    found = [result["found"] for result in results]
    if before is None:
        nothing = [text for text in found if isinstance(text, str)]
        assert all("holds no checkpoint" in text or "no such folder" in text for text in nothing)
        before_or_whole = [text for text in found if not isinstance(text, str)]
        assert before_or_whole == [whole] * len(before_or_whole)
    else:
        switch = found.index(whole)
        assert found == [before] * switch + [whole] * (len(found) - switch)
        assert 0 < switch < len(found)
    assert [result["after"] for result in results] == [whole] * len(results)


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Steps 6 and 7, of different content."""
    for step in (6, 7):
        write_checkpoint(tmp_path / "saves", step, fill(step), {"options": {"lr": 0.1}})
    return tmp_path / "saves"


def fill(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, content in FILES.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content + bytes([step]))

    return write


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped_at(where: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(where * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flip


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def of_another_checkpoint(path: Path) -> None:
    shutil.copy(str(path).replace("step_000007", "step_000006"), path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncated,
    "emptied": emptied,
    "a bit flipped at its start": flipped_at(0.0),
    "a bit flipped in its middle": flipped_at(0.5),
    "a bit flipped at its end": flipped_at(1.0),
    "longer": longer,
    "removed": Path.unlink,
    "of another checkpoint": of_another_checkpoint,
    "a folder": a_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_file_is_named_and_nothing_starts_anew(saves: Path, name: str, damage: str) -> None:
    DAMAGES[damage](saves / "step_000007" / name)
    with pytest.raises(CheckpointError, match=r"damaged|missing|cannot be read|no checkpoint") as caught:
        open_checkpoint(saves)
    assert "step_000007" in str(caught.value)
    assert open_checkpoint(saves / "step_000006").step == 6  # which the user may choose


def test_no_flipped_bit_of_a_manifest_changes_what_it_says(saves: Path) -> None:
    content = (saves / "step_000007" / "manifest.json").read_bytes()
    whole, refused = parse_manifest(content, "here"), 0
    for position in range(len(content)):
        for bit in (position % 8, (position + 3) % 8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            try:
                assert parse_manifest(bytes(damaged), "here") == whole, (position, bit)
            except CheckpointError:
                refused += 1
    assert refused > 1.9 * len(content)


def test_a_sealed_manifest_that_says_it_needs_no_seal_is_checked_all_the_same() -> None:
    content = manifest_content(5, {"a": 1}, {"file": (3, "ab" * 32)})
    damaged = content.replace(b'"format": 2', b'"format": 1').replace(b'"step": 5', b'"step": 7')
    assert damaged.count(b'"format": 1') == damaged.count(b'"step": 7') == 1
    with pytest.raises(CheckpointError, match="differs from its own hash"):
        parse_manifest(damaged, "here")


def test_an_entry_that_a_manifest_lost_is_noticed(saves: Path) -> None:
    path = saves / "step_000007" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["files"]["buffer.json"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="differs from its own hash"):
        open_checkpoint(saves)


LIMITED = """
import resource, sys
from pathlib import Path
from harness.checkpoints import write_checkpoint

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))

def fill(folder):
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(name.encode() * 100 * (1 + ord(name) - ord("a")))

write_checkpoint(sys.argv[1], 7, fill, {"note": "x" * 500})
"""


@pytest.mark.parametrize("limit", [0, 50, 150, 250, 400])  # in the first, second and third file, and in the manifest
def test_a_full_disk_is_an_error_and_the_earlier_checkpoint_stays(limit: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 6, fill(6), {})
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=HERE,
    )
    assert done.returncode != 0
    assert "CheckpointError" in done.stderr
    assert "cannot be written" in done.stderr
    assert os.listdir(tmp_path) == ["step_000006"]
    assert open_checkpoint(tmp_path).step == 6


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_without_room_is_an_error_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        fill(7)(folder)
        with open("/dev/full", "wb") as full:
            full.write(b"x")

    write_checkpoint(tmp_path, 6, fill(6), {})
    with pytest.raises(CheckpointError, match="No space left"):
        write_checkpoint(tmp_path, 7, write, {})
    assert open_checkpoint(tmp_path).step == 6


@pytest.mark.parametrize("load", ["nowhere", "empty", "saves/step_000007/trainer", "saves/step_000007/buffer.json", ""])
def test_what_is_no_checkpoint_ends_the_command_with_status_2(
    load: str, saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--load", load, "--output", str(tmp_path / "out")]) == 2
    assert "no checkpoint" in (said := capsys.readouterr().err) or "no such folder" in said
    assert not (tmp_path / "out").exists()
