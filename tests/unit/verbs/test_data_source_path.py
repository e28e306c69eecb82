"""``--data-source-path`` on the command line: what is said before anything starts."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer_rl.cli import main

SOURCE = """
class Source:
    def __init__(self, args):
        raise AssertionError("a check constructs nothing")

    def get_samples(self, num_samples): ...
    def add_samples(self, groups): ...
    def save(self, path): ...
    def load(self, path): ...
    def __len__(self): ...


class Silent(Source):
    save = None


class Eager(Source):
    def save(self): ...
"""

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a verb in a folder with a model and the source; its status, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "my_source.py").write_text(SOURCE)
    (tmp_path / "table.db").write_text("no rows that the built-in source could read")

    def call(verb: str, *argv: str) -> tuple[int, str, str]:
        status = main([verb, "--hf-checkpoint", "model", *argv])
        out, err = capsys.readouterr()
        return status, out, err

    return call


TRAIN = ("--num-epoch", "1", "--rm-type", "exact_match", "--logger", "--dry-run", "--no-trial")


def test_a_dry_run_finds_it_and_leaves_prompt_data_to_it(said: Said) -> None:
    status, out, err = said(
        "train", *TRAIN, "--json", "--data-source-path", "./my_source.py:Source", "--prompt-data", "table.db"
    )
    assert status == 0, err
    shown = json.loads(out)
    assert shown["data"] == []
    (use,) = [use for use in shown["plugins"] if use["kind"] == "data_source"]
    assert use["place"].endswith("my_source.py:2")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("./my_source.py:Sauce", ["has no 'Sauce'", "did you mean './my_source.py:Source'"]),
        ("./my_source.py:Silent", ["the class lacks save"]),
        ("./my_source.py:Eager", ["its method save cannot be called with (path)"]),
        ("nowhere", ["no data_source of that name"]),
    ],
)
def test_what_is_no_data_source_is_said_before_anything_starts(said: Said, reference: str, words: list[str]) -> None:
    status, _, err = said("train", *TRAIN, "--data-source-path", reference)
    assert status == 2
    for word in ["buffer-rl: error: data_source", "for --data-source-path", *words]:
        assert word in err


def test_training_on_recorded_rollouts_does_not_know_its_length(said: Said) -> None:
    files = ("--load-debug-rollout-data", "rows_{rollout_id}", "--data-source-path", "./my_source.py:Source")
    status, _, err = said("train", *TRAIN, *files, "--prompt-data", "table.db")
    assert status == 2
    assert "the number of recorded rollouts is not known" in err


def test_generate_says_that_it_asks_no_source_for_prompts(said: Said) -> None:
    status, _, err = said("generate", "--data-source-path", "./my_source.py:Source", "--prompt-data", "table.db")
    assert status == 2
    assert "--data-source-path: a data source of your own has no end" in err
    assert "--prompt TEXT" in err
