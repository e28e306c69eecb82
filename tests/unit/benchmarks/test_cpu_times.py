"""The budget of a step in CPU-seconds: what is read from processes, and how it is divided."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

BURN = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("cpu_times")


def test_the_parts_of_a_budget_add_up_to_the_processes(module: ModuleType) -> None:
    forward, optimizer = "trainer forward", "optimizer"
    first = {"step": 0, "cpu": {"engine": 9.0, "trainer": 5.0}, "parts": {module.PARTS[0]: 1.0, forward: 2.0}}
    last = {
        "step": 4,
        "cpu": {"engine": 11.0, "trainer": 9.0, "router": 2.0},
        "parts": {module.PARTS[0]: 2.0, forward: 4.0, optimizer: 0.4},
    }
    cpu, parts = module.budget([first, last])
    assert cpu == {"engine": 0.5, "trainer": 1.0, "router": 0.5}
    assert [parts[name] for name in (module.PARTS[0], forward, optimizer, "trainer backward")] == [0.25, 0.5, 0.1, 0.0]
    assert parts[module.ELSE] == pytest.approx(2.0 - 0.85)
    lines = module.budget_table(cpu, parts)
    engine = next(line for line in lines if line.startswith("engine  "))
    assert engine.split() == ["engine", "0.500", "25.0%", "0.250"]
    assert lines[-1].split() == ["all", "2.000", "100.0%"]


def test_a_process_has_the_cpu_seconds_that_it_used_and_the_role_of_its_command_line(module: ModuleType) -> None:
    burning = [sys.executable, "-c", BURN, "ray::TrainRank.train"]
    with subprocess.Popen(burning, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = {pid: (role, seconds) for pid, role, seconds in module.run_processes(os.getpid())}
        child.communicate("\n")
    role, seconds = found[child.pid]
    assert role == module.TRAINER
    assert 0.4 < seconds < 1.0
    assert found[os.getpid()][0] == "driver"


def test_what_the_rollout_worker_starts_are_reward_processes_and_other_processes_are_rays(module: ModuleType) -> None:
    assert module.role_of("ray::RolloutWorker.run", "Ray") == "rollout worker"
    assert module.role_of("python -m multiprocessing.forkserver", "rollout worker") == module.REWARDS
    assert module.role_of("python", module.REWARDS) == module.REWARDS
    assert module.role_of("raylet/raylet --port=0", "driver") == module.RAY
    assert module.role_of("python\0-m\0buffer_rl.embedded.server", "driver") == module.ENGINE
