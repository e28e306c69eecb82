"""``buffer-rl init``: the project that it writes is what its comments say, passes its test and its dry run."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.verbs import init
from buffer_rl.verbs.init import project_files

FILES = ["run.yaml", "my_reward.py", "test_my_reward.py", "prepare.py"]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A fresh project, which is the working directory; what it imports is forgotten again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my task"]) == 0
    monkeypatch.chdir("my task")
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    return tmp_path / "my task"


def options(folder: Path) -> Any:
    return resolve(compose(CORE_SECTIONS), flags={}, environ={}, config_paths=[str(folder / "run.yaml")]).args


def test_init_writes_the_files_that_it_names_and_prints_the_next_three_commands(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(path.name for path in project.iterdir()) == sorted(FILES)
    assert {f"{name}.jinja" for name in FILES} == {
        path.name for path in Path(init.__file__).with_name("project").iterdir()
    }
    monkeypatch.chdir(project.parent)
    capsys.readouterr()
    assert main(["init", "an other"]) == 0
    first, after, *commands = capsys.readouterr().out.splitlines()
    assert first == f"an other: {', '.join(FILES)}"
    assert after == "Next, after cd 'an other':"
    assert [command.partition("#")[0].strip() for command in commands] == [
        "python prepare.py",
        "buffer-rl train --config run.yaml --dry-run",
        "buffer-rl train --config run.yaml",
    ]


def test_files_that_are_there_are_named_and_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_reward.py").write_text("mine")
    (tmp_path / "run.yaml").mkdir()
    assert main(["init", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "not overwritten: run.yaml, my_reward.py" in error
    assert "prepare.py" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_reward.py", "run.yaml"]
    assert (tmp_path / "my_reward.py").read_text() == "mine"
    assert main(["init", str(tmp_path / "my_reward.py" / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("model", [None, "ORG/NAME"])
def test_every_option_is_known_and_its_comment_has_its_default(model: str | None) -> None:
    text = project_files(model)["run.yaml"]
    fields = compose(CORE_SECTIONS).model_fields
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.partition(":")[0] for line in lines} == yaml.safe_load(text).keys()
    for line in lines:
        name = line.partition(":")[0]
        said = re.search(r"; default: (.+)$|# .*\bdefault: ([^,]+)", line)
        default = fields[name].default
        if said is None:
            assert not default, line
        else:
            word = (said[1] or said[2]).partition(",")[0]
            assert type(default)(yaml.safe_load(word)) == default, line


def test_the_prepared_project_passes_its_dry_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("prepare.py", run_name="__main__")
    assert "data/train.jsonl: 1196 rows" in capsys.readouterr().out
    assert main(["train", "--config", "run.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "train  first: 'u: sort dbdd\\na: '" in shown
    assert len(re.findall(r"label 1 +empty 0 +truncated 0 +my_reward:score", shown)) == 6
    assert shown.endswith("Dry run: everything that can be checked before a run is right.\n")


def test_no_held_out_row_is_trained_on_and_every_label_is_sorted(project: Path) -> None:
    made = runpy.run_path("prepare.py")
    made["write_data"](project / "data")
    held, train = ((project / "data" / f"{name}.jsonl").read_text().splitlines() for name in ("heldout", "train"))
    assert (len(held), len(train), len({*held, *train})) == (100, 1196, 6**4)
    assert made["make_row"]("fbda")["answer"] == "abdf"


def test_the_reward_passes_its_own_test(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_reward.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=project)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    assert not [path for path in project.glob("*.py") if "import pytest" in path.read_text()]


def test_a_model_of_the_users_is_trained_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model("its: model", hidden_size=16, intermediate_size=16)
    assert main(["init", "own", "--model", "its: model"]) == 0
    assert "tiny" not in capsys.readouterr().out
    args = options(tmp_path / "own")
    assert (args.hf_checkpoint, args.lr) == (str(tmp_path / "its: model"), 1e-6)
    runpy.run_path("own/prepare.py", run_name="__main__")
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == sorted([*FILES, "data"])
    assert main(["init", "hub", "--model", "ORG/NAME-1.5B"]) == 0
    assert options(tmp_path / "hub").hf_checkpoint == "ORG/NAME-1.5B"
    for wrong, reason in (("no-such-folder", "no such folder"), ("own", "no config.json"), ("own/data", "no config")):
        assert main(["init", "third", "--model", wrong]) == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("model", [None, "ORG/NAME"])
def test_the_python_files_are_clean(tmp_path: Path, model: str | None) -> None:
    for name, text in project_files(model).items():
        (tmp_path / name).write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    lines = ["--isolated", "--line-length", "120"]
    for command in (["check", *lines, "--select", "F,E,UP,I"], ["format", *lines, "--check"]):
        done = subprocess.run([*ruff, *command, "."], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode == 0, done.stdout


def test_the_wheel_has_the_templates() -> None:
    from hatchling.builders.wheel import WheelBuilder

    shipped = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"buffer_rl/verbs/project/{name}.jinja" for name in FILES} <= shipped
