"""Runs with the real packages, offline: what each tracker's own files hold afterwards.

Trackio wants an older Pillow than ``constraints.txt`` has, and is no part of ``dev``; a stand-in has its functions.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.observe.observer import RunObserver
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl_trackers.options import TrackerOptions
from buffer_rl_trackers.trackers import WandbLogger
from harness.processes import descendants, holds_within
from harness.trackers import wandb_records

MADE = compose([*CORE_SECTIONS, TrackerOptions])
KEY = "f00d" * 10
STEPS = {0: 0.5, 1: 0.25}

TRACKIO = """
import json, os
class Run:
    def __init__(self, **given):
        self._write(given)
    def _write(self, record):
        with open(os.environ["TRACKIO_DIR"] + "/calls.jsonl", "a") as file:
            file.write(json.dumps(record) + "\\n")
    def log(self, metrics, step=None):
        self._write({"step": step, **metrics})
    def finish(self):
        self._write({"finished": True})
def init(project, name=None, space_id=None, config=None, resume="never", embed=True):
    return Run(project=project, name=name, space_id=space_id, loggers=config["logger"], resume=resume, embed=embed)
"""


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent, even if an option were wrong; and a key that must not be found."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "HF_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEY,
        "HF_TOKEN": KEY,
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_TOKEN": KEY,
        "TRACKIO_DIR": str(tmp_path / "home"),
        "HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)


def run(folder: Path, **options: Any) -> None:
    """A run of two steps, of which the second has a number that is not finite, and an evaluation."""
    args = MADE(run_dir=str(folder), progress="none", engine_api_key=KEY, **options)
    with RunObserver(args, PluginRegistry()) as observer:
        for step, loss in STEPS.items():
            observer.step(step, {"train/loss": loss, "train/kl": math.nan if step else 1.0})
        observer.evaluation(2, {"eval/dev@2": 0.75})


def holds_the_key(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_run_of_weights_and_biases_holds_the_metrics_with_their_steps_and_the_options(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'buffer-rl[wandb]'")
    folder = tmp_path / "my_run"
    run(folder, use_wandb=True, wandb_project="p", wandb_group="g", num_rollout=7)
    records = wandb_records(folder)
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row.get("train/loss"), row.get("eval/dev@2")) for row in rows] == [
        (0, 0.5, None),
        (1, 0.25, None),
        (2, None, 0.75),
    ]
    assert ["train/kl" in row for row in rows] == [True, False, False]
    (start,) = [record.run for record in records if record.HasField("run")]
    assert (start.project, start.run_group, start.display_name) == ("p", "g", "my_run")
    config = {item.key: json.loads(item.value_json) for item in start.config.update}
    assert (config["num_rollout"], config["engine_api_key"], config["logger"]) == (7, "***", ["tensorboard", "wandb"])
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert {definition.metric.step_metric for definition in records if definition.HasField("metric")} == {"step"}
    assert (folder / "trackers" / "wandb.id").read_text().strip() == start.run_id
    assert holds_the_key(folder) == []


@pytest.mark.slow
def test_a_resumed_run_has_the_same_run_of_weights_and_biases(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'buffer-rl[wandb]'")
    for options in ({}, {"load": "checkpoint"}, {}):
        run(tmp_path, logger=["wandb"], **options)
    first, second, third = (record.run.run_id for record in wandb_records(tmp_path) if record.HasField("run"))
    assert first == second != third


@pytest.mark.slow
def test_the_own_process_of_weights_and_biases_ends_with_a_tracker_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'buffer-rl[wandb]'")
    logger = WandbLogger(MADE(run_dir=str(tmp_path)), str(tmp_path))
    try:
        assert holds_within(60, lambda: (tmp_path / "trackers" / "wandb.id").exists())
        mine = descendants(os.getpid())
        (core,) = [process for process in mine if "wandb-core" in process.command]
        (tracker,) = [process for process in mine if "buffer_rl_trackers" in process.command]
        os.kill(tracker.pid, signal.SIGKILL)
        assert holds_within(60, lambda: not core.alive())
    finally:
        logger.close()


@pytest.mark.slow
def test_a_run_of_mlflow_holds_the_metrics_with_their_steps_and_the_options(tmp_path: Path) -> None:
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package, reason="pip install 'buffer-rl[mlflow]'")
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "my_run"
    run(folder, logger=["mlflow"], mlflow_experiment="e", num_rollout=7)
    run(folder, logger=["mlflow"], mlflow_experiment="e", num_rollout=9, load="checkpoint")
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])

    def history(name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, name)]

    assert sorted(history("train/loss")) == [(0, 0.5), (0, 0.5), (1, 0.25), (1, 0.25)]
    assert history("train/kl") == [(0, 1.0)] * 2
    assert history("eval/dev_2") == [(2, 0.75)] * 2
    assert (found.info.run_name, found.info.status) == ("my_run", "FINISHED")
    assert (found.data.params["num_rollout"], found.data.params["engine_api_key"]) == ("7", "***")
    assert holds_the_key(folder) == []


def test_a_run_of_trackio_holds_the_metrics_with_their_steps_and_the_options(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="no part of dev; pip install 'buffer-rl[trackio]'")
    run(tmp_path / "run", logger=["trackio"], trackio_project="p", num_rollout=7)
    run(tmp_path / "run", logger=["trackio"], trackio_project="p", num_rollout=7, load="checkpoint")
    with sqlite3.connect(tmp_path / "home" / "p.db") as database:
        rows = [(name, step, json.loads(text)) for name, step, text in database.execute(
            "select run_name, step, metrics from metrics order by id"
        )]  # fmt: skip
        (config,) = [json.loads(text) for (text,) in database.execute("select config from configs")]
    once = [(0, {"train/loss": 0.5, "train/kl": 1.0}), (1, {"train/loss": 0.25}), (2, {"eval/dev@2": 0.75})]
    ours = [(step, {name: found[name] for name in found if "/idle/" not in name}) for _, step, found in rows]
    assert ours == once * 2
    assert {name for name, _, _ in rows} == {(tmp_path / "run" / "trackers" / "trackio.id").read_text().strip()}
    assert (config["num_rollout"], config["engine_api_key"]) == (7, "***")
    assert holds_the_key(tmp_path) == []


def test_trackio_gets_a_name_of_its_own_for_a_new_run_and_the_same_for_a_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "installed"
    stand_in.mkdir()
    (stand_in / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(stand_in)
    for options in ({"trackio_space_id": "me/space"}, {"load": "checkpoint"}, {}):
        run(tmp_path / "run", logger=["trackio"], **options)
    calls = [json.loads(line) for line in (tmp_path / "home" / "calls.jsonl").read_text().splitlines()]
    starts = [call for call in calls if "project" in call]
    assert [(call["project"], call["space_id"], call["resume"], call["embed"], call["loggers"]) for call in starts] == [
        ("buffer-rl", "me/space", "never", False, ["trackio"]),
        ("buffer-rl", None, "allow", False, ["trackio"]),
        ("buffer-rl", None, "never", False, ["trackio"]),
    ]
    first, second, third = (call["name"] for call in starts)
    assert first == second != third
    assert first.startswith("run-")
    assert [(call["step"], call.get("train/loss")) for call in calls if "step" in call][:3] == [
        (0, 0.5),
        (1, 0.25),
        (2, None),
    ]
    assert len([call for call in calls if "finished" in call]) == 3
