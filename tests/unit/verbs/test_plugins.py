"""The verb ``plugins``, as a user runs it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import PluginError
from buffer_rl.verbs.plugins import add_parser


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), [])
    namespace = parser.parse_args(["plugins", *argv])
    return int(namespace.run(namespace))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_is_json_with_every_own_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--kind", "reward", "--json") == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {"exact_match", "numeric", "reasoning_gym"} <= {row["name"] for row in rows}
    assert {row["kind"] for row in rows} == {"reward"}
    assert all(len(row["sha256"]) == 64 for row in rows)


def test_the_table_shows_names_and_blocked_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "-p", "no:numeric") == 0
    lines = capsys.readouterr().out.splitlines()
    (numeric,) = [line for line in lines if " numeric " in line]
    assert numeric.rstrip().endswith("blocked by -p no:numeric")
    assert any("rm_hub.exact_match:score" in line and "buffer-rl" in line for line in lines)


def test_a_check_says_what_was_found_and_guesses_the_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_checked_filter.py").write_text("\ndef keep(args, group):\n    return True\n")
    assert run("check", "./my_checked_filter.py:keep") == 0
    out = capsys.readouterr().out
    assert out.startswith("./my_checked_filter.py:keep: group_reward, keep(args, group)")
    assert "my_checked_filter.py:2" in out
    assert "also fits: filter" in out
    assert run("check", "--kind", "filter", "nonzero_std") == 0
    assert "filter_hub/reward_deviation.py" in capsys.readouterr().out
    assert run("check", "grpo") == 0
    assert capsys.readouterr().out.startswith("grpo: advantage, ")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--kind", "reward", "exact_mach"], "did you mean 'exact_match'"),
        (["exact_mach"], "did you mean 'exact_match'"),
        (["rm_hub.exact_match:scor"], "did you mean 'rm_hub.exact_match:score'"),
        (["--kind", "loss", "rm_hub.reasoning_gym:FULL_MARKS"], "float is not callable"),
        (["./nothing.py:f"], "there is no file"),
        (["rm_hub.exact_match"], "it names a module"),
    ],
)
def test_a_check_of_what_cannot_be_used_raises_the_error(folder: Path, argv: list[str], problem: str) -> None:
    with pytest.raises(PluginError, match=problem):
        run("check", *argv)


def test_what_fits_no_kind_is_an_error(folder: Path) -> None:
    (folder / "odd_one.py").write_text("def odd(one, two, three, four, five, six): ...\n")
    with pytest.raises(PluginError, match="it fits no plugin kind"):
        run("check", "./odd_one.py:odd")


def test_a_check_lints_losses_and_estimators(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_linted.py").write_text(
        "from buffer_rl.contracts import TokenLoss\n"
        "def by_rows(args, inputs):\n"
        "    return TokenLoss(-inputs.log_probs / len(inputs.row_ids))\n"
        "def rewards(args, batch):\n"
        "    batch.columns['reward'] *= 2\n"
        "    batch.columns['advantages'] = batch.columns['returns'] = batch.columns['loss_mask']\n"
    )
    assert run("check", "--kind", "loss", "./my_linted.py:by_rows") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  fail    micro-batches: the gradient by log_probs, row lint:0:0/0.0, token 0: expected" in "\n".join(lines)
    assert "  pass    padding" in lines
    assert run("check", "--kind", "advantage", "./my_linted.py:rewards") == 1
    assert "  fail    columns: it changes the column 'reward'" in capsys.readouterr().out
    assert run("check", "policy_loss") == 0
    assert "fail" not in capsys.readouterr().out


def test_a_check_of_an_estimator_does_not_import_torch() -> None:
    code = "import sys; from buffer_rl.cli import main; assert main(['plugins', 'check', 'grpo']) == 0; "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
