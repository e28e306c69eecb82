"""Checkpoints at URLs: the manifest comes last, and whatever fails before it leaves the earlier checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from buffer_rl.errors import CheckpointError
from buffer_rl.files.checkpoint import open_checkpoint, opened_checkpoint, read_manifest
from harness.checkpoints import write_checkpoint

FILES = {"trainer/weights.bin": b"w" * 5000, "hf/config.json": b"{}", "buffer.json": b'{"queue": []}'}


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store whose ``fail_at``-th write (from 1) breaks off in the middle; kept apart from ``memory://``."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own design)
    pseudo_dirs = [""]  # noqa: RUF012
    writes = 0
    fail_at = 0
    leaves_torn = True

    def _write(self, path: str, content: bytes) -> None:
        type(self).writes += 1
        if self.writes == self.fail_at:
            if self.leaves_torn:
                super().pipe_file(path, content[: len(content) // 2])
            raise ConnectionError("the connection broke")
        super().pipe_file(path, content)

    def put_file(self, lpath: str, rpath: str, callback: object = None, mode: str = "", **rest: object) -> None:
        self._write(self._strip_protocol(rpath), Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, mode: str = "", **rest: object) -> None:
        self._write(self._strip_protocol(path), value)


@pytest.fixture
def store() -> Iterator[type[FaultyFileSystem]]:
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.writes, FaultyFileSystem.fail_at, FaultyFileSystem.leaves_torn = 0, 0, True
    yield FaultyFileSystem
    FaultyFileSystem.store.clear()


URL = "faulty://bucket/run"


def fill(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def upload(scratch: Path, step: int, note: str = "") -> None:
    write_checkpoint(URL, step, fill, {"note": note}, scratch)


def test_what_was_uploaded_is_opened_and_nothing_stays_on_the_local_disk(
    store: type[FaultyFileSystem], tmp_path: Path
) -> None:
    upload(tmp_path, 9, "a")
    upload(tmp_path, 10, "b")
    with opened_checkpoint(URL, tmp_path) as newest:
        assert (newest.step, newest.facts) == (10, {"note": "b"})
        found = {
            str(path.relative_to(newest.folder)): path.read_bytes()
            for path in newest.folder.rglob("*")
            if path.is_file()
        }
        assert found == FILES
    with opened_checkpoint(f"{URL}/step_000009") as chosen:
        assert chosen.facts == {"note": "a"}
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_written_after_every_other_file(store: type[FaultyFileSystem], tmp_path: Path) -> None:
    upload(tmp_path, 1)
    created = {str(path): entry.created for path, entry in store.store.items()}
    (manifest,) = (path for path in created if path.endswith("manifest.json"))
    assert created[manifest] == max(created.values())
    assert store.writes == len(FILES) + 1


@pytest.mark.parametrize("leaves_torn", [True, False])
@pytest.mark.parametrize("fail_at", range(1, len(FILES) + 2))
def test_an_upload_that_breaks_off_is_no_checkpoint(
    store: type[FaultyFileSystem], tmp_path: Path, fail_at: int, leaves_torn: bool
) -> None:
    store.leaves_torn = leaves_torn
    upload(tmp_path, 1, "earlier")
    store.writes, store.fail_at = 0, fail_at
    with pytest.raises(CheckpointError, match="the connection broke") as caught:
        upload(tmp_path, 2)
    assert caught.value.where == f"{URL}/step_000002"
    store.fail_at = 0
    with opened_checkpoint(URL) as checkpoint:
        assert (checkpoint.step, checkpoint.facts) == (1, {"note": "earlier"})
    upload(tmp_path, 2, "again")
    with opened_checkpoint(URL) as checkpoint:
        assert checkpoint.facts == {"note": "again"}
    assert sum("step_000002" in str(path) for path in store.store) == len(FILES) + 1, "the torn files are gone"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fail_at", range(1, len(FILES) + 2))
def test_a_checkpoint_of_the_same_step_is_replaced_only_by_a_whole_one(
    store: type[FaultyFileSystem], tmp_path: Path, fail_at: int
) -> None:
    store.leaves_torn = False  # as object stores do: an object is there whole or not at all
    upload(tmp_path, 1, "old")
    store.writes, store.fail_at = 0, fail_at
    with pytest.raises(CheckpointError):
        upload(tmp_path, 1, "new")
    with opened_checkpoint(URL) as checkpoint:
        assert checkpoint.facts == {"note": "old"}


def test_a_process_that_dies_while_it_uploads_leaves_no_checkpoint(
    store: type[FaultyFileSystem], tmp_path: Path
) -> None:
    upload(tmp_path, 3)
    manifest = next(path for path in store.store if str(path).endswith("manifest.json"))
    del store.store[manifest]
    with pytest.raises(CheckpointError, match="holds no checkpoint") as caught:
        read_manifest(URL)
    assert URL in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda store, path: store.pipe_file(path, b"v" * 5000), "hash differs"),
        (lambda store, path: store.pipe_file(path, b"w" * 4999), "4999 bytes"),
        (lambda store, path: store.rm_file(path), "missing"),
    ],
)
def test_damage_is_found_after_the_download_and_the_url_is_named(
    store: type[FaultyFileSystem], tmp_path: Path, damage: Any, words: str
) -> None:
    upload(tmp_path, 1)
    path = next(str(path) for path in store.store if str(path).endswith("weights.bin"))
    damage(fsspec.filesystem("faulty"), path)
    with pytest.raises(CheckpointError, match=words) as caught, opened_checkpoint(URL, tmp_path):
        pass
    assert caught.value.where.startswith(f"{URL}/step_000001/files_")
    assert caught.value.where.endswith("/trainer/weights.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_was_copied_from_a_store_is_opened_as_a_folder(
    store: type[FaultyFileSystem], tmp_path: Path
) -> None:
    upload(tmp_path, 1, "a")
    fsspec.filesystem("faulty").get(f"{URL}/step_000001", str(tmp_path / "copy"), recursive=True)
    copied = open_checkpoint(tmp_path / "copy")
    assert copied.facts == {"note": "a"}
    assert (copied.folder / "buffer.json").read_bytes() == FILES["buffer.json"]
    shutil.rmtree(tmp_path / "copy")


def test_a_manifest_that_leads_out_of_the_folder_is_refused(store: type[FaultyFileSystem], tmp_path: Path) -> None:
    upload(tmp_path, 1)
    path = next(str(path) for path in store.store if str(path).endswith("manifest.json"))
    system = fsspec.filesystem("faulty")
    manifest = json.loads(system.cat_file(path))
    manifest["files"]["../../stolen"] = {"size": 1, "sha256": ""}
    system.pipe_file(path, json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="leads out of"), opened_checkpoint(URL, tmp_path):
        pass


def test_an_error_of_the_block_stays_what_it_is(store: type[FaultyFileSystem], tmp_path: Path) -> None:
    upload(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="unrelated"), opened_checkpoint(URL, tmp_path):
        raise FileNotFoundError("unrelated")


def test_urls_are_named_without_their_secrets(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint("nonsense://user:password@host/x?token=abc", 1, fill, scratch=tmp_path)
    assert "nonsense://***@host/x?token=***" in str(caught.value)
    assert "password" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_a_file_url_is_the_folder(tmp_path: Path) -> None:
    write_checkpoint(f"file://{tmp_path}/saves", 4, fill, {})
    assert (tmp_path / "saves" / "step_000004" / "manifest.json").is_file()
    with opened_checkpoint(f"file://{tmp_path}/saves") as checkpoint:
        assert checkpoint.step == 4
