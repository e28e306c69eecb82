"""Whole runs on one device, in virtual time over the real driver and Buffer: random plans under ``--offload-train`` and
``--offload-rollout``, with deaths, lost rows, signals and restarts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from buffer_rl.cluster.environment import StopRequest
from buffer_rl.errors import PayloadLostError, TrainError
from buffer_rl.plan.schedule import Mode, RolePlan, Schedule
from harness.fake_roles import FakeTrain
from harness.schedule_trial import Outcome, Saves, Setting, Stopping, TrialBuffer, drawn, world
from harness.shared_device import SharedDevice, on_device
from harness.virtual_time import VirtualRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrial:
    """A setting in lockstep, and what is changed of its plan. lost: rollouts whose rows are lost once. signal_in: in
    which move of memory a signal with a deadline comes, if one does."""

    setting: Setting
    changes: Mapping[str, Any]
    lost: frozenset[int]
    signal_in: int | None


def drawn_trial(seed: int) -> MemoryTrial:
    """A random trial."""
    draw, steps = Random(f"memory {seed}"), 6
    own: list[tuple[str, str]] = [("train", model) for model in ("ref", "actor") if draw.random() < 0.5]
    critic = draw.random() < 0.6
    roles = RolePlan(
        trained=("train", "critic") if critic else ("train",),
        passes=(*own, ("critic", "critic")) if critic else tuple(own),
        estimates=critic,
        critic_only_steps=draw.choice([0, 0, 2]) if critic else 0,
        max_restarts=1000,
    )
    setting = replace(
        drawn(seed),
        schedule=Schedule(mode=Mode.LOCKSTEP),
        num_steps=steps,
        eval_interval=draw.choice([None, 1, 2, 3]),
        stops_at=draw.choice([None, 2, 4]),
        ends_short=0.0,
    )
    changes: dict[str, Any] = {
        "offload_train": True,
        "offload_rollout": True,
        "roles": roles,
        "publish_at_start": True,
        "compare_log_probs": draw.random() < 0.5,
        "ref_update_interval": draw.choice([None, 1, 2]),
        "saves": True,
        "save_interval": draw.choice([1, 2]),
        "async_save": draw.random() < 0.5,
        "save_on_exit_s": 1e6,
    }
    if draw.random() < 0.3:  # one side alone
        changes[draw.choice(["offload_train", "offload_rollout"])] = False
    lost = frozenset(step for step in range(steps) if draw.random() < 0.2)
    return MemoryTrial(
        setting=setting,
        changes=changes,
        lost=lost,
        signal_in=draw.randrange(draw.choice([8, 120])) if draw.random() < 0.6 else None,
    )


class Losing(FakeTrain):
    """A trained role that lacks rows of some rollouts once, and then fails as ``fails`` does in a step."""

    def __init__(self, lost: frozenset[int], fails: Stopping | None = None) -> None:
        super().__init__()
        self._lost, self._fails = set(lost), fails

    def fetch(self, rollout_id: int) -> None:
        if rollout_id in self._lost:
            self._lost.remove(rollout_id)
            raise PayloadLostError("gone", where="storage-0")
        if self._fails is not None:
            self._fails.fetch(rollout_id)

    def train(self) -> Mapping[str, float]:
        return super().train() if self._fails is None else self._fails.train()


class References:
    def update(self, step: int) -> None:
        """Nothing to copy."""


def run_trial(
    trial: MemoryTrial,
    folder: Path,
    device_of: Callable[..., SharedDevice] = SharedDevice,
) -> list[SharedDevice]:
    """Run a trial to its end, resumed from its newest checkpoint where it ends early. Returns the device of each
    attempt."""
    buffer, outcome = TrialBuffer(folder, trial.setting), Outcome(trial.setting)
    saves, fails = Saves(buffer), Stopping(trial.setting.stops_at)
    losing, devices, signal_in = Losing(trial.lost, fails), list[SharedDevice](), trial.signal_in
    while True:
        stop = StopRequest()
        runtime, driver, _ = world(trial.setting, buffer, saves, fails, outcome, trial.changes, stop)
        device = device_of(
            trial.changes["roles"].trained,
            train=trial.changes["offload_train"],
            rollout=trial.changes["offload_rollout"],
            version=saves.step,
        )
        device.runtime = runtime
        devices.append(device)
        roles = {**runtime.roles, "train": losing, "critic": Losing(frozenset()), "reference": References()}
        runtime.roles = on_device(device, roles)
        device.moves = partial(_signal, runtime, stop, signal_in)
        try:
            result = driver.run()
        except TrainError:
            buffer.go_back(saves)
            continue
        assert result.signal is not None or result.steps == trial.setting.num_steps
        device.require("weights" in device.held["train"], "the weights are exported once the run has ended")
        if result.signal is None:
            return devices
        signal_in = None
        assert saves.step == result.steps
        buffer.go_back(saves)


def _signal(runtime: VirtualRuntime, stop: StopRequest, signal_in: int | None, move: int) -> None:
    """A signal with a deadline comes in the middle of one of the moves."""
    if move == signal_in:
        runtime.loop.call_later(1.0, lambda: stop.take(signal.SIGTERM) if stop.can_wait else None)
