"""Training with real SGLang servers on the CPU: each way of publishing weights, and servers that fail."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from harness.processes import descendants, holds_within

from .conftest import STEPS, TIMEOUT_S, command, metrics_of, servers

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TIMEOUT_S)]

Start = Callable[..., subprocess.Popen[str]]
REWARD = "rollout/raw_reward_all"  # of all groups, those that the filter drops included
LAST = 10
NOISE = 0.06
"""Between means over the last 10 of 20 steps; between two seeds of the embedded engine it is 0.02."""


@pytest.fixture(scope="session")
def embedded(start: Start, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The mean reward of the last steps with the embedded engine."""
    folder = tmp_path_factory.mktemp("embedded") / "run"
    ended(start(folder, "--rollout-engine", "embedded"))
    return mean(metrics_of(folder, REWARD)[-LAST:])


def ended(run: subprocess.Popen[str]) -> str:
    """What a run printed, which must have ended well."""
    printed, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, printed
    return printed


@pytest.mark.parametrize(
    "flags",
    [
        ("--weight-sync-mode", "disk"),
        ("--weight-sync-mode", "tensor"),
        ("--weight-sync-mode", "distributed"),
        ("--weight-sync-mode", "tensor", "--rollout-num-gpus-per-engine", "2"),
        ("--weight-sync-mode", "distributed", "--rollout-num-gpus-per-engine", "2"),
    ],
    ids=["disk", "tensor", "distributed", "tensor, 2 ranks", "distributed, 2 ranks"],
)
@pytest.mark.usefixtures("nothing_left")
def test_the_quickstart_trains_and_engine_and_trainer_agree(
    flags: tuple[str, ...], start: Start, embedded: float, tmp_path: Path
) -> None:
    ended(start(tmp_path / "run", *flags))
    differences = metrics_of(tmp_path / "run", "train/train_rollout_logprob_abs_diff")
    rewards = metrics_of(tmp_path / "run", REWARD)
    assert len(differences) == len(rewards) == STEPS
    assert max(differences) < 1e-4
    assert abs(mean(rewards[-LAST:]) - embedded) < NOISE
    assert mean(rewards[-LAST:]) > rewards[0]


@pytest.mark.parametrize(
    "schedule", [(), ("--schedule", "async", "--max-staleness", "2", "--use-tis")], ids=["lockstep", "async"]
)
@pytest.mark.usefixtures("nothing_left")
def test_adapters_beside_the_base_are_what_the_trainer_has_after_each_step(
    schedule: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    """Each publication compares each engine with the trainer, with the adapter and without."""
    adapters = ("--lora-rank", "8", "--lr", "1e-3", "--lora-publish", "adapter", "--weight-sync-mode", "disk")
    folder = tmp_path / "run"
    ended(start(folder, *adapters, *schedule, "--rollout-num-engines", "2"))
    assert num_steps(folder) == STEPS
    differences = metrics_of(folder, "train/train_rollout_logprob_abs_diff")
    assert differences
    assert max(differences) < 1e-4
    rewards = metrics_of(folder, "rollout/raw_reward" if schedule else REWARD)
    assert mean(rewards[-LAST:]) > rewards[0]
    assert len(list((folder / "weights").iterdir())) == (4 if schedule else 2)


@pytest.mark.parametrize("mode", ["disk", "tensor", "distributed"])
@pytest.mark.usefixtures("nothing_left")
def test_servers_that_are_killed_and_stopped_are_replaced_and_no_group_is_lost(
    mode: str, start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = ["--rollout-num-engines", "2", "--weight-sync-mode", mode, "--rollout-health-check-timeout", "15"]
    run = start(folder, *flags, "--num-rollout", "60")
    try:
        assert holds_within(120, lambda: num_steps(folder) >= 2)
        killed, stopped = servers()
        os.kill(killed, signal.SIGKILL)
        for child in [stopped, *(process.pid for process in descendants(stopped))]:
            os.kill(child, signal.SIGSTOP)
        assert holds_within(240, lambda: len(set(servers()) - {killed, stopped}) == 2)
    finally:
        printed = ended(run)
    checked = subprocess.run(command("ledger", str(folder), "--verify"), capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    assert max(metrics_of(folder, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert printed.count("is back, with the weights of version") == 2


@pytest.mark.usefixtures("nothing_left")
def test_an_asynchronous_run_keeps_its_bound_on_two_servers_of_which_one_is_killed(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    schedule = ["--schedule", "async", "--max-staleness", "2", "--use-tis"]
    steps = 60  # the run goes on until the server in place of the killed one has started
    flags = ["--rollout-num-engines", "2", "--weight-sync-mode", "tensor", "--num-rollout", str(steps)]
    run = start(folder, *schedule, *flags)
    try:
        assert holds_within(240, lambda: num_steps(folder) >= 3)
        killed = servers()[0]
        os.kill(killed, signal.SIGKILL)
        assert holds_within(240, lambda: len(set(servers()) - {killed}) == 2 or run.poll() is not None)
    finally:
        printed = ended(run)
    checked = subprocess.run(command("ledger", str(folder), "--verify"), capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    staleness = metrics_of(folder, "staleness/max")
    assert len(staleness) == steps
    assert 0 < max(staleness) <= 2
    differences = metrics_of(folder, "train/train_rollout_logprob_abs_diff")  # of rows of the current version alone
    assert differences
    assert max(differences) < 1e-4
    rewards = metrics_of(folder, "rollout/raw_reward")
    assert mean(rewards[-LAST:]) > rewards[0]
    assert "is back, with the weights of version" in printed


def num_steps(folder: Path) -> int:
    return len(metrics_of(folder, "perf/step_time")) if (folder / "metrics.jsonl").exists() else 0
