"""Commands of other projects that generate while they train: translated, or as they are, they train on a laptop."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from buffer_rl.cli import main
from buffer_rl.observe.metrics import read_metrics
from harness.metric_names import check_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 4
DATA = (
    "--input-key prompt --label-key label --custom-rm-path {task}/letters.py:count_a --prompt-data {task}/train.jsonl"
)
SIZES = "--rollout-batch-size 3 --n-samples-per-prompt 4 --global-batch-size 12 --rollout-max-response-len 6"
FLAGS = f"--hf-checkpoint {{task}}/model {DATA} {SIZES} --num-rollout {STEPS} --lr 1e-2 --lr-decay-style constant"
LAPTOP = ["--engine-context-length", "64", "--engine-max-running-requests", "16", "--logger", "--progress", "none"]
SUBMIT = 'ray job submit --address="http://127.0.0.1:8265" -- python3'
FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"
RESOURCE = {"actor": [1, 1], "rollout": [1, 1], "reference": [1, 1], "actor_fwd": [1, 1], "advantages": [1, 0]}
RELAX = (
    f"--resource '{json.dumps(RESOURCE)}' --max-staleness 2 --num-data-storage-units 1 --num-iters-per-train-update 8 "
    "--fully-async --use-health-check --use-fault-tolerance"
)


def train(folder: Path, *command: str) -> list[float]:
    """Train as typed in this folder. Returns the oldest sample's staleness of each step."""
    assert main(["train", *command, "--run-dir", str(folder / "run"), *LAPTOP]) == 0
    check_metrics(folder / "run")
    records = read_metrics(folder / "run")
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(STEPS))
    return [float(record["staleness/max"]) for record in records if "staleness/max" in record]


@pytest.mark.parametrize(
    ("project", "program", "more", "bound"),
    [
        ("slime", "train_async.py", "--update-weights-interval 1 --over-sampling-batch-size 6 --partial-rollout", 1),
        ("slime", "train_async.py", f"{FULLY_ASYNC} --balance-data", 2),
        ("relax", "-m relax.entrypoints.train", RELAX, 2),
    ],
)
def test_a_translated_script_trains_within_its_bound(
    ray_cluster: None,
    task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    project: str,
    program: str,
    more: str,
    bound: int,
) -> None:
    script, options = tmp_path / "run.sh", tmp_path / "train.yaml"
    script.write_text(f"{SUBMIT} {program} \\\n   {FLAGS.format(task=task)} \\\n   {more}\n")
    assert main(["import", project, str(script), "--laptop", "--output", str(options)]) == 0
    assert "--use-tis is added" in " ".join(capsys.readouterr().out.split())
    found = train(tmp_path, "--config", str(options))
    assert len(found) == STEPS
    assert 0 < max(found) <= bound
    if project == "slime" and bound == 1:
        assert found == [0, *[1] * (STEPS - 1)]  # each rollout is of the weights before those that train on it


def test_relaxs_own_command_line_trains_as_it_is(ray_cluster: None, task: Path, tmp_path: Path) -> None:
    kl = "--use-kl-loss --kl-loss-coef 0.01 --use-tis"
    found = train(tmp_path, *shlex.split(f"{FLAGS.format(task=task)} {kl} {RELAX}"))
    assert len(found) == STEPS
    assert 0 < max(found) <= 2
