"""Steps of Megatron's optimizer on fixed tokens, and checkpoints between them; each function is called on all ranks."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.megatron_models import options
from harness.megatron_ranks import Layout, groups

ROWS, LENGTH = 4, 16


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
    layout: Layout, folder: str, changes: dict[str, Any] | None = None, overlap: bool = False
) -> Iterator[Training]:
    """The model of the Hugging Face folder, ready for its first step. overlap: of gathering parameters."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from buffer_rl_megatron.bridge import load_bridge

    with groups(layout):
        bridge = load_bridge(folder, **options(layout, changes), overrides={"calculate_per_token_loss": True})
        models = bridge.build()
        bridge.load(models, folder)
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            grad_reduce_in_fp32=True,
        )
        chunks = [DistributedDataParallel(bridge.config, config, model) for model in models]
        half = bridge.config.params_dtype is torch.bfloat16
        optimizer_config = OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=0.0, weight_decay=0.01, clip_grad=1.0, bf16=half,
            params_dtype=bridge.config.params_dtype, use_distributed_optimizer=True,
        )  # fmt: skip
        optimizer = get_megatron_optimizer(optimizer_config, chunks)
        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=10,
            lr_decay_style="linear", start_wd=0.01, end_wd=0.01, wd_incr_steps=10, wd_incr_style="constant",
        )  # fmt: skip
        bridge.config.finalize_model_grads_func = partial(finalize_model_grads)
        yield Training(bridge, chunks, optimizer, scheduler)


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
    layout: Layout, folder: str, target: str, how: str = "save", overlap: bool = False, file_bytes: int = 0
) -> dict[str, Any]:
    """Two steps, a checkpoint in ``target``, two more steps: the weights at both times, and the optimizer's state.

    how: "save"; "start" writes it while the two steps go on; "release" the weights alone; "dp_reshardable" as
    Megatron-LM does where it is not asked for another format. file_bytes: what "start" may write into a file."""
    from unittest.mock import patch

    from buffer_rl_megatron import checkpoint

    other = {"distrib_optim_sharding_type": how} if how == "dp_reshardable" else {}
    with training(layout, folder, overlap=overlap) as run, patch.dict(checkpoint._LAYOUT, other):
        run.steps(0, 2)
        weights, moments = run.weights(), run.moments()
        if how == "start":
            with file_limit(file_bytes) if file_bytes else nullcontext():
                pending = checkpoint.start_save(run.chunks, run.optimizer, run.scheduler, target, step=2)
        elif how in ("save", "dp_reshardable"):
            checkpoint.save(run.chunks, run.optimizer, run.scheduler, target, step=2, extra={"epoch": 3})
        else:
            checkpoint.save(run.chunks, None, None, target, step=0)
        run.steps(2, 2)
        if how == "start":
            assert not Path(target, checkpoint.TRACKER).exists()
            deadline = time.monotonic() + 60.0
            while not pending():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        return {"weights": weights, "moments": moments, "after": run.weights()}


def resumed(layout: Layout, folder: str, source: str) -> dict[str, Any]:
    """The weights of the checkpoint, what it said, and the weights after two more steps."""
    from buffer_rl_megatron import checkpoint

    with training(layout, folder) as run:
        loaded = checkpoint.load(run.chunks, run.optimizer, run.scheduler, source)
        weights, moments = run.weights(), run.moments()
        run.steps(2, 2)
        facts = (loaded.step, loaded.has_optimizer, dict(loaded.extra))
        return {"weights": weights, "moments": moments, "after": run.weights(), "facts": facts}
