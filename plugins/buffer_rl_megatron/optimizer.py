"""Megatron's optimizer on the chunks of a model: gradients over replicas, clipping, learning rate, parameters that are
gathered late, and its state in checkpoints.

Torch's Adam keeps a step for each parameter. Those of Apex and TransformerEngine, for which Megatron (0.16.1) is made,
keep one for each parameter group. ``_corrected`` and what is below it mend faults of Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from buffer_rl.errors import CheckpointError, TrainError
from buffer_rl.trainer.optimizer import learning_rate, non_finite_gradient
from buffer_rl_megatron import compat

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


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron's one is made of: with expert parallelism the experts have their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def has_torch_adam(part: Any) -> bool:
    """Whether the part's inner optimizer is torch's Adam or AdamW."""
    return isinstance(getattr(part, "optimizer", None), torch.optim.Adam)


def sharded_state(
    optimizer: Any, model_state: Mapping[str, Any], metadata: Mapping[str, Any], *, loading: bool
) -> dict[Any, Any]:
    """What Megatron saves or loads of the optimizer's state, also before the first step. model_state: the model's, by
    chunk. metadata: how Megatron lays it out."""
    _allocate(optimizer)
    with _corrected(optimizer):
        state: dict[Any, Any] = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
    for part in _states(optimizer, state):
        if part.get("param_state", ()) is None:  # another replica has it, and Megatron would warn of the difference
            part["param_state"] = LocalNonpersistentObject(None)
    return state


def _states(optimizer: Any, state: Mapping[Any, Any]) -> list[Any]:
    """That of each part."""
    return [state] if len(parts_of(optimizer)) == 1 else [part for _, part in sorted(state.items())]


def _allocate(optimizer: Any) -> None:
    """Make the state of step 0 where there is none."""
    for part in parts_of(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if has_torch_adam(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def restore(optimizer: Any, stored: dict[Any, Any]) -> None:
    """Give the optimizer its state from a checkpoint, whichever Adam wrote it, and whether or not experts had an
    optimizer of their own, which they have with expert parallelism.

    Betas, epsilon, weight decay and learning rate stay those of the run: of these, Megatron would take what the
    checkpoint says. stored: the tensors that ``sharded_state`` asked for, and what the checkpoint says beside them;
    changed.
    """
    commons = [each for each in (stored, *stored.values()) if isinstance(each, Mapping)]
    step = max((_step_of(common) for common in commons), default=0)
    kind = next((each["param_state_sharding_type"] for each in commons if "param_state_sharding_type" in each), None)
    parts = parts_of(optimizer)
    states = [stored] if len(parts) == 1 else [stored.get(number, {}) for number in range(len(parts))]
    for part, state in zip(parts, states, strict=True):
        own = part.state_dict()
        inner, groups = (state.setdefault("optimizer", {}), own["optimizer"]) if "optimizer" in own else (state, own)
        inner["param_groups"] = [{**group, "step": step} for group in groups["param_groups"]]
        if "state" in inner:  # absent with the distributed optimizer
            inner["state"] = {key: value for key, value in inner["state"].items() if key != "common_step"}
            if has_torch_adam(part):
                inner["state"]["common_step"] = torch.tensor(float(step))
        if "param_state" in state:
            state["param_state_sharding_type"] = kind
    with _corrected(optimizer), torch.no_grad():
        optimizer.load_state_dict(stored if len(parts) == 1 else dict(enumerate(states)))
    for part in filter(has_torch_adam, parts):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()  # Megatron gives all one tensor, which would count for each
        for group in part.optimizer.param_groups:
            del group["step"]


def _step_of(common: Mapping[Any, Any]) -> int:
    """The steps that what a checkpoint says of an optimizer counts; 0 where it says nothing."""
    inner = common.get("optimizer", common)
    found = [group["step"] for group in inner.get("param_groups", ()) if "step" in group]
    found += [each for each in (inner.get("state", {}).get("common_step"),) if each is not None]
    return max((int(each) for each in found), default=0)


def check_stored(
    optimizer: Any, common: Mapping[str, Any], layout: Mapping[str, Any], keys: Iterable[str], where: str
) -> None:
    """Raises CheckpointError for a state that this optimizer cannot take.

    That is the state of a whole optimizer for a distributed one, which wants the float32 weights with it (the other way
    goes, but under --bf16), and in Megatron's other formats, which have each optimizer's state by itself, that of
    experts where they have no optimizer of their own, or have one. common: what the checkpoint says beside its tensors.
    layout: how it says that they are laid out. keys: the tensors' names."""
    parts = parts_of(optimizer)
    stored = sum(isinstance(key, int) for key in common.get("optimizer", {})) or 1
    kind = layout.get("distrib_optim_sharding_type")
    if len(parts) != stored and kind != "fully_reshardable":
        names = {1: "one optimizer", 2: "one optimizer for experts and one for the rest"}
        what = f"it has the state of {names.get(stored, stored)}, in the format {kind}"
        expected = f"{names.get(len(parts), len(parts))}, as the run has, or the format fully_reshardable"
        hint = "keep --expert-model-parallel-size at 1 or above 1, as it was, or begin with the weights alone"
        raise CheckpointError(what, where=where, expected=expected, hint=hint)
    distributed = _is_distributed(parts[0])
    wanted = "optimizer.state.param." if distributed else "optimizer.state.fp32_param."
    needs_weights = distributed or hasattr(parts[0], "fp32_from_float16_groups")
    if kind == "fully_reshardable" and needs_weights and not any(key.startswith(wanted) for key in keys):
        written, own = ("without", "with") if distributed else ("with", "without")
        raise CheckpointError(
            f"its optimizer's state was written {written} --use-distributed-optimizer",
            where=where,
            expected=f"a state that was written {own} it, as the run is",
            hint=f"--{'no-' if distributed else ''}use-distributed-optimizer, or begin with the weights alone",
        )


