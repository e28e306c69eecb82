"""Steps of Megatron's optimizer on fixed tokens, and checkpoints between them; each function is called on all ranks."""

from __future__ import annotations

import gc
import os
import resource
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from harness.fused_adam import as_installed
from harness.megatron_models import options
from harness.megatron_ranks import Layout, groups

ROWS, LENGTH = 4, 16
WRITERS = 2
"""Processes in which a rank writes a checkpoint: Megatron's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Of a training. overlap: of gathering parameters. distributed: Megatron's distributed optimizer. fused: its inner
    one is ``FusedAdam``. extra_state: each norm has one, as TransformerEngine's have. eps: Adam's, by default a large
    one (``harness.trainers.LARGE_EPS``)."""

    overlap: bool = False
    distributed: bool = True
    fused: bool = False
    extra_state: bool = False
    eps: float = 1e-3


@dataclass
class Training:
    """A model in training: Megatron's data parallel chunks, optimizer and schedule."""

    bridge: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any

    def steps(self, first: int, count: int) -> None:
        """Optimizer steps ``first`` and following, each on its own tokens."""
        for step in range(first, first + count):
            self._step(step)

    def _step(self, step: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        tokens = np.random.default_rng(step).integers(3, 99, (ROWS, LENGTH + 1))[replica::replicas]
        ids, labels = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
        hidden = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {}

        def forward_step(_data: Any, model: Any) -> tuple[torch.Tensor, Any]:
            places = torch.arange(LENGTH)[None].expand(len(ids), -1)
            return model(ids, places, hidden, labels=labels), loss

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        several = len(self.chunks) > 1
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(())] * len(self.chunks) if several else iter(()),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
            seq_length=LENGTH,
            micro_batch_size=len(ids),
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(1)

    def weights(self) -> dict[str, np.ndarray]:
        """All weights by their Hugging Face names."""
        return {name: tensor.float().numpy().copy() for name, tensor in self.bridge.export(self.chunks)}

    def moments(self) -> list[np.ndarray]:
        """This rank's optimizer state."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        states = [state for part in parts for state in part.optimizer.state.values()]
        return [tensor.numpy().copy() for state in states for _, tensor in sorted(state.items())]


@contextmanager
def training(
    layout: Layout, folder: str, changes: dict[str, Any] | None = None, kind: Kind = Kind()
) -> Iterator[Training]:
    """The model of the Hugging Face folder, ready for its first step."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from buffer_rl_megatron.bridge import load_bridge

    with groups(layout), ExitStack() as stack:
        bridge = load_bridge(folder, **options(layout, changes), overrides={"calculate_per_token_loss": True})
        models = bridge.build()
        bridge.load(models, folder)
        if kind.extra_state:
            add_extra_states(models)
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=kind.distributed,
            overlap_grad_reduce=kind.overlap,
            overlap_param_gather=kind.overlap,
            grad_reduce_in_fp32=True,
        )
        chunks = [DistributedDataParallel(bridge.config, config, model) for model in models]
        half = bridge.config.params_dtype is torch.bfloat16
        optimizer_config = OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=0.0, weight_decay=0.01, clip_grad=1.0, bf16=half, adam_eps=kind.eps,
            params_dtype=bridge.config.params_dtype, use_distributed_optimizer=kind.distributed,
        )  # fmt: skip
        stack.enter_context(as_installed() if kind.fused else nullcontext())
        optimizer = get_megatron_optimizer(optimizer_config, chunks)
        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=10,
            lr_decay_style="linear", start_wd=0.01, end_wd=0.01, wd_incr_steps=10, wd_incr_style="constant",
        )  # fmt: skip
        bridge.config.finalize_model_grads_func = partial(finalize_model_grads)
        yield Training(bridge, chunks, optimizer, scheduler)


