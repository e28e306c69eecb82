"""Trainers that go on from a checkpoint with other layers, precision and optimizer, after a sleep; one a process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from harness.megatron_rows import make_args, make_rows

Weights = dict[str, torch.Tensor]


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *args).result()


def saved_on_cpu(model: str, target: str) -> Weights:
    """A step with the local layers in float32 and torch's AdamW, and a checkpoint of it. Returns the weights."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("transformer_engine", "apex"):
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    trainer, objective = _trainer(model, {})
    _step(trainer, objective, 0)
    trainer.save(target)
    return _weights(trainer)


def continued(model: str, source: str, target: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A step from the checkpoint ``source`` with other options, and a checkpoint of it while nothing waits: the weights
    before and after, the metrics, and the steps that Adam counts."""
    trainer, objective = _trainer(model, {**changes, "async_save": True})
    trainer.load(source)
    before = _weights(trainer)
    metrics = _step(trainer, objective, 1)
    trainer.save(target)
    deadline = time.monotonic() + 120.0
    while not trainer.is_saved():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {"before": before, "after": _weights(trainer), "metrics": metrics, "steps": _steps(trainer)}


def loaded(model: str, source: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint, and the steps that Adam counts."""
    trainer, _ = _trainer(model, changes)
    trainer.load(source)
    return {"weights": _weights(trainer), "steps": _steps(trainer)}


def _trainer(model: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    from buffer_rl.plugin.registry import PluginRegistry
    from buffer_rl.trainer.objective import Objective
    from buffer_rl_megatron.trainer import MegatronTrainer

    args = make_args(model, **changes)
    objective = Objective(args, PluginRegistry.from_flags([]))
    return MegatronTrainer(args, 0, 1, objective), objective


def _step(trainer: Any, objective: Any, seed: int) -> dict[str, float]:
    batch = make_rows(12, seed)
    objective.compute_advantages(batch)
    metrics: dict[str, float] = trainer.optimizer_step(1 / trainer.accumulate(batch).divisor)
    return metrics


def _weights(trainer: Any) -> Weights:
    return {name: tensor.cpu().clone() for bucket in trainer.export() for name, tensor in bucket.items()}


def _steps(trainer: Any) -> set[int]:
    inner = trainer._optimizer.megatron.chained_optimizers[0].optimizer
    states = [*inner.param_groups, *inner.state.values()]
    return {int(state["step"]) for state in states if "step" in state}


def check_that_it_goes_on(model: str, folder: Path, changes: dict[str, Any]) -> None:
    """A checkpoint of the CPU goes on under ``--bf16`` with the changes, and the next checkpoint is loaded again."""
    first, second = str(folder / "first"), str(folder / "second")
    for path in (first, second):
        Path(path).mkdir()
    changes = {"bf16": True, **changes}
    saved = in_own_process(saved_on_cpu, model, first)
    found = in_own_process(continued, model, first, second, changes)
    again = in_own_process(loaded, model, second, changes)
    assert all(torch.equal(found["before"][name], saved[name].bfloat16()) for name in saved)
    assert any(not torch.equal(found["before"][name], found["after"][name]) for name in saved)
    assert 0 < found["metrics"]["grad_norm"] < float("inf")
    assert found["steps"] == again["steps"] == {2}
    assert all(torch.equal(found["after"][name], again["weights"][name]) for name in saved)


def check_that_sleep_changes_nothing(model: str, distributed: bool) -> None:
    """A trainer on a GPU frees its memory while it sleeps, and has the same weights afterwards. distributed: whether
    its optimizer is."""
    trainer, objective = _trainer(
        model, {"train_device": "cuda", "bf16": True, "use_distributed_optimizer": distributed}
    )
    _step(trainer, objective, 0)
    before = _weights(trainer)
    used = torch.cuda.memory_allocated()
    trainer.sleep()
    left = torch.cuda.memory_allocated() - 64 * 2**20  # of cuBLAS
    assert left < 0.2 * used, f"{left} of {used} bytes are still there"
    trainer.wake_up()
    after = _weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    inner = trainer._optimizer.megatron.chained_optimizers[0].optimizer
    assert all(not state["step"].is_cuda for state in inner.state.values() if "step" in state)  # torch's Adam
    assert _step(trainer, objective, 1)["grad_norm"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in _weights(trainer).items())
