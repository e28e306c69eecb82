"""The verb ``plugins``, as a user runs it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, DataError, PluginError, RolloutError
from buffer_rl.plugin.registry import PluginInfo
from buffer_rl.verbs.plugins import add_parser, first_sentence


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
    does = {row["name"]: row["does"] for row in rows}
    sentence = "1.0 if the final number of the response equals the label and the sample ended by itself, else 0.0"
    assert does["numeric"] == sentence


def test_what_a_plugin_does_is_read_from_its_source_and_not_imported(folder: Path) -> None:
    (folder / "own.py").write_text(
        '"""A module."""\nraise SystemExit("imported")\ndef told(args):\n    """Does ``this``\n    here. And more."""\n'
        "def silent(args): ...\n"
    )

    def does(target: str, file: Path) -> str:
        return first_sentence(PluginInfo(kind="reward", name="x", target=target, file=str(file)))

    assert does("own:told", folder / "own.py") == "Does this here"
    assert does("own:silent", folder / "own.py") == "A module"
    assert does("own:told", folder / "absent.py") == ""


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
        "from buffer_rl.kinds.token_loss import TokenLoss\n"
        "def by_rows(args, inputs):\n"
        "    return TokenLoss(-inputs.log_probs / len(inputs.row_ids))\n"
        "def rewards(args, batch):\n"
        "    batch.columns['reward'] *= 2\n"
        "    batch.columns['advantages'] = batch.columns['returns'] = batch.columns['loss_mask']\n"
    )
    assert run("check", "--kind", "loss", "./my_linted.py:by_rows") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  fail    micro-batches: the gradient by log_probs, row lint:0:0/0.0, token 0: expected" in "\n".join(lines)
    assert (
        "          to do: return numbers that are not divided, for the step's total divides them; a loss"
        in "\n".join(lines)
    )
    assert "  pass    padding" in lines
    assert run("check", "--kind", "advantage", "./my_linted.py:rewards") == 1
    assert "  fail    columns: it changes the column 'reward'" in capsys.readouterr().out
    assert run("check", "policy_loss") == 0
    assert "fail" not in capsys.readouterr().out


def test_a_check_of_an_estimator_does_not_import_torch() -> None:
    code = "import sys; from buffer_rl.cli import main; assert main(['plugins', 'check', 'grpo']) == 0; "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


TRIED = """
from buffer_rl.kinds.agent import GiveUp
from buffer_rl.rollout.generate import generate
from buffer_rl.records.groups import FilterDecision, Status

def text(args, sample):
    return "0.5"

def right(args, sample):
    return float(sample.status is Status.COMPLETED and sample.response == sample.label)

def several(args, sample):
    return {args.reward_key: right(args, sample)}

def together(args, group):
    return [right(args, sample) for sample in group]

def spread(args, group):
    return FilterDecision(keep=len({sample.get_reward_value(args) for sample in group}) > 1, reason="equal")

def nothing(args, group):
    pass

async def twice(args, sample, sampling_params):
    first = await generate(args, sample, sampling_params)
    return [first.changed(), await generate(args, sample, sampling_params)]

async def empty(args, sample, sampling_params):
    sample.response, sample.status = "x", Status.COMPLETED
    return sample

async def plays(args, sample, session):
    messages = sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}]
    answer = await session.chat(messages)
    again = await session.chat([*messages, answer, {"role": "user", "content": "again"}])
    return {args.reward_key: float(again["content"] == sample.label)}

def asks_anew(args, sample, session):
    for word in ("one", "two"):
        session.chat([{"role": "user", "content": word}])

async def raises(args, sample, session):
    raise KeyError("secret")

async def gives_up(args, sample, session):
    await session.chat([{"role": "user", "content": "x"}])
    raise GiveUp("the environment died")

async def other_key(args, sample, session):
    await session.chat([{"role": "user", "content": "x"}])
    return {"score": 1.0}
