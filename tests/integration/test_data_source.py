"""Whole runs with a data source of the user's own: interrupted, killed or neither, it hands out the same groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import DeadlineError, PluginError, WorkerError
from buffer_rl.files.row_file import read_rollout, rollout_path
from buffer_rl.records.groups import GroupUid
from buffer_rl.testing.tiny import make_tiny_model
from harness.processes import descendants, holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
import json
import os
import random
import signal
import threading
from pathlib import Path
from buffer_rl.records.groups import Sample


def kill_once(args, moment):
    '''The source's process, in the run of the folder 'killed'.'''
    folder = Path(args.run_dir)
    if folder.name == "killed" and not (folder / moment).exists():
        (folder / moment).touch()
        os.kill(int((folder / "logs" / "data_source.log").read_text().split()[-1]), signal.SIGKILL)


class Letters:
    def __init__(self, args):
        print("letters for", args.prompt_data, "in process", os.getpid())
        self.args, self.drawn = args, 0

    def get_samples(self, num_samples):
        groups = [self.group() for _ in range(num_samples)]
        if self.drawn > 2:
            kill_once(self.args, "after a batch was made, before it was sent")
        return groups

    def group(self):
        word = "".join(random.Random(self.drawn).choices("abc", k=4))
        self.drawn += 1
        return [Sample(prompt=f"{word}=", label=word) for _ in range(self.args.n_samples_per_prompt)]

    def save(self, path):
        with open(path, "w") as file:
            json.dump(self.drawn, file)

    def load(self, path=None):
        with open(path) as file:
            self.drawn = json.load(file)

    def __len__(self):
        return 11  # 3 whole rollouts of 3 groups


class Broken(Letters):
    def __init__(self, args):
        raise ValueError("no such table: prompts")


class Fatal(Letters):
    def get_samples(self, num_samples):
        os._exit(3)


class Hanging(Letters):
    def get_samples(self, num_samples):
        threading.Event().wait()


class FatalAtOnce(Letters):
    def __init__(self, args):
        os._exit(3)


def not_b(args, group):
    if group[0].group_index > 3:
        kill_once(args, "between two batches")
    return not group[0].label.startswith("b")
"""


def prompts_of(template: str, rollout_ids: range) -> list[tuple[str, list[int]]]:
    """The first row of each group: its uid and the tokens of its prompt, in the order of training."""
    found = []
    for rollout_id in rollout_ids:
        batch = read_rollout(rollout_path(template, rollout_id))
        for row, tokens, length in zip(
            batch.row_ids, batch.columns["tokens"], batch.columns["response_length"], strict=True
        ):
            if row.sample_index == 0:
                found.append((str(row.uid), tokens[: len(tokens) - int(length)].tolist()))
    return found


def source_log(args: Any) -> str:
    return (Path(args.run_dir) / "logs" / "data_source.log").read_text()


def groups_of(args: Any) -> list[tuple[GroupUid, GroupState]]:
    """Every group that was leased, in order, with its final state."""
    audit = LedgerAudit(Path(args.run_dir) / FILE_NAME)
    with closing(audit):
        assert audit.faults() == []
        return audit.states()


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with SOURCE. Its path is in the uids of the groups."""
    path = tmp_path_factory.mktemp("letters") / "letters.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def of_letters(letters: Path, options_in: MakeOptions) -> MakeOptions:
    """Options of a run in a folder; its rows are kept beside the folder."""

    def make(folder: Path, **changes: Any) -> Any:
        options = {
            "data_source_path": f"{letters}:Letters",
            "dynamic_sampling_filter_path": f"{letters}:not_b",
            "prompt_data": ["a-table-of-its-own"],  # no file: only the source would know what it is
            "eval_prompt_data": [],
            "eval_interval": None,
            "save_debug_rollout_data": f"{folder}_{{rollout_id}}",
        }
        return options_in(folder, **{**options, **changes})

    return make


@pytest.fixture(scope="module")
def undisturbed(train: Run, of_letters: MakeOptions, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The options of a run of one epoch that has ended."""
    args = of_letters(tmp_path_factory.mktemp("undisturbed") / "run", num_rollout=None, num_epoch=1)
    assert train(args).steps == 3
    return args


