"""How runs end: by a signal, by a failure while they start, in a folder that is taken. Nothing may stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.cluster.fork_server import SOCKET_VARIABLE
from buffer_rl.errors import BufferRLError, ConfigError, WorkerError
from harness.checkpoints import write_checkpoint
from harness.processes import Process, descendants, holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]

RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's agents outlive a driver that was killed for a minute (they wait for its control service), then end."""

LAUNCH = """
import sys
from pathlib import Path
from buffer_rl.options.section import load_args
from buffer_rl.driver.launch import launch_training
from buffer_rl.plugin.registry import PluginRegistry
launch_training(load_args(Path(sys.argv[1]).read_text()), PluginRegistry())
"""


def start(args: Any, folder: Path) -> subprocess.Popen[bytes]:
    from buffer_rl.options.section import dump_args

    options = folder / f"{Path(args.run_dir).name}.json"
    options.write_text(dump_args(args))
    own = {name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE}
    return subprocess.Popen([sys.executable, "-c", LAUNCH, str(options)], start_new_session=True, env=own)


def trained(args: Any) -> bool:
    metrics = Path(args.run_dir) / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@pytest.mark.slow
def test_two_runs_at_once_end_when_their_drivers_are_terminated_and_killed_and_leave_nothing(
    make_options: MakeOptions, tmp_path: Path
) -> None:
    endless = {"num_rollout": 100_000, "eval_prompt_data": [], "eval_interval": None}
    options = [make_options(run_dir=str(tmp_path / name), **endless) for name in ("terminated", "killed")]
    drivers = [start(args, tmp_path) for args in options]
    try:
        for args, driver in zip(options, drivers, strict=True):
            assert holds_within(150, lambda args=args, driver=driver: trained(args) or driver.poll() is not None)
            assert driver.poll() is None
        seen: list[list[Process]] = [descendants(driver.pid) for driver in drivers]
        for processes in seen:
            commands = " ".join(process.command for process in processes)
            for part in ("raylet", "embedded.server", "ray::BufferActor", "ray::TrainRank", "reward_process"):
                assert part in commands
        drivers[0].send_signal(signal.SIGTERM)
        assert drivers[0].wait(60) == 128 + signal.SIGTERM
        assert holds_within(60, lambda: not any(process.alive() for process in seen[0]))
        assert drivers[1].poll() is None  # the other run goes on
        drivers[1].kill()
        late = [process for process in seen[1] if not process.command.startswith(RAY_AGENTS)]
        assert holds_within(60, lambda: not any(process.alive() for process in late))
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()


@pytest.mark.slow
def test_a_run_whose_local_ray_dies_ends_at_once_and_leaves_nothing(make_options: MakeOptions, tmp_path: Path) -> None:
    args = make_options(num_rollout=100_000, eval_prompt_data=[], eval_interval=None)
    driver = start(args, tmp_path)
    try:
        assert holds_within(150, lambda: trained(args) or driver.poll() is not None)
        seen = descendants(driver.pid)
        (raylet,) = [process for process in seen if process.command.split(" ")[0].endswith("/raylet")]
        os.kill(raylet.pid, signal.SIGKILL)
        assert driver.wait(30) == 1
        late = [process for process in seen if not process.command.startswith(RAY_AGENTS)]
        assert holds_within(30, lambda: not any(process.alive() for process in late))
    finally:
        driver.kill()
        driver.wait()


BROKEN_PLUGINS = """
import os, sys

class Rollout:
    uses_engine = False

    def __init__(self, args):
        if any("default_worker" in word for word in sys.argv) or os.environ.get("RAY_JOB_ID"):
            raise LookupError("the judge's key is not set")

    def __call__(self, args, rollout_id, buffer, evaluation=False):
        return []
"""


@pytest.mark.slow
def test_a_worker_that_cannot_be_set_up_ends_the_start_with_its_own_words_and_nothing_running(
    train: Run, make_options: MakeOptions, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN_PLUGINS)
    args = make_options(rollout_function_path=f"{path}:Rollout", eval_prompt_data=[], eval_interval=None)
    before = {process.pid for process in descendants(os.getpid()) if process.command.startswith("ray::")}
    with pytest.raises(BufferRLError, match="the judge's key is not set") as caught:
        train(args)
    assert isinstance(caught.value, WorkerError)

    def gone() -> bool:
        actors = ("ray::RolloutWorker", "ray::TrainRank", "ray::BufferActor")
        mine = [process for process in descendants(os.getpid()) if process.command.startswith(actors)]
        return {process.pid for process in mine} <= before

    assert holds_within(30, gone)


def test_a_folder_that_another_run_uses_is_refused_before_anything_starts(
    train: Run, make_options: MakeOptions
) -> None:
    from buffer_rl.driver.folders import folder_lock

    args = make_options()
    with folder_lock(Path(args.run_dir)), pytest.raises(ConfigError, match="another run is at work"):
        train(args)
    saves = Path(args.run_dir).with_name("saves")
    saving = make_options(save=str(saves))
    with folder_lock(saves), pytest.raises(ConfigError, match=r"--save: another run is at work"):
        train(saving)
    write_checkpoint(saves, 1)
    with pytest.raises(ConfigError, match="a checkpoint of step 1, and this run begins at step 0"):
        train(saving)
    assert not (Path(args.run_dir) / "metrics.jsonl").exists()
