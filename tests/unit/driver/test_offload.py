"""Trainer and engines that hold a device's memory in turn, on virtual time and over the real Buffer state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.errors import PayloadLostError, TrainError, WorkerDiedError
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, RolePlan, RunPlan, RunResult, Schedule, parse_early_stop
from buffer_rl.records.groups import Ticket
from harness.fake_roles import FakePublisher, FakeRollouts, FakeTrain
from harness.virtual_time import VirtualRuntime

PLAN = RunPlan(
    num_rollouts=3,
    schedule=Schedule(mode=Mode.LOCKSTEP),
    roles=RolePlan(max_restarts=3),
    publish_at_start=True,
    compare_log_probs=True,
    ref_update_interval=1,
    evaluate=True,
    eval_interval=2,
    offload_train=True,
    offload_rollout=True,
    saves=True,
    save_interval=1,
    max_rollout_retries=2,
    passes_on_tickets=False,
    rollout_timeout_s=100,
    train_timeout_s=100,
    publish_timeout_s=50,
    save_timeout_s=50,
    buffer_timeout_s=5,
)


class Device:
    """The memory of one device, which refuses what is not possible; ``calls`` in their order."""

    def __init__(self, *, released: bool = True) -> None:
        self.awake = True
        self.released = {"weights", "kv_cache", "cuda_graph"} if released else set()
        self.version: int | None = None if released else 0
        self.calls: list[str] = []

    def trains(self) -> None:
        assert self.awake, "a trainer that sleeps was called"

    def sleeps(self) -> None:
        self.calls.append("sleep")
        self.trains()
        self.awake = False

    def generates(self, version: int) -> None:
        assert not self.released, f"the engines generate without {self.released}"
        assert self.version == version, f"they serve version {self.version}, not {version}"


class Train(FakeTrain):
    """A trainer on the device. lost: errors of ``fetch``."""

    def __init__(self, device: Device, *lost: Exception) -> None:
        super().__init__()
        self._device, self._lost = device, list(lost)

    def fetch(self, rollout_id: int) -> None:
        if self._lost:
            raise self._lost.pop(0)

    def sleep(self) -> None:
        self._device.sleeps()

    def wake_up(self) -> None:
        self._device.calls.append("wake_up")
        assert not self._device.awake
        self._device.awake = True

    def __getattribute__(self, name: str) -> Any:
        if name in ("fetch", "discard", "train", "compare_log_probs"):
            device = object.__getattribute__(self, "_device")
            device.trains()
            if name == "train":
                device.calls.append("train")
        return object.__getattribute__(self, name)


class Engines(FakePublisher):
    """The engines on the device, and the publisher to them."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def release_memory(self) -> None:
        self._device.calls.append("release")
        assert not self._device.released
        self._device.released, self._device.version = {"weights", "kv_cache", "cuda_graph"}, None

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        self._device.calls.append("weights" if "weights" in tags else "cache")
        assert self._device.released >= set(tags)
        self._device.released -= set(tags)

    def publish(self, version: int) -> dict[str, float]:
        self._device.calls.append("publish")
        self._device.trains()
        assert "weights" not in self._device.released
        self._device.version = version
        return super().publish(version)


class Rollouts(FakeRollouts):
    """Each takes part of the device's cache. dies_in: tasks in which the worker dies, once each."""

    def __init__(self, state: BufferState, device: Device, scores: tuple[float, ...], dies_in: list[str]) -> None:
        super().__init__(state, scores)
        self._device, self._dies_in = device, dies_in

    def run(self, ticket: Ticket) -> Any:
        self._device.calls.append("evaluate" if ticket.evaluation else "rollout")
        self._device.generates(ticket.version)
        if ticket.task in self._dies_in:
            self._dies_in.remove(ticket.task)
            raise WorkerDiedError("the process died", where="rollout.run")
        return super().run(ticket)

    def restart(self) -> None:
        """There is another one."""


class Saves:
    """Notes the steps of checkpoints, and of the updates of the reference, which the trainer has a part in."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.steps: list[int] = []

    def save(self, step: int) -> None:
        self._device.trains()
        self._device.calls.append("save")
        self.steps.append(step)

    update = save

    def seal(self) -> None:
        pass  # what is written by then needs no device


class Observer:
    """Hears everything, keeps the metrics of steps."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(metrics)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def run(
    folder: Path,
    plan: RunPlan = PLAN,
    *lost: Exception,
    dies_in: tuple[str, ...] = (),
    scores: tuple[float, ...] = (0.0,),
    device: Device | None = None,
) -> tuple[Device, RunResult, Observer]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(4)))
    args: Any = compose(CORE_SECTIONS)(
        prompt_data=str(path), rollout_batch_size=2, n_samples_per_prompt=2, eval_prompt_data=[f"held={path}"]
    )
    evals = EvalSource(args)
    state = BufferState(
        PromptDataSource(args), ledger=Ledger.in_memory(), groups_per_step=2, eval_groups=lambda: evals.groups("held")
    )
    device = device or Device(released=plan.offload_rollout)
    engines, saves, observer = Engines(device), Saves(device), Observer()
    roles: dict[str, Any] = {
        "buffer": state,
        "rollout": Rollouts(state, device, scores, list(dies_in)),
        "train": Train(device, *lost),
        "publish": engines,
        "engines": engines,
        "save": saves,
        "reference": saves,
    }
    costs = {"sleep": 3.0, "wake_up": 4.0, "release_memory": 5.0, "resume_memory": 6.0}
    runtime = VirtualRuntime(roles, lambda role, method, args: costs.get(method, 0.0))
    watched: Any = observer
    result = Driver(plan, runtime, watched).run()
    assert device.awake, "the weights are exported when the driver has ended"
    return device, result, observer