@pytest.mark.slow
def test_an_interrupted_run_takes_the_groups_of_an_uninterrupted_one(
    train: Run, of_letters: MakeOptions, undisturbed: Any, tmp_path: Path
) -> None:
    parts, saved = tmp_path / "parts", str(tmp_path / "checkpoints")
    assert "letters for a-table-of-its-own" in source_log(undisturbed)
    assert train(of_letters(parts, num_rollout=2, save=saved)).steps == 2
    tail = of_letters(parts, num_rollout=3, load=saved)
    assert train(tail).steps == 3
    taken = prompts_of(undisturbed.save_debug_rollout_data, range(3))
    assert prompts_of(tail.save_debug_rollout_data, range(3)) == taken
    rows = [int(uid.split(":")[-2]) for uid, _ in taken]
    assert len(rows) == 9
    assert rows == sorted(set(rows))
    assert rows[-1] > 8  # some were dropped and replaced, one at a time


@pytest.mark.slow
def test_a_source_that_is_killed_goes_on_with_the_groups_of_an_undisturbed_run(
    train: Run, of_letters: MakeOptions, undisturbed: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = of_letters(tmp_path / "killed", num_rollout=None, num_epoch=1, progress="plain")
    assert train(killed).steps == 3
    assert len(list((tmp_path / "killed").glob("*batch*"))) == 2
    assert source_log(killed).count("letters for") == 3  # --role-max-restarts is 2
    assert "the data source's process died and was replaced" in capfd.readouterr().out
    assert groups_of(killed) == groups_of(undisturbed)
    taken = prompts_of(undisturbed.save_debug_rollout_data, range(3))
    assert prompts_of(killed.save_debug_rollout_data, range(3)) == taken


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Fatal", "FatalAtOnce"])
def test_a_source_whose_process_dies_each_time_ends_the_run_by_its_name(
    name: str, train: Run, of_letters: MakeOptions, letters: Path, tmp_path: Path
) -> None:
    args = of_letters(tmp_path / "run", data_source_path=f"{letters}:{name}", role_max_restarts=1)
    with pytest.raises(WorkerError) as caught:
        train(args)
    message = str(caught.value)
    assert f"data_source '{letters}:{name}'" in message
    assert "its process died, and is not replaced again" in message
    assert "--role-max-restarts" in message


@pytest.mark.slow
def test_a_source_that_hangs_ends_the_run_by_its_name(
    train: Run, of_letters: MakeOptions, letters: Path, tmp_path: Path
) -> None:
    deadlines = {"data_source_timeout_s": 2.0, "buffer_timeout_s": 5.0}  # deliver calls the Buffer twice
    args = of_letters(tmp_path / "run", data_source_path=f"{letters}:Hanging", **deadlines)
    with pytest.raises(DeadlineError) as caught:
        train(args)
    message = str(caught.value)
    assert f"data_source '{letters}:Hanging'" in message
    assert "did not answer deliver within 12 s" in message
    assert "--data-source-timeout-s" in message


@pytest.mark.slow
def test_what_a_sources_constructor_raises_ends_the_run_by_its_name(
    train: Run, make_options: MakeOptions, letters: Path
) -> None:
    with pytest.raises(PluginError) as caught:
        train(make_options(data_source_path=f"{letters}:Broken"))
    message = str(caught.value)
    assert f"data_source '{letters}:Broken', while it was constructed" in message
    assert "ValueError: no such table: prompts" in message
    assert 'letters.py", line 49, in __init__' in message
    gone = "ray::DataSourceActor"
    assert holds_within(30, lambda: not [p for p in descendants(os.getpid()) if p.command.startswith(gone)])


@pytest.mark.slow
def test_the_example_packages_source_is_used_by_its_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", characters="0123456789+=", hidden_size=32, intermediate_size=48)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    package = str(ROOT / "examples" / "plugin_package")
    subprocess.run([*pip, "--no-build-isolation", "--no-cache-dir", "--target", str(site), package], check=True)
    command = [sys.executable, "-m", "buffer_rl.cli", "train", "--hf-checkpoint", "model", "--num-rollout", "2"]
    command += ["--data-source-path", "sums", "--sums-largest", "9", "--rm-type", "sum_distance"]
    command += ["--rollout-batch-size", "3", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "3"]
    command += ["--run-dir", "run", "--save-debug-rollout-data", "rows_{rollout_id}", "--progress", "none", "--logger"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BUFFER_RL_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    rows = [read_rollout(tmp_path / f"rows_{step}").row_ids for step in range(2)]
    assert [str(row.uid) for step in rows for row in step[::4]] == [f"sums:{number}:0" for number in range(6)]
    shown = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert len(shown["label"]) in (1, 2)