def _is_distributed(part: Any) -> bool:
    return hasattr(part, "get_parameter_state_dp_zero")


@contextmanager
def _corrected(optimizer: Any) -> Iterator[None]:
    """Within the block, two faults of Megatron's distributed optimizer are mended.

    Saving, it cuts a parameter's state out of tensors without padding at the place that the parameter has in the padded
    buffer. Of a buffer with several buckets (tied embeddings have one of their own with pipeline parallelism), those
    behind the first are saved shifted; Megatron warns of it in its log. Loading, it asks the checkpoint for the step of
    torch's Adam, which is among the parameter groups."""
    distributed = list(filter(_is_distributed, parts_of(optimizer)))
    stepping = [part for part in distributed if has_torch_adam(part)]
    for part in distributed:
        part.get_parameter_state_dp_zero = _in_place_of_padding(part, part.get_parameter_state_dp_zero)
    for part in stepping:
        part._set_main_param_and_optimizer_states = _with_own_step(part, part._set_main_param_and_optimizer_states)
    try:
        yield
    finally:
        for part in distributed:
            del part.get_parameter_state_dp_zero
        for part in stepping:
            del part._set_main_param_and_optimizer_states


def _in_place_of_padding(part: Any, gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        for index, buffer in enumerate(part.buffers) if state is not None else ():
            for tensors in state[index].values():
                for key in [key for key, value in tensors.items() if isinstance(value, torch.Tensor)]:
                    tensors[key] = _padded(tensors[key], buffer)
        return state

    return gathered


def _padded(dense: torch.Tensor, buffer: Any) -> torch.Tensor:
    """The buckets of ``dense``, which are one behind the other, where they are in the buffer."""
    padded, done = dense.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        size = bucket.numel_unpadded
        padded[bucket.offset : bucket.offset + size] = dense[done : done + size]
        done += size
    return padded


def _with_own_step(part: Any, take: Callable[..., None]) -> Callable[..., None]:
    own = part._get_main_param_and_optimizer_states
    return lambda parameter, tensors: take(parameter, {**tensors, "step": own(parameter)["step"]})