TO_ENGINES = ["weights", "publish", "sleep", "cache"]
TO_TRAINER = ["release", "wake_up"]
STEP = ["train", "save", "save"]
"""The optimizer step, the update of the reference, the checkpoint."""


def test_the_memory_changes_hands_before_each_generation_and_before_each_step(tmp_path: Path) -> None:
    device, result, observer = run(tmp_path)
    one = ["rollout", *TO_TRAINER, *STEP, *TO_ENGINES]
    assert device.calls == [*TO_ENGINES, "evaluate", *one, *one, "evaluate", *one, "evaluate", *TO_TRAINER]
    assert result.steps == 3
    # Release and wake up before a step, the weights' memory before its publication; the first and the last step begin
    # after an evaluation, for which the trainer slept and the engines took their cache.
    assert [metrics["perf/offload_time"] for metrics in observer.metrics] == [15, 15 + 3 + 6, 15]
    assert [metrics["perf/step_time"] for metrics in observer.metrics] == [15, 24, 15]


def test_each_side_alone_frees_its_own_memory_and_without_either_nothing_is_called(tmp_path: Path) -> None:
    plan = replace(PLAN, num_rollouts=1, evaluate=False)
    step = ["rollout", "wake_up", *STEP, "publish"]
    device, _, _ = run(tmp_path, replace(plan, offload_rollout=False))
    assert device.calls == ["publish", "sleep", *step]
    step = ["rollout", "release", *STEP, "weights", "publish"]
    device, _, _ = run(tmp_path, replace(plan, offload_train=False))
    assert device.calls == ["weights", "publish", "cache", *step]
    device, _, observer = run(tmp_path, replace(plan, offload_train=False, offload_rollout=False))
    assert device.calls == ["publish", "rollout", *STEP, "publish"]
    assert "perf/offload_time" not in observer.metrics[0]


def test_a_rollout_that_was_lost_in_the_trainers_turn_is_produced_again_from_weights_that_are_published_again(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, num_rollouts=1, evaluate=False)
    lost = [PayloadLostError("gone", where="storage-0"), PayloadLostError("gone", where="storage-0")]
    device, result, _ = run(tmp_path, plan, *lost)
    again = [*TO_ENGINES, "rollout", *TO_TRAINER]
    assert device.calls == [*again, *again, *again, *STEP, "weights", "publish"]
    assert result.steps == 1


@pytest.mark.parametrize("task", ["train_0", "eval_0"])
def test_a_generation_whose_worker_died_is_made_again_while_the_trainer_sleeps(tmp_path: Path, task: str) -> None:
    device, result, _ = run(tmp_path, replace(PLAN, num_rollouts=1), dies_in=(task,))
    generated = ["evaluate", "rollout", "rollout"] if task == "train_0" else ["evaluate", "evaluate", "rollout"]
    assert device.calls[:7] == [*TO_ENGINES, *generated]
    assert device.calls[7:9] == TO_TRAINER
    assert result.steps == 1


def test_a_run_that_stops_early_saves_with_the_trainer_awake(tmp_path: Path) -> None:
    stop = parse_early_stop("eval/held>=0.5")
    plan = replace(PLAN, save_interval=None, early_stop=stop, ref_update_interval=None)
    device, result, _ = run(tmp_path, plan, scores=(0.0, 0.0, 0.9))
    assert (result.steps, result.stopped_early) == (2, True)
    assert device.calls[-4:] == ["evaluate", *TO_TRAINER, "save"]


class Supervised(Device):
    """Rollouts read data alone; evaluations generate."""

    def generates(self, version: int) -> None:
        if self.calls[-1] == "evaluate":
            super().generates(version)


def test_rollouts_that_never_ask_an_engine_leave_the_memory_to_the_trainer(tmp_path: Path) -> None:
    plan = replace(PLAN, num_rollouts=2, publish_each_step=False, eval_before_train=False)
    device, _, _ = run(tmp_path, plan, device=Supervised())
    assert device.calls == ["rollout", *STEP, "rollout", *STEP, *TO_ENGINES, "evaluate", *TO_TRAINER]


def test_an_error_in_a_turn_ends_the_run(tmp_path: Path) -> None:
    class Insomniac(Device):
        def sleeps(self) -> None:
            raise TrainError("there are gradients of an unfinished step")

    with pytest.raises(TrainError, match="unfinished step"):
        run(tmp_path, device=Insomniac())