"""


@pytest.fixture
def rows(folder: Path) -> Path:
    """A file of two rows, of text and of chat messages, beside functions to call on them."""
    (folder / "my_tried.py").write_text(TRIED)
    (folder / "options.yaml").write_text("label_key: answer\nreward_key: right\n")
    chat = [{"role": "user", "content": "dog"}]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in (("cat", "tac"), (chat, "god"))))
    return path


def called(kind: str, name: str, *more: str) -> int:
    more = more or ("--config", "options.yaml")
    return run("check", "--kind", kind, f"./my_tried.py:{name}", "--on", "rows.jsonl", *more)


@pytest.mark.parametrize(
    ("kind", "name"), [("reward", "right"), ("reward", "several"), ("group_reward", "together")], ids=str
)
def test_a_reward_is_called_on_three_answers_to_each_row(
    rows: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    assert called(kind, name) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    scores = ["label", "1", "empty", "0", "truncated", "0"]
    assert first.split() == ["answers", *scores, f"./my_tried.py:{name}", "rows.jsonl:1"]
    assert second.endswith("rows.jsonl:2")


def test_a_reward_that_returns_text_is_refused_with_row_and_answer(rows: Path) -> None:
    words = r"rows\.jsonl:1, the label answer 'tac': the reward is '0.5' \(str\)"
    with pytest.raises(PluginError, match=words) as caught:
        called("reward", "text")
    assert caught.value.hint == ""


def test_a_field_that_the_rows_lack_is_named_in_the_file_of_options(rows: Path) -> None:
    rows.write_text('{"question": "cat", "answer": "tac"}\n')
    (rows.parent / "run.yaml").write_text("input_key: question\nlabel_key: answer\n")
    with pytest.raises(DataError) as caught:
        called("reward", "right")
    assert "--input-key" in caught.value.hint
    assert caught.value.hint.endswith(" (here as an option in the file of --config)")
    assert called("reward", "right", "--config", "run.yaml") == 0


def test_a_filter_is_called_on_groups_of_equal_and_of_different_rewards(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("filter", "spread") == 0
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split("  ")[-2].strip() for line in lines] == ["keep", "drop: equal", "drop: equal"] * 2
    with pytest.raises(RolloutError, match=r"rows\.jsonl:1, filter .*: the filter returned None"):
        called("filter", "nothing")


def test_a_generate_function_asks_an_engine_that_knows_the_labels(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("generate", "twice") == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[0] == "  completed, 4 tokens, 2 requests, reward None: 'tac'  rows.jsonl:1"
    assert [line.partition("None: ")[2] for line in lines[1:]] == ["'tac'  rows.jsonl:1", *["'god'  rows.jsonl:2"] * 2]
    with pytest.raises(RolloutError, match=r"rows\.jsonl:1, .*its response has 0 tokens"):
        called("generate", "empty")


def test_an_agent_asks_an_engine_that_knows_the_labels(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("agent", "plays") == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    # The tokens of two answers in one row, and between them the second message.
    tokens = 2 * len("tac.") + len("user: again\nassistant: ")
    assert first == f"  completed, {tokens} tokens, 2 requests, reward {{'right': 1.0}}: 'tac'  rows.jsonl:1"
    assert second == f"  completed, {tokens} tokens, 2 requests, reward {{'right': 1.0}}: 'god'  rows.jsonl:2"


def test_an_agent_is_tried_with_the_rows_and_the_endings_that_it_has_in_a_run(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("agent", "asks_anew") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "  completed, 2 rows, 8 tokens, 2 requests, reward None: 'god'  rows.jsonl:2"
    assert called("agent", "gives_up") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(", 4 tokens, masked, 1 request, reward None: 'god'  rows.jsonl:2")
    with pytest.raises(RolloutError, match=r"rows\.jsonl:1, agent .*raises.*KeyError"):
        called("agent", "raises")
    with pytest.raises(RolloutError, match=r"rows\.jsonl:1, .*'right'"):
        called("agent", "other_key")


def test_a_kind_that_no_row_can_try_is_refused(rows: Path) -> None:
    with pytest.raises(ConfigError, match="'logger' is not called on rows"):
        run("check", "tensorboard", "--on", "rows.jsonl")
