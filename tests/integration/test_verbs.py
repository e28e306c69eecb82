"""The verbs that ask a live engine, as a user types them: generate, eval of a checkpoint, and training with a tool."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.cli import main
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.observe.run_folder import read_facts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tool_use"
ENGINE = ["--engine-context-length", "64", "--engine-max-running-requests", "16", "--rollout-max-response-len", "6"]


def test_generate_prints_one_answer_a_prompt_and_response(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--hf-checkpoint", str(task / "model"), "--json", "-n", "2", "--prompt", "ab="]
    sampled = [*asked, *ENGINE, "--prompt-data", f"{task / 'train.jsonl'}@[:2]", "--rollout-min-p", "0.1"]
    sampled += ["--custom-rm-path", f"{task / 'letters.py'}:count_a"]
    assert main(sampled) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["prompt"], row["label"], row["sample_index"]) for row in rows] == [
        (prompt, label, index) for prompt, label in (("ab=", None), ("ab=", "ba"), ("ba=", "ab")) for index in (0, 1)
    ]
    assert {row["status"] for row in rows} <= {"completed", "truncated"}
    assert all(row["tokens"] == 6 for row in rows if row["status"] == "truncated")
    assert all(len(row["response"]) <= row["tokens"] <= 6 for row in rows)
    assert len({row["response"] for row in rows}) > 1
    assert [row.get("reward") for row in rows] == [None, None, *(row["response"].count("a") for row in rows[2:])]


@pytest.mark.slow
def test_generate_asks_the_model_of_a_checkpoint(whole_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ["--json", "--rollout-temperature", "0", *ENGINE]
    prompts = [word for text in ("ab=", "abc=", "bca=", "cc=") for word in ("--prompt", text)]
    said = []
    for model in (["--load", whole_run.save], ["--hf-checkpoint", f"{whole_run.run_dir}/hf"]):
        assert main(["generate", *model, *greedy, *prompts]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 4


@pytest.mark.slow
def test_eval_of_a_checkpoint_has_its_weights_and_calls_the_log_function(whole_run: Any, tmp_path: Path) -> None:
    (tmp_path / "log.py").write_text(
        "def log(rollout_id, args, data, extra_metrics):\n"
        "    extra_metrics['eval/held/samples'] = len(data['held']['samples'])\n"
    )
    command = ["eval", "--load", whole_run.save, "--run-dir", str(tmp_path / "eval"), "--logger", "--deterministic"]
    command += ["--hf-checkpoint", whole_run.hf_checkpoint, "--eval-prompt-data", *whole_run.eval_prompt_data, *ENGINE]
    command += ["--custom-rm-path", whole_run.custom_rm_path, "--progress", "none"]
    assert main([*command, "--custom-eval-rollout-log-function-path", f"{tmp_path / 'log.py'}:log"]) == 0
    (again,) = read_metrics(tmp_path / "eval")
    evaluations = [record for record in read_metrics(whole_run.run_dir) if record["kind"] == "eval"]
    after = evaluations[-1]
    assert again["step"] == after["step"] == 4
    assert after["eval/held"] != evaluations[0]["eval/held"]  # or the initial weights would do as well
    assert again["eval/held"] == after["eval/held"]
    assert again["eval/held/samples"] == 4


@pytest.mark.slow
def test_the_tool_use_example_trains(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("tool_use_prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.prepare(tmp_path / "build")
    for name in ("train.yaml", "calculator.py"):
        (tmp_path / name).write_text((EXAMPLE / name).read_text())
    assert main(["train", "--config", "train.yaml", "--logger", "--progress", "none"]) == 0
    steps: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    for record in read_metrics(tmp_path / "runs" / "tool_use"):
        steps[record["step"]] |= record
    for step in steps.values():
        assert step["rollout/tool_calls"] > 0
        assert 0 < step["rollout/tool_tokens"] < 1
        # The trainer, over whole samples, finds what the engine said turn by turn; the tool's tokens do not count.
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-5


@pytest.mark.slow
def test_a_run_that_fails_after_a_step_has_its_report(
    ray_cluster: None, make_options: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(
        "import pathlib\n\n\ndef score(args, sample):\n"
        "    if pathlib.Path(args.run_dir, 'metrics.jsonl').stat().st_size:\n"
        "        raise ValueError('no reward from the second step on')\n"
        "    return sample.response.count('a')\n"
    )
    args = make_options(custom_rm_path=f"{tmp_path / 'reward.py'}:score", eval_prompt_data=[], eval_interval=None)
    (tmp_path / "run.json").write_text(
        json.dumps(args.model_dump(exclude_defaults=True, exclude_none=True, mode="json"))
    )
    assert main(["train", "--config", str(tmp_path / "run.json"), "--no-trial"]) == 2
    end = read_facts(args.run_dir).end
    assert end["how"] == "failed"
    assert "no reward from the second step on" in end["why"]
    page = Path(args.run_dir, "report.html")
    assert "no reward from the second step on" in page.read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert str(page) in out
    assert "trial" not in out  # none was made
