"""The example plugin package: installed into a folder, then used by the command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.records.groups import GroupUid
from buffer_rl.testing.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "examples" / "plugin_package"

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed, without the network."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--target", str(target)]
    done = subprocess.run([*pip, *options, str(PACKAGE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def command(site: Path, tmp_path: Path) -> Command:
    """Runs ``buffer-rl`` in an empty folder where the package is installed."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("BUFFER_RL_")}
        environ["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
        call = [sys.executable, "-m", "buffer_rl.cli", *argv]
        return subprocess.run(call, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ)

    return run


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+2=", "label": "3"}\n')
    (tmp_path / "run.yaml").write_text(
        "prompt_data: ${here}/train.jsonl\nhf_checkpoint: ${here}/model\nnum_rollout: 1\n"
        "rollout_max_response_len: 8\nlogger: []\nrm_type: sum_distance\ndynamic_sampling_filter_path: some_answered\n"
    )
    return "run.yaml"


def test_the_list_shows_all_four_with_their_distribution(command: Command) -> None:
    rows: list[dict[str, Any]] = json.loads(command("plugins", "list", "--json").stdout)
    ours = {(row["kind"], row["name"]): row for row in rows if row["distribution"] == "buffer-rl-sums"}
    assert {("reward", "sum_distance"), ("filter", "some_answered"), ("data_source", "sums")} <= set(ours)
    assert {row["version"] for row in ours.values()} == {"0.1.0"}
    hooks = [row for row in rows if row["name"] == "sums_plugin"]
    assert [(row["error"], row["loaded"]) for row in hooks] == [("", True)]


@pytest.mark.parametrize(
    ("kind", "name"), [("reward", "sum_distance"), ("filter", "some_answered"), ("data_source", "sums")]
)
def test_each_name_meets_its_contract(command: Command, kind: str, name: str) -> None:
    done = command("plugins", "check", "--kind", kind, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}: {kind}, ")
    assert "buffer_rl_sums" in done.stdout


@pytest.mark.slow
def test_a_run_uses_its_names_and_its_options(command: Command, run_yaml: str) -> None:
    done = command("train", "--config", run_yaml, "--sums-tolerance", "5", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["options"]["sums_tolerance"] == {"value": 5, "source": "flag", "where": "--sums-tolerance"}
    assert shown["options"]["sums_largest"]["value"] == 99
    places = {use["reference"]: use["place"] for use in shown["plugins"]}
    assert "reward.py" in places["sum_distance"]
    assert "filters.py" in places["some_answered"]


def test_its_options_are_checked_as_the_others(command: Command, run_yaml: str) -> None:
    done = command("train", "--config", run_yaml, "--sums-tolerance", "0", "--dry-run")
    assert done.returncode == 2
    assert "--sums-tolerance" in done.stderr
    done = command("train", "--config", run_yaml, "--sums-tolerence", "5", "--dry-run")
    assert "did you mean --sums-tolerance" in done.stderr.replace("'", "")


def test_blocked_it_is_gone_with_its_names(command: Command, run_yaml: str) -> None:
    done = command("train", "--config", run_yaml, "-p", "no:buffer-rl-sums", "--dry-run")
    assert done.returncode == 2
    assert "some_answered" in done.stderr
    assert "blocked by -p no:buffer-rl-sums" in done.stderr


def test_the_source_goes_on_where_it_was_saved(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: Any
) -> None:
    monkeypatch.syspath_prepend(str(site))
    from buffer_rl_sums.data_source import SumsSource

    source = SumsSource(args)
    (first, second) = source.get_samples(2)
    assert [sample.label for sample in first] == [str(eval(first[0].prompt[:-1]))] * 2
    source.save(str(tmp_path / "state"))
    rest = source.get_samples(3)
    restored = SumsSource(args)
    restored.load(str(tmp_path / "state"))
    assert restored.get_samples(3) == rest
    assert [group.uid for group in (first, second, *rest)] == [GroupUid("sums", row, 0) for row in range(5)]


@pytest.mark.parametrize(("response", "expected"), [("42", 1.0), (" 40 ", 0.6), ("47", 0.0), ("", 0.0), ("4e1", 0.0)])
def test_the_reward_falls_with_the_distance(
    site: Path, monkeypatch: pytest.MonkeyPatch, args: Any, response: str, expected: float
) -> None:
    monkeypatch.syspath_prepend(str(site))
    from buffer_rl_sums.reward import score

    from buffer_rl.records.groups import Sample

    assert score(args, Sample(response=response, label="42")) == pytest.approx(expected)


@pytest.fixture
def args(site: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Options with the package's own section."""
    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.options.section import compose

    monkeypatch.syspath_prepend(str(site))
    sections = [*CORE_SECTIONS, "buffer_rl_sums.options:SumsOptions"]
    return compose(sections)(n_samples_per_prompt=2, sums_tolerance=5)
