"""When the processes of a run are started again, from where, and when the run ends instead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.restart import Processes, run_with_restarts
from buffer_rl.driver.tasks import is_worker_death, role_of
from buffer_rl.errors import (
    CheckpointError,
    DeadlineError,
    EngineError,
    TrainError,
    WorkerDiedError,
    WorkerError,
)
from buffer_rl.files.checkpoint import Checkpoint, open_checkpoint
from buffer_rl.options.section import compose
from buffer_rl.plan.roles import DEDICATED, ROLES, Restart
from buffer_rl.plan.schedule import RunResult
from harness.checkpoints import write_checkpoint


class Observer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[int | None] = []

    def notice(self, line: str) -> None:
        self.said.append(line)

    def went_back(self, step: int | None) -> None:
        self.steps.append(step)


class Attempts:
    """Each attempt saves the checkpoints that it is told to, and ends with its error; the last one with a result."""

    def __init__(self, folder: Path, *plan: tuple[list[int], BaseException]) -> None:
        self.saves, self.plan = folder / "saves", list(plan)
        self.starts: list[int | None] = []

    def __call__(self, start: Checkpoint | None, processes: Processes) -> RunResult:
        self.starts.append(None if start is None else start.step)
        if not self.plan:
            return RunResult(steps=9)
        steps, error = self.plan.pop(0)
        for step in steps:
            write_checkpoint(self.saves, step)
        raise error


def death(where: str = "train 1.train") -> WorkerDiedError:
    return WorkerDiedError("the process died", where=where)


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., Any]:
    """The options of a run of nine steps."""
    fixed = {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "saves"), "num_rollout": 9}
    return lambda **changes: compose(CORE_SECTIONS)(**{**fixed, **changes})


def run(args: Any, attempts: Attempts, loaded: Checkpoint | None = None) -> Observer:
    observer: Any = Observer()
    assert run_with_restarts(args, loaded, observer, attempts).steps == 9
    return observer  # type: ignore[no-any-return]


def test_each_death_starts_the_run_again_from_its_newest_checkpoint(options: Any, tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, ([], death()), ([2, 4], death("critic.save, which writes to /x")), ([], death()))
    observer = run(options(), attempts)
    assert attempts.starts == [None, None, 4, 4]
    assert observer.steps == [None, 4, 4]
    again = "all processes of the run are started again, from"
    assert observer.said == [
        "train 1.train: the process died",
        f"{again} the start (global restart 1 of 3)",
        "critic.save, which writes to /x: the process died",
        f"{again} the checkpoint of step 4 (global restart 2 of 3)",
        "train 1.train: the process died",
        f"{again} the checkpoint of step 4 (global restart 3 of 3)",
    ]


def test_before_its_first_checkpoint_a_run_goes_back_to_the_one_that_it_was_started_from(
    options: Any, tmp_path: Path
) -> None:
    loaded = open_checkpoint(write_checkpoint(tmp_path / "saves", 3))
    attempts = Attempts(tmp_path, ([], death()), ([5], death()))
    assert run(options(), attempts, loaded).steps == [3, 5]
    assert attempts.starts == [3, 3, 5]


def test_a_run_that_writes_no_checkpoint_takes_none_that_is_in_the_folder(options: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "saves", 7)
    attempts = Attempts(tmp_path, ([], death()))
    run(options(num_rollout=0), attempts)  # an evaluation: the checkpoint is another run's
    assert attempts.starts == [None, None]


def test_the_death_after_the_last_restart_ends_the_run_and_names_the_option(options: Any, tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, ([2], death()), ([], death("ref.stream")))
    with pytest.raises(WorkerDiedError, match=r"(?s)ref\.stream: .*--max-global-restarts: 1 of 1 were used") as caught:
        run(options(max_global_restarts=1), attempts)
    assert attempts.starts == [None, 2]
    assert "--load" in caught.value.hint


def test_without_global_restarts_the_first_death_ends_the_run(options: Any, tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, ([], death()))
    with pytest.raises(WorkerDiedError) as caught:
        run(options(max_global_restarts=0), attempts)
    assert caught.value.hint == ""


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("ZeroDivisionError: by zero", where="train.train"),
        TrainError("not finite", where="train.train"),
        DeadlineError("no answer within 60 s", where="train.train"),
        EngineError("no engine is left"),
        death("data_source 'x:y'"),
        KeyboardInterrupt(),
        SystemExit(143),
    ],
    ids=lambda error: type(error).__name__,
)
def test_everything_else_ends_the_run_at_once(options: Any, tmp_path: Path, error: BaseException) -> None:
    attempts = Attempts(tmp_path, ([2], error))
    with pytest.raises(type(error)) as caught:
        run(options(), attempts)
    assert (caught.value, attempts.starts) == (error, [None])


def test_a_damaged_checkpoint_ends_the_run_and_the_death_is_its_context(options: Any, tmp_path: Path) -> None:
    def lose(start: Checkpoint | None, processes: Processes) -> RunResult:
        folder = write_checkpoint(tmp_path / "saves", 2)
        (folder / "manifest.json").write_text("{")
        raise death()

    with pytest.raises(CheckpointError, match="manifest") as caught:
        run_with_restarts(options(), None, Observer(), lose)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, WorkerDiedError)


class Slow:
    def __init__(self) -> None:
        self.gate = threading.Event()

    def write(self) -> None:
        self.gate.wait(60)


def test_a_call_of_the_driver_that_does_not_end_forbids_the_restart(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_rl.driver.restart.END_TIMEOUT_S", 0.01)
    slow, starts = Slow(), []

    def attempt(start: Checkpoint | None, processes: Processes) -> RunResult:
        starts.append(start)
        processes.local("save", slow).start(Slow.write)
        raise death()

    try:
        with pytest.raises(WorkerDiedError, match=r"(?s)not restarted: save did not end"):
            run_with_restarts(options(), None, Observer(), attempt)  # type: ignore[arg-type]
    finally:
        slow.gate.set()
    assert len(starts) == 1


def test_calls_under_way_end_after_what_they_wait_for_and_then_what_they_use_is_closed() -> None:
    slow, order = Slow(), []
    with Processes() as processes:
        processes.callback(lambda: (order.append("process"), slow.gate.set()))
        target = processes.local("publish", slow, end_s=lambda: 60.0, then=lambda: order.append("closed"))
        call = target.start(Slow.write)
    assert call.ended()
    assert order == ["process", "closed"]
    assert processes.remaining() == []


@pytest.mark.parametrize(("error", "ended"), [(death(), True), (SystemExit(143), False)])
def test_a_call_that_needs_no_process_is_waited_for_unless_the_run_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, ended: bool
) -> None:
    monkeypatch.setattr("buffer_rl.driver.restart.END_TIMEOUT_S", 0.01)
    slow, calls, timer = Slow(), [], threading.Timer(0.5, lambda: slow.gate.set())

    def attempt() -> None:
        with Processes() as processes:
            calls.append(processes.local("save", slow, end_s=lambda: 60.0).start(Slow.write))
            timer.start()
            raise error

    try:
        with pytest.raises(type(error)):
            attempt()
        assert calls[0].ended() is ended
    finally:
        timer.cancel()
        slow.gate.set()


def test_what_others_use_ends_after_them() -> None:
    order: list[str] = []

    class Ending(Slow):
        def __init__(self, name: str) -> None:
            self._name = name

        def write(self) -> None:
            order.append(self._name)

    with Processes() as processes:
        for role in ("engines", "publish"):
            ended = partial(order.append, f"{role} ended")
            target = processes.local(role, Ending(role), end_s=lambda: 60.0, then=ended)
            target.start(Slow.write).futures[0].result(60)
    assert order == ["engines", "publish", "publish ended", "engines ended"]


def test_the_trained_roles_take_the_whole_run_with_them_and_others_are_replaced() -> None:
    assert {name for name, role in ROLES.items() if role.restart is Restart.GLOBAL} == {"train", "critic"}
    assert all(ROLES[name].restart is Restart.IN_PLACE for name in ("rollout", *DEDICATED))


@pytest.mark.parametrize(
    ("where", "role"), [("train 1.save, which writes to /x", "train"), ("actor_fwd.stream", "actor_fwd"), ("", "")]
)
def test_a_death_names_its_role(where: str, role: str) -> None:
    assert role_of(death(where)) == role


def test_the_death_of_a_role_whose_name_begins_like_another_is_not_that_ones() -> None:
    assert is_worker_death("rollout", death("rollout 1.run"))
    assert not is_worker_death("rollout", death("rollout_quality.stream"))
