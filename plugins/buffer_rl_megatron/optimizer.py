"""Megatron's optimizer on the chunks of a model: gradients over replicas, clipping, learning rate, parameters that are
gathered late."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from buffer_rl.errors import TrainError
from buffer_rl.train.optimizer import learning_rate, non_finite_gradient
from buffer_rl_megatron import compat
from buffer_rl_megatron.optimizer_state import has_torch_adam, parts_of

if TYPE_CHECKING:
    from buffer_rl_megatron.options import MegatronArgs


def data_parallel(args: MegatronArgs, config: Any, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """The chunks in Megatron's ``DistributedDataParallel``, whose gradients are sums over passes and replicas."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=False,  # the optimizer step looks at their norm
    )
    return [
        DistributedDataParallel(config=config, ddp_config=settings, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


class Optimizer:
    """AdamW (arXiv 1711.05101) of Megatron, with float32 master weights where the model's are bfloat16.

    Weight decay applies to matrices only. chunks: as ``data_parallel`` returns them."""

    def __init__(self, args: MegatronArgs, chunks: Sequence[Any]) -> None:
        self.step_count = 0
        self._args = args
        self._chunks = list(chunks)
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        settings = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=min(args.min_lr, args.lr),
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        )
        with compat.cpu_devices():
            self.megatron = get_megatron_optimizer(settings, self._chunks)
        self.zero_grad()

    def offload(self) -> None:
        """Free the gradients; on a GPU and under --bf16 move weights and the optimizer's state to host memory. Raises
        TrainError between ``accumulating`` and ``step``."""
        if self.has_gradients:
            raise TrainError("there are gradients of an unfinished step", hint="sleep after optimizer_step")
        if self._moves_weights:
            self.megatron.offload_to_cpu()
            self._move_other_weights(torch.device("cpu"))
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=self._moves_weights, move_grads=True)

    def reload(self) -> None:
        """The inverse of ``offload``."""
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=self._moves_weights, move_grads=True)
        if self._moves_weights:
            self._move_other_weights(compat.current_device())
            inner = [part.optimizer for part in parts_of(self.megatron) if has_torch_adam(part)]
            steps = [(state, state["step"]) for each in inner for state in each.state.values()]
            self.megatron.restore_from_cpu()
            for state, step in steps:
                state["step"] = step  # in host memory, where torch reads it without waiting for the device

    def _move_other_weights(self, device: torch.device) -> None:
        """Those that are in no buffer: frozen ones, and all without the distributed optimizer."""
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                if not (parameter.requires_grad and self._args.use_distributed_optimizer):
                    parameter.data = parameter.data.to(device)

    @property
    def _moves_weights(self) -> bool:
        """In float32 the optimizer works on the weights themselves, which moving would part."""
        return compat.current_device().type == "cuda" and bool(self._args.bf16)

    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients of backward passes within the block, if there are any, are added to those of the step, which has
        begun then; replicas do not meet."""
        self.has_gradients = True
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def zero_grad(self) -> None:
        """Forget the accumulated gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()
        self.has_gradients = False

    def step(self, scale: float) -> dict[str, float]:
        """Sum the gradients over replicas, multiply them by ``scale``, clip, step and zero them. Returns ``grad_norm``
        (before clipping) and ``lr``, the same on all ranks.

        Raises NonFiniteError on every rank, with the parameters unchanged, if the gradient is not finite."""
        with compat.cpu_devices():
            if self._args.overlap_grad_reduce:
                for chunk in self._chunks:
                    chunk.start_grad_sync()
            finalize_model_grads(self._chunks)
            for chunk in self._chunks:
                chunk.scale_gradients(scale)
            self.megatron.prepare_grads()
            grad_norm = float(self.megatron.get_grad_norm())
            is_bad = torch.tensor(int(not math.isfinite(grad_norm)), device=compat.current_device())
            dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
            if is_bad:
                self.zero_grad()
                raise non_finite_gradient(grad_norm, self.step_count)
            lr = learning_rate(self._args, self.step_count)
            for group in self.megatron.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
                group["weight_decay"] = self._args.weight_decay * group.get("wd_mult", 1.0)
            for part in parts_of(self.megatron) if self._args.clip_grad > 0 else ():
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, self._args.clip_grad, grad_norm)
            self.megatron.step_with_ready_grads()
            self.zero_grad()
        self.step_count += 1
        return {"grad_norm": grad_norm, "lr": lr}
