"""Publication: the order of its calls, and that engines never stay paused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.config import compose
from buffer_rl.errors import EngineError
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.testing.fake_roles import FakeEngines
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher


class Writer:
    """Writes a file whose text is the number of writes so far."""

    def __init__(self) -> None:
        self.writes = 0

    def save_hf(self, path: str) -> None:
        self.writes += 1
        Path(path).mkdir(parents=True)
        (Path(path) / "model.safetensors").write_text(str(self.writes))


def publisher(folder: Path, engines: FakeEngines) -> Publisher:
    args: Any = compose(CORE_SECTIONS)(run_dir=str(folder))
    return Publisher(DiskTransport(args), Writer(), engines)


def test_engines_are_paused_flushed_updated_checked_and_continued(tmp_path: Path) -> None:
    engines = FakeEngines()
    publisher(tmp_path, engines).publish(3)
    assert engines.calls == ["pause", "flush", "update", "versions", "resume"]
    assert engines.version == 3


@pytest.mark.parametrize("call", ["pause", "flush", "update", "versions"])
def test_engines_are_continued_whatever_fails(tmp_path: Path, call: str) -> None:
    engines = FakeEngines(fail_on=call, error=EngineError("broken", where="http://engine-0"))
    with pytest.raises(EngineError, match="broken"):
        publisher(tmp_path, engines).publish(1)
    assert engines.calls[-1] == "resume"
    assert not engines.paused


def test_an_engine_that_keeps_its_old_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="other weights than version 2"):
        publisher(tmp_path, FakeEngines(keeps_version=True)).publish(2)


def test_a_failed_continue_is_raised_and_does_not_hide_an_earlier_failure(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot go on"):
        publisher(tmp_path, FakeEngines(fail_on="resume", error=EngineError("cannot go on"))).publish(1)


def test_the_folder_of_a_version_is_whole_and_older_ones_go(tmp_path: Path) -> None:
    chosen = publisher(tmp_path, FakeEngines())
    chosen.publish(1)
    chosen.publish(2)
    folders = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert folders == ["v000002"]
    assert (tmp_path / "weights" / "v000002" / "model.safetensors").read_text() == "2"


def test_a_half_written_version_of_a_killed_run_goes_with_the_next_publication(tmp_path: Path) -> None:
    for name in (".v000007.tmp", "v000006"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    publisher(tmp_path, FakeEngines()).publish(3)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v000003"]


def test_engines_that_serve_different_weights_are_an_error_where_they_are_compared(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path))
    for checksums, compare in (({"a": "1", "b": "2"}, False), ({"a": "1", "b": "1"}, True)):
        Publisher(DiskTransport(args), Writer(), FakeEngines(checksums=checksums), compare=compare).publish(1)
    engines = FakeEngines(checksums={"http://engine-0": "1", "http://engine-1": "2"})
    with pytest.raises(EngineError, match="serve different weights as version 2"):
        Publisher(DiskTransport(args), Writer(), engines, compare=True).publish(2)
    assert not engines.paused
