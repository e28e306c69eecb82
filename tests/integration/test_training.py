"""Whole runs: Ray, Buffer, engine behind the real router, trainer, on a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer_rl.errors import CheckpointError, RolloutError, WorkerError
from buffer_rl.files.checkpoint import folder_at, held_checkpoints
from buffer_rl.observe.checks import Check, State, checks_of
from buffer_rl.observe.report import read_report
from buffer_rl.observe.run_folder import read_facts
from buffer_rl.verbs.report import ledger_facts
from harness.processes import descendants, holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]


def metrics_of(run_dir: str, *, timings: bool = False) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return lines if timings else [line for line in lines if line["kind"] != "perf"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal_weights(a: Path, b: Path) -> bool:
    left, right = weights_of(a), weights_of(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def has_trained(run_dir: str) -> bool:
    metrics = Path(run_dir) / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


ROLES = ("ray::RolloutWorker", "ray::TrainRank", "ray::BufferActor")


def running() -> set[int]:
    """What a run may leave behind: this process's children, Ray's own aside, and the run's actors."""
    mine = descendants(os.getpid())
    return {
        process.pid
        for process in mine
        if process.command.startswith(ROLES) or (process.parent == os.getpid() and "ray" not in process.command)
    }


def no_others_than(before: set[int]) -> bool:
    """Waits for actors that were killed to be gone; everything else is gone when the run returns."""
    return holds_within(30, lambda: running() <= before)


HOOKS = """
import json, pathlib
from buffer_rl.plugin.hookspecs import hookimpl

class Notes:
    @hookimpl
    def buffer_rl_provide(self, kind):
        return {"noted": lambda args, sample: float(sample.response.count("a"))} if kind == "reward" else {}

    @hookimpl
    def buffer_rl_add_options(self):
        raise AssertionError("the options are there already")

    @hookimpl
    def buffer_rl_explain_flag(self, name, values):
        raise AssertionError("every flag is an option")

    @hookimpl
    def buffer_rl_local_paths(self, config, facts):
        raise AssertionError("the command line asks for them")

    @hookimpl
    def buffer_rl_configure(self, config):
        self.file = pathlib.Path(config.run_dir) / "notes"
        self.note("configured for", config.num_rollout)

    @hookimpl
    def buffer_rl_on_rollout_end(self, rollout_id, evaluation, metrics):
        assert metrics["eval/held" if evaluation else "rollout/raw_reward"] >= 0
        self.note("eval" if evaluation else "rollout", rollout_id)

    @hookimpl
    def buffer_rl_on_train_step(self, rollout_id, step, metrics):
        assert metrics["train/grad_norm"] > 0
        self.note("step", step, "on", rollout_id)

    @hookimpl
    def buffer_rl_on_weight_update(self, version, metrics):
        assert all(isinstance(value, float) for value in metrics.values())
        self.note("weights", version)

    def note(self, *words):
        with self.file.open("a") as file:
            print(*words, file=file)

notes = Notes()
"""


def test_a_run_trains_evaluates_calls_hooks_and_leaves_a_model_that_transformers_loads(
    train: Run, make_options: MakeOptions, task: Path, tmp_path: Path
) -> None:
    before = running()
    (tmp_path / "notes.py").write_text(HOOKS)
    args = make_options(
        plugin=[f"{tmp_path / 'notes.py'}:notes"], custom_rm_path=None, rm_type="noted", peak_tflops=0.5
    )
    result = train(args)
    assert result.steps == 3
    assert no_others_than(before)
    lines = metrics_of(args.run_dir, timings=True)
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 2, 3]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [0, 1, 2]
    for line in lines:
        if line["kind"] == "train":
            assert line["train/grad_norm"] > 0
    speeds = [line for line in lines if "perf/actor_train_tflops" in line]
    assert [line["step"] for line in speeds] == [0, 1, 2]
    for line in speeds:
        assert line["perf/mfu"] == pytest.approx(line["perf/actor_train_tflops"] / 0.5)
        assert 0 < line["perf/mfu"] < 1
        peaks = {name: gb for name, gb in line.items() if name.startswith("perf/peak_memory/")}
        assert peaks.keys() == {f"perf/peak_memory/{role}_gb" for role in ("train", "rollout", "buffer")}
        assert all(0.03 < gb < 10 for gb in peaks.values())
    folder = Path(args.run_dir) / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4]) == "ab"
    assert not equal_weights(folder, task / "model")
    notes = (Path(args.run_dir) / "notes").read_text().split("\n")[:-1]
    steps = [[f"rollout {r}", f"step {r + 1} on {r}", f"weights {r + 1}"] for r in range(3)]
    assert notes == ["configured for 3", "eval 0", *steps[0], *steps[1], "eval 2", *steps[2], "eval 3"]


SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 4}


def wrong_or_unknown(run_dir: str) -> list[Check]:
    """Of the report's five lines."""
    checks = checks_of(read_report(run_dir, ledger=ledger_facts(run_dir)))
    assert len(checks) == 5
    return [check for check in checks if check.state is not State.RIGHT]


@pytest.mark.slow
def test_equal_seeds_give_equal_metrics_and_parameters(train: Run, make_options: MakeOptions, whole_run: Any) -> None:
    again = make_options(deterministic=True, num_rollout=4, **SCHEDULE)
    train(again)
    assert metrics_of(again.run_dir) == metrics_of(whole_run.run_dir)
    assert len(metrics_of(again.run_dir)) >= 4
    assert equal_weights(Path(again.run_dir) / "hf", Path(whole_run.run_dir) / "hf")


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_metrics_and_parameters_of_an_uninterrupted_one(
    train: Run, make_options: MakeOptions, whole_run: Any, tmp_path: Path
) -> None:
    """Its checkpoints are written while it goes on."""
    saved = str(tmp_path / "checkpoints")
    saves = {"save": saved, "save_interval": 1, "async_save": True}
    head = make_options(run_dir=str(tmp_path / "parts"), deterministic=True, num_rollout=2, **saves, **SCHEDULE)
    train(head)
    assert sorted(path.name for path in Path(saved).glob("*step*")) == ["step_000001", "step_000002"]
    tail = make_options(run_dir=str(tmp_path / "parts"), deterministic=True, num_rollout=4, load=saved, **SCHEDULE)
    assert train(tail).steps == 4
    assert equal_weights(Path(whole_run.run_dir) / "hf", Path(tail.run_dir) / "hf")
    assert metrics_of(tail.run_dir) == metrics_of(whole_run.run_dir)
    steps = [line["step"] for line in metrics_of(tail.run_dir) if line["kind"] == "train"]
    assert steps == [0, 1, 2, 3]
    assert wrong_or_unknown(whole_run.run_dir) == wrong_or_unknown(tail.run_dir) == []
    assert read_facts(tail.run_dir).end["how"] == "done"


@pytest.mark.slow
def test_of_a_run_and_the_one_that_goes_on_from_it_the_last_and_the_best_checkpoint_remain(
    train: Run, make_options: MakeOptions, tmp_path: Path
) -> None:
    saves = {"save": str(tmp_path / "saves"), "save_interval": 1, "eval_interval": 1, "run_dir": str(tmp_path / "run")}
    kept = {"keep_last": 1, "keep_best": "eval/held"}
    train(make_options(num_rollout=2, **saves, **kept))
    train(make_options(num_rollout=4, load=saves["save"], **{**saves, "run_dir": str(tmp_path / "other")}, **kept))
    lines = [*metrics_of(str(tmp_path / "run")), *metrics_of(str(tmp_path / "other"))]
    scores = {line["step"]: line["eval/held"] for line in lines if line["kind"] == "eval" and line["step"] > 0}
    best = max(scores, key=lambda step: (scores[step], step))
    found = held_checkpoints(folder_at(saves["save"]))
    assert sorted(scores) == [1, 2, 3, 4]
    assert set(found) == {best, 4}
    assert {step: held.scores["eval/held"] for step, held in found.items()} == {step: scores[step] for step in found}
    assert len({held.manifest.facts["lineage"] for held in found.values()}) == 1


