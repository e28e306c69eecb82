"""``buffer-rl plugins new``: what it writes works as it stands."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.cli import main
from buffer_rl.kinds.table import KINDS
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.verbs import plugins
from buffer_rl.verbs.plugins import object_name, write_plugin


def test_there_is_a_skeleton_for_every_kind() -> None:
    found = {path.name for path in Path(plugins.__file__).with_name("plugin").iterdir()}
    assert found == {f"{start}{kind}.py.jinja" for kind in KINDS for start in ("", "test_")}


@pytest.mark.slow
def test_every_skeleton_meets_its_contract_passes_its_test_and_is_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = PluginRegistry(search_path=[str(tmp_path)])
    for kind, row in KINDS.items():
        assert main(["plugins", "new", kind, f"my_{kind}", "--output", str(tmp_path)]) == 0
        reference = f"{tmp_path}/my_{kind}.py:{object_name(row, f'my_{kind}')}"
        assert f"{row.flags[0]} {reference}" in capsys.readouterr().out
        registry.resolve(kind, reference)
        assert main(["plugins", "check", "--kind", kind, reference]) == 0
        assert f"contract: {row.signature}" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert f"{2 * len(KINDS)} passed" in done.stdout
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", "--select", "F,E,UP"]
    done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kind", "line", "fault"),
    [
        ("loss", "    values = -inputs", "    inputs.loss_mask.zero_()\n"),
        ("advantage", '    batch.columns["returns"]', '    batch.columns["reward"] = 2 * batch.columns["reward"]\n'),
    ],
)
def test_the_test_of_a_loss_and_of_an_estimator_runs_the_linter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, line: str, fault: str
) -> None:
    """A fault that leaves the numbers of the test as they are: the linter finds it."""
    plugin, test = write_plugin(kind, f"faulty_{kind}", tmp_path)
    plugin.write_text(plugin.read_text().replace(line, fault + line))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(test.stem)
    with pytest.raises(AssertionError, match=r"not failures|Finding"):
        getattr(module, f"test_faulty_{kind}_works")(tmp_path)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_judge.py").write_text("mine")
    assert main(["plugins", "new", "reward", "judge", "--output", str(tmp_path)]) == 2
    assert "already there, and not overwritten: test_judge.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_judge.py"]


@pytest.mark.parametrize("name", ["my-reward", "a/b", "class", "", "../up"])
def test_a_name_that_cannot_be_imported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["plugins", "new", "reward", name, "--output", str(tmp_path)]) == 2
    assert "is no name of a Python module" in capsys.readouterr().err


def test_an_unknown_kind_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", "rewards", "judge"]) == 2
    assert "group_reward" in capsys.readouterr().err
