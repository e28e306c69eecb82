from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from buffer_rl.errors import DataError
from buffer_rl.observe.metrics import MetricsFile
from buffer_rl.observe.report import run_report
from buffer_rl.observe.run_folder import SampleDump


def _report(run_dir):
    console = Console(file=io.StringIO(), width=100, color_system=None)
    gains = run_report(run_dir, console)
    return gains, console.file.getvalue()


def test_the_report_shows_first_and_last_evaluation_of_each_set_and_the_files_that_exist(tmp_path):
    file = MetricsFile(tmp_path)
    for step, scores in ((0, (0.25, 0.5)), (10, (0.125, 0.75)), (20, (0.625, 0.25))):
        file.write({"eval/heldout": scores[0], "eval/dev": scores[1]}, step)
    file.write({"rollout/raw_reward": 0.3, "perf/step_time": 75.0}, 0)
    file.close()
    SampleDump(tmp_path).close()
    gains, text = _report(tmp_path)
    assert [(g.name, g.before, g.after, g.gain, g.last_step) for g in gains] == [
        ("heldout", 0.25, 0.625, 0.375, 20),
        ("dev", 0.5, 0.25, -0.25, 20),
    ]
    for shown in ("0.250", "0.625", "+0.375", "-0.250", "0 → 20", "1:15"):
        assert shown in text
    for name in ("learning_curve.png", "metrics.jsonl", "samples.jsonl"):
        assert str(tmp_path / name) in text
    assert "TensorBoard" not in text
    page = (tmp_path / "report.html").read_text()  # written after the picture, which it lists
    assert "learning_curve.png" in page


def test_the_report_of_a_run_without_evaluations_names_the_option(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"rollout/raw_reward": 0.3}, 0)
    file.close()
    gains, text = _report(tmp_path)
    assert gains == []
    assert "--eval-prompt-data" in text


def test_the_report_of_a_run_on_recorded_rollouts_says_why_it_has_no_evaluation(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"rollout/raw_reward": 0.3}, 0)
    file.close()
    changed = {"--eval-prompt-data": ["dev=x"], "--load-debug-rollout-data": "{rollout_id}.safetensors"}
    (tmp_path / "run.json").write_text(json.dumps({"changed": changed}))
    _, text = _report(tmp_path)
    assert "--load-debug-rollout-data trains on recorded rollouts, without engines" in text
    assert "--eval-prompt-data" not in text


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        run_report(tmp_path)


def test_a_gain_that_rounds_to_nothing_has_no_minus_sign(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"eval/dev": 0.25001}, 0)
    file.write({"eval/dev": 0.25}, 1)
    file.close()
    _, text = _report(tmp_path)
    assert "+0.000" in text
    assert "-0.000" not in text


def test_a_single_evaluation_has_no_before_and_no_gain(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"eval/dev": 0.25}, 4)
    file.close()
    _, text = _report(tmp_path)
    row = next(line for line in text.splitlines() if "dev" in line)
    assert row.count("0.250") == 1
    assert "+" not in row