def test_a_missing_checkpoint_is_an_error_before_anything_starts(make_options: MakeOptions, train: Run) -> None:
    before = running()
    with pytest.raises(CheckpointError, match="no such folder"):
        train(make_options(load="absent"))
    assert no_others_than(before)


REWARDS = """
def fails(args, sample):
    raise RuntimeError("the judge is on holiday")
"""


@pytest.mark.slow
def test_a_failing_reward_ends_the_run_with_its_own_words_and_nothing_running(
    train: Run, make_options: MakeOptions, tmp_path: Path
) -> None:
    before = running()
    path = tmp_path / "my_reward.py"
    path.write_text(REWARDS)
    with pytest.raises(RolloutError, match="the judge is on holiday") as caught:
        train(make_options(custom_rm_path=f"{path}:fails"))
    assert "my_reward.py" in str(caught.value)
    assert no_others_than(before)


ROLLOUTS = """
from buffer_rl.records.groups import Status

def blocking(args, rollout_id, buffer, evaluation=False):
    '''A synchronous rollout function that writes its answers itself, finishes half and returns the rest.'''
    groups = buffer.get_samples(args.rollout_batch_size)
    for group in groups:
        for number, sample in enumerate(group):
            sample.tokens = [3, 4, 3, 4, 1]
            sample.response_length = 2
            sample.response = "b"
            sample.reward = float(number)
            sample.status = Status.COMPLETED
    buffer.finish(groups[0])
    return groups
"""


@pytest.mark.slow
def test_a_blocking_rollout_function_that_returns_a_bare_list_trains(
    train: Run, make_options: MakeOptions, tmp_path: Path
) -> None:
    path = tmp_path / "my_rollout.py"
    path.write_text(ROLLOUTS)
    args = make_options(
        rollout_function_path=f"{path}:blocking", num_rollout=2, eval_prompt_data=[], eval_interval=None
    )
    assert train(args).steps == 2
    lines = metrics_of(args.run_dir)
    assert [line["rollout/num_groups"] for line in lines if line["kind"] == "rollout"] == [3, 3]


@pytest.mark.parametrize(
    ("role", "with_engine"), [("RolloutWorker", True), ("TrainRank", False), ("BufferActor", False)]
)
@pytest.mark.slow
def test_a_killed_actor_ends_the_run_and_is_named(
    train: Run, make_options: MakeOptions, tmp_path: Path, role: str, with_engine: bool
) -> None:
    before = running()
    (tmp_path / "my_rollout.py").write_text(f"{ROLLOUTS}\nblocking.uses_engine = False\n")
    function = {} if with_engine else {"rollout_function_path": f"{tmp_path / 'my_rollout.py'}:blocking"}
    endless = {"num_rollout": 100_000, "eval_prompt_data": [], "eval_interval": None}
    args = make_options(**endless, **function, buffer_max_restarts=0, role_max_restarts=0, max_global_restarts=0)
    victim = threading.Thread(target=_kill_when_training, args=(args.run_dir, role))
    victim.start()
    try:
        with pytest.raises(WorkerError) as caught:
            train(args)
    finally:
        victim.join()
    names = {"RolloutWorker": "rollout", "TrainRank": "train", "BufferActor": "buffer"}
    assert names[role] in caught.value.where
    assert no_others_than(before)


def _kill_when_training(run_dir: str, role: str) -> None:
    holds_within(120, lambda: has_trained(run_dir))
    for process in descendants(os.getpid()):  # not of this machine: there may be other runs
        if process.command.startswith(f"ray::{role}"):
            os.kill(process.pid, signal.SIGKILL)
