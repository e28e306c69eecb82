"""A run that Ctrl-C or SIGTERM ends is saved, and resumed ends as one that nobody stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.errors import Stopped
from buffer_rl.files.checkpoint import read_manifest
from buffer_rl.observe.run_folder import read_facts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

PLUGIN = """
import json, os, pathlib, time
from buffer_rl.plugin.hookspecs import hookimpl

HERE = pathlib.Path(__file__).parent
WAITS_S = 60.0


def stop(place):
    order = json.loads((HERE / "order.json").read_text())
    if order["place"] == place and not (HERE / "sent").exists():
        (HERE / "sent").touch()
        os.kill(order["pid"], order["number"])
        return order["waits_for"]
    return ""


def score(args, sample):
    metrics = pathlib.Path(args.run_dir, "metrics.jsonl")
    steps = metrics.read_text().count('"kind": "train"') + metrics.read_text().count('"kind":"train"')
    if saved := stop(f"rollouts after step {steps}"):
        end = time.monotonic() + WAITS_S
        while not pathlib.Path(saved).exists() and time.monotonic() < end:
            time.sleep(0.02)
    return sample.response.count("a")


class Stops:
    @hookimpl
    def buffer_rl_on_rollout_end(self, rollout_id, evaluation, metrics):
        if not evaluation:
            stop(f"end of rollout {rollout_id}")

    @hookimpl
    def buffer_rl_on_train_step(self, rollout_id, step, metrics):
        stop(f"end of update {step}")

    @hookimpl
    def buffer_rl_on_weight_update(self, version, metrics):
        stop(f"publication of {version}")


stops = Stops()
"""
SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 4}


def metrics_of(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] != "perf"]


# Where a signal comes; the signal; steps that are done when the run ends; whether the rollout waits for the checkpoint.
CASES = [
    pytest.param("rollouts after step 1", signal.SIGTERM, 1, {}, True, id="SIGTERM in a rollout"),
    pytest.param(
        "rollouts after step 1", signal.SIGINT, 2, {}, False, id="Ctrl-C in a rollout", marks=pytest.mark.slow
    ),
    pytest.param("end of rollout 1", signal.SIGTERM, 2, {}, False, id="SIGTERM in a step", marks=pytest.mark.slow),
    pytest.param("end of update 3", signal.SIGTERM, 3, {}, False, id="SIGTERM before a save", marks=pytest.mark.slow),
    pytest.param("publication of 1", signal.SIGINT, 1, {}, False, id="Ctrl-C in a publication", marks=pytest.mark.slow),
    pytest.param(
        "rollouts after step 2", signal.SIGTERM, 2, {}, True, id="SIGTERM in an evaluation", marks=pytest.mark.slow
    ),
    pytest.param(
        "rollouts after step 1",
        signal.SIGTERM,
        1,
        {"schedule": "pipelined", "stream_gradients": True},
        True,
        id="SIGTERM while gradients are streamed",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("place", "number", "steps", "changes", "waits"), CASES)
def test_a_run_that_a_signal_ends_is_saved_and_resumed_ends_as_one_that_nothing_ended(
    place: str,
    number: signal.Signals,
    steps: int,
    changes: dict[str, Any],
    waits: bool,
    train: Callable[[Any], Any],
    make_options: Callable[..., Any],
    whole_run: Any,
    tmp_path: Path,
) -> None:
    saved = tmp_path / "saves"
    (tmp_path / "stops.py").write_text(PLUGIN)
    waits_for = str(saved / f"step_{steps:06d}") if waits else ""
    order = {"pid": os.getpid(), "number": int(number), "place": place, "waits_for": waits_for}
    (tmp_path / "order.json").write_text(json.dumps(order))
    options = {
        "deterministic": True,
        "num_rollout": 4,
        "save": str(saved),
        "plugin": [f"{tmp_path / 'stops.py'}:stops"],
        "custom_rm_path": f"{tmp_path / 'stops.py'}:score",
        **SCHEDULE,
        **changes,
    }
    handler = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped:
        train(make_options(**options))
    assert (stopped.value.number, stopped.value.code, stopped.value.steps) == (number, 128 + number, steps)
    assert signal.getsignal(number) == handler
    end = read_facts(tmp_path / "run").end
    assert (end["how"], end["why"]) == ("stopped", number.name)
    assert [path.name for path in saved.glob("step_*")] == [f"step_{steps:06d}"]
    assert read_manifest(str(saved)).step == steps
    resumed = make_options(**options, load=str(saved))
    assert (train(resumed).steps, (tmp_path / "sent").exists()) == (4, True)
    mine, whole = (load_file(Path(args.run_dir, "hf", "model.safetensors")) for args in (resumed, whole_run))
    assert mine.keys() == whole.keys()
    assert all(torch.equal(mine[name], whole[name]) for name in mine)
    assert metrics_of(resumed.run_dir) == metrics_of(whole_run.run_dir)