class _ExtraState:
    """What TransformerEngine gives its modules: a state that is pickled, or None where none is known."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None:
        if state is not None:
            raise AssertionError("it was read")


def add_extra_states(models: list[Any]) -> None:
    """Give each norm of the models an extra state."""
    for model in models:
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.__class__ = type("Norm", (_ExtraState, type(module)), {})


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Files that this process, and those that it forks within the block, write cannot grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def saved(
    layout: Layout,
    folder: str,
    target: str,
    how: str = "save",
    kind: Kind = Kind(),
    file_bytes: int = 0,
    first: int = 2,
) -> dict[str, Any]:
    """``first`` steps, a checkpoint in ``target``, two more steps: the weights at both times, the optimizer's state.

    how: "save"; "start" writes it while the two steps go on; "release" the weights alone; "dp_reshardable" as
    Megatron-LM does where it is not asked for another format; "everywhere" has all replicas gather. file_bytes: what
    "start" may write into a file."""
    from buffer_rl_megatron import checkpoint

    others = {
        "dp_reshardable": {"distrib_optim_sharding_type": how},
        "everywhere": {"distrib_optim_fully_reshardable_mem_efficient": False},
    }
    with training(layout, folder, kind=kind) as run, patch.dict(checkpoint._LAYOUT, others.get(how, {})):
        run.steps(0, first)
        weights, moments = run.weights(), run.moments()
        if how == "start":
            with file_limit(file_bytes) if file_bytes else nullcontext():
                pending = checkpoint.start_save(run.chunks, run.optimizer, target, step=first)
        elif how == "release":
            checkpoint.save(run.chunks, None, target, step=0)
        else:
            checkpoint.save(run.chunks, run.optimizer, target, step=first)
        run.steps(first, 2)
        if how == "start":
            assert not Path(target, checkpoint.TRACKER).exists()
            deadline = time.monotonic() + 60.0
            while not pending():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        return {"weights": weights, "moments": moments, "after": run.weights()}


def resumed(layout: Layout, folder: str, source: str, kind: Kind = Kind()) -> dict[str, Any]:
    """The weights and step of a checkpoint, the weights after two more steps, epsilon of the parameter groups."""
    from buffer_rl_megatron import checkpoint

    with training(layout, folder, kind=kind) as run:
        step = checkpoint.load(run.chunks, run.optimizer, source)
        run.scheduler.step(step)
        weights, moments = run.weights(), run.moments()
        run.steps(step, 2)
        found = {"weights": weights, "moments": moments, "after": run.weights(), "step": step}
        return found | {"eps": {group["eps"] for group in run.optimizer.param_groups}}


def stuck_in_a_save(layout: Layout, folder: str, target: str) -> None:
    """Begin a checkpoint whose writers wait for a reader of their files; ``target/pid`` has this rank's process id."""
    import torch.distributed as dist

    from buffer_rl_megatron import checkpoint

    step = Path(target, checkpoint.iteration_name(0))
    step.mkdir(parents=True, exist_ok=True)
    for number in range(WRITERS):
        os.mkfifo(step / f"__{dist.get_rank()}_{number}.distcp")
    with training(layout, folder) as run:
        pending = checkpoint.start_save(run.chunks, run.optimizer, target, step=0)
        Path(target, "pid.part").write_text(str(os.getpid()))
        Path(target, "pid.part").rename(Path(target, "pid"))
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            assert not pending()
            time.sleep(0.05)


def copies_during_a_save(layout: Layout, folder: str, target: str) -> tuple[int, int, int]:
    """How many tensors a checkpoint's writers were given copies of, and how many copies the rank has while they write
    and afterwards. The CPU's tensors are copied for it, as those of a GPU are."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from buffer_rl_megatron import checkpoint

    copies: list[weakref.ref[torch.Tensor]] = []

    def copied(buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        made = [
            (path, key, (other, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, key, (other, tensors) in buckets
        ]
        copies.extend(weakref.ref(tensor) for *_, (_, tensors) in made for _, tensor in tensors)
        return made

    def count() -> int:
        gc.collect()
        return sum(copy() is not None for copy in copies)

    with training(layout, folder) as run:
        with patch.object(FileSystemWriterAsync, "preload_tensors", staticmethod(copied)):
            pending = checkpoint.start_save(run.chunks, run.optimizer, target, step=0)
        during = count()
        while not pending():
            time.sleep(0.05)
        return len(copies), during, count()
