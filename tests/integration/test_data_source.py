"""Whole runs with a data source of the user's own: interrupted or not, it hands out the same groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.row_file import read_rollout
from buffer_rl.driver.local_roles import rollout_path
from buffer_rl.errors import PluginError
from buffer_rl.testing.tiny import make_tiny_model
from harness.processes import descendants, holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
import json
import random
from buffer_rl.types import Sample


class Letters:
    def __init__(self, args):
        print("letters for", args.prompt_data)
        self.args, self.drawn = args, 0

    def get_samples(self, num_samples):
        return [self.group() for _ in range(num_samples)]

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


def not_b(args, group):
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


@pytest.mark.slow
def test_an_interrupted_run_takes_the_groups_of_an_uninterrupted_one(
    train: Run, make_options: MakeOptions, tmp_path: Path
) -> None:
    (tmp_path / "letters.py").write_text(SOURCE)
    options = {
        "data_source_path": f"{tmp_path / 'letters.py'}:Letters",
        "dynamic_sampling_filter_path": f"{tmp_path / 'letters.py'}:not_b",
        "prompt_data": ["a-table-of-its-own"],  # no file: only the source would know what it is
        "eval_prompt_data": [],
        "eval_interval": None,
    }
    whole = str(tmp_path / "whole_{rollout_id}")
    parts = str(tmp_path / "parts_{rollout_id}")
    saved = str(tmp_path / "checkpoints")
    first = make_options(
        num_rollout=None, num_epoch=1, run_dir=str(tmp_path / "a"), save_debug_rollout_data=whole, **options
    )
    assert train(first).steps == 3
    assert "letters for ['a-table-of-its-own']" in (tmp_path / "a" / "logs" / "data_source.log").read_text()
    head = make_options(
        num_rollout=2, run_dir=str(tmp_path / "b"), save=saved, save_debug_rollout_data=parts, **options
    )
    assert train(head).steps == 2
    tail = make_options(
        num_rollout=3, run_dir=str(tmp_path / "b"), load=saved, save_debug_rollout_data=parts, **options
    )
    assert train(tail).steps == 3
    taken = prompts_of(whole, range(3))
    assert prompts_of(parts, range(3)) == taken
    rows = [int(uid.split(":")[-2]) for uid, _ in taken]
    assert len(rows) == 9
    assert rows == sorted(set(rows))
    assert rows[-1] > 8  # some were dropped and replaced, one at a time


def test_what_a_sources_constructor_raises_ends_the_run_by_its_name(
    train: Run, make_options: MakeOptions, tmp_path: Path
) -> None:
    (tmp_path / "letters.py").write_text(SOURCE)
    with pytest.raises(PluginError) as caught:
        train(make_options(data_source_path=f"{tmp_path / 'letters.py'}:Broken"))
    message = str(caught.value)
    assert f"data_source '{tmp_path / 'letters.py'}:Broken', while it was constructed" in message
    assert "ValueError: no such table: prompts" in message
    assert 'letters.py", line 34, in __init__' in message
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
