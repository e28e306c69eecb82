"""The verbs report, export, data stats, generate, eval and completion, as a user runs them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.verbs.completion import completion_script
from buffer_rl.verbs.generate import _while_engines_last, _within_context, _without_rows_of_file
from buffer_rl.verbs.table import VERBS
from harness.checkpoints import write_checkpoint

ROWS: list[dict[str, Any]] = [
    {"prompt": "abcd", "label": "xy", "metadata": {"level": 1}},
    {"prompt": "abcd", "label": "z", "metadata": {"level": 2, "set": "a"}},
    {"prompt": [{"role": "user", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "cdef"}]}]},
]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    def fill(folder: Path) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")
        (folder / "hf" / "model.safetensors").write_bytes(b"weights")

    for step in (3, 12):
        write_checkpoint(tmp_path / "saves", step, fill, {})
    return tmp_path / "saves"


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("buffer-rl: error: ")
    return err


def test_a_report_is_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "kind": "train", "train/loss": 0.5}\n')
    target = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--output", str(target), "--title", "My run"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert "<h1>My run</h1>" in target.read_text(encoding="utf-8")
    assert "no folder" in refused(capsys, "report", str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    assert "metrics" in refused(capsys, "report", str(tmp_path / "empty"))
    assert "cannot be written" in refused(capsys, "report", str(tmp_path), "--output", str(target / "x"))


def test_the_newest_checkpoint_is_exported(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models" / "one"
    assert main(["export", "--load", str(checkpoints), "--output", str(target)]) == 0
    assert "after 12 steps" in capsys.readouterr().out
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in target.parent.iterdir()] == ["one"]
    assert "is there already" in refused(capsys, "export", "--load", str(checkpoints), "--output", str(target))


def test_a_damaged_checkpoint_is_not_exported(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = checkpoints / "step_000003"
    (step / "hf" / "model.safetensors").write_bytes(b"weighty")
    target = tmp_path / "one"
    assert "damaged" in refused(capsys, "export", "--load", str(step), "--output", str(target))
    assert not target.exists()


def test_the_counts_of_a_file_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["data", "stats", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(path),
        "rows": 3,
        "chat_rows": 1,
        "prompt_lengths": {"shortest": 4, "median": 4.0, "mean": 14 / 3, "longest": 6},
        "labelled_rows": 2,
        "label_lengths": {"shortest": 1, "median": 1.5, "mean": 1.5, "longest": 2},
        "distinct_labels": 2,
        "duplicate_prompts": 1,
        "conflicting_labels": 1,
        "metadata": {"level": 2, "set": 1},
    }
    assert main(["data", "stats", str(path)]) == 0
    assert "level (2), set (1)" in capsys.readouterr().out


def test_generate_ends_as_soon_as_no_engine_is_left() -> None:
    class Fleet:
        def check(self) -> None:
            raise EngineError("no engine is left: it was killed")

    async def asked() -> None:
        await asyncio.Event().wait()

    fleet: Any = Fleet()
    with pytest.raises(EngineError, match="no engine is left"):
        asyncio.run(_while_engines_last(fleet, asked()))


def test_generate_and_eval_say_what_they_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no model" in refused(capsys, "generate", "--prompt", "x")
    assert "-n: 'no' is not an integer" in refused(capsys, "generate", "-n", "no")
    foreign = ("--router-url", "http://127.0.0.1:9", "--engine-urls", "http://127.0.0.1:8")
    said = refused(capsys, "generate", "--load", str(tmp_path), "--prompt", "x", *foreign)
    assert "not the checkpoint's" in said
    assert "nothing to evaluate on" in refused(capsys, "eval", "--seed", "3")
    assert "--evl-interval" in refused(capsys, "eval", "--evl-interval", "3")


def test_generate_says_that_it_does_not_play_the_agent_of_a_runs_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("tools_path: [tools.py:add]\nhf_checkpoint: none\n")
    asked = ["generate", "--config", str(tmp_path / "run.yaml"), "--prompt", "x"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "notice: --tools-path is left out: each prompt is asked once" in said
    main([*asked, "--tools-path", "tools.py:add"])
    said = capsys.readouterr().err
    assert "notice: --tools-path changes nothing for buffer-rl generate\n" in said
    assert "left out" not in said


def test_eval_is_train_for_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "dev.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "run.yaml").write_text(
        "hf_checkpoint: model\nnum_epoch: 3\neval_interval: 5\nearly_stop: eval/dev >= 0.5\nsave: s\nsave_interval: 2\n"
        "async_save: true\ntrial: false\nkeep_last: 2\nkeep_best: eval/dev\n"
        "eval_prompt_data: [dev=dev.jsonl]\nrm_type: exact_match\nrun_dir: runs/one\nlogger: []\n"
    )
    assert main(["eval", "--config", "run.yaml", "--dry-run", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    values = {name: option["value"] for name, option in options.items()}
    assert values["num_rollout"] == 0
    assert values["run_dir"] == "runs/one/eval"
    assert [values[name] for name in ("num_epoch", "early_stop", "save", "eval_interval")] == [None] * 4
    assert values["async_save"] is False
    write_checkpoint(tmp_path / "s", 4)
    assert main(["eval", "--config", "run.yaml", "--dry-run", "--json", "--load", "auto"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["load"]["value"] == "s"


@pytest.fixture(scope="module")
def bash_script() -> str:
    return completion_script("bash")


def completed(script: str, *line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    words = " ".join(f'"{word}"' for word in line)
    program = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _shtab_buffer_rl; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash"], input=program, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def test_completion_knows_every_verb_action_and_flag(bash_script: str) -> None:
    assert set(VERBS) <= set(completed(bash_script, "buffer-rl", ""))
    assert {"validate", "show", "stats"} <= set(completed(bash_script, "buffer-rl", "data", ""))
    assert {"--rollout-batch-size", "--no-rollout-shuffle"} <= set(completed(bash_script, "buffer-rl", "train", "--"))
    assert "--input-key" in completed(bash_script, "buffer-rl", "data", "show", "--")
    assert {"bash", "zsh"} <= set(completed(bash_script, "buffer-rl", "completion", ""))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["buffer-rl", "repo"], ["report"]),
        (["buffer-rl", "train", "--rollout-batch"], ["--rollout-batch-size"]),
        (["buffer-rl", "train", "--hf-checkpoint", "model", "--rollout-batch"], ["--rollout-batch-size"]),
        (["buffer-rl", "train", "--prompt-data", "a", "b", "--rollout-batch"], ["--rollout-batch-size"]),
        (["buffer-rl", "train", "--hf-checkpoint", ""], []),  # bash completes files then
        (["buffer-rl", "data", "sh"], ["show"]),
        (["buffer-rl", "data", "show", "--inp"], ["--input-key"]),
    ],
)
def test_bash_completes(bash_script: str, line: list[str], expected: list[str]) -> None:
    assert completed(bash_script, *line) == expected


def test_the_script_for_zsh_has_every_verb_and_flag() -> None:
    script = completion_script("zsh")
    assert script.startswith("#compdef buffer-rl\n")
    assert all(f"_shtab_buffer_rl_{verb}_options=(" in script for verb in VERBS)
    assert '"--rollout-batch-size[' in script
    assert '"--no-rollout-shuffle[' in script


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, 64),
        ({"engine_context_length": 48}, 48),
        ({"rollout_max_context_len": 32}, 32),
        ({"rollout_max_response_len": 1024}, None),  # what the user asks for is refused, not cut
    ],
)
def test_the_default_length_of_generate_is_cut_to_the_model_s_own(
    tmp_path: Path, given: dict[str, int], limit: int | None
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    args = compose(CORE_SECTIONS).model_validate({"hf_checkpoint": str(tmp_path), **given})
    assert _within_context(args).rollout_max_context_len == limit


def test_a_prompt_is_asked_without_the_training_rows_of_the_run_s_file_but_with_those_of_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("prompt_data: train.jsonl\nrollout_temperature: 0.5\n")
    for flags, rows in ({}, None), ({"prompt_data": ["asked.jsonl"]}, ["asked.jsonl"]):
        resolved = resolve(compose(CORE_SECTIONS), flags=flags, environ={}, config_paths=[str(file)])
        args = _without_rows_of_file(resolved)
        assert (args.prompt_data, args.rollout_temperature) == (rows, 0.5)
