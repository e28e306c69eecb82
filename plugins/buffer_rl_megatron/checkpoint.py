"""Weights and optimizer state as a distributed checkpoint of Megatron's (``torch_dist``), for any later layout.

The folder is laid out as Megatron-LM and slime do: ``iter_0000010/`` (or ``release/``: weights alone) beside a file
with the iteration's name. Making the folder durable and visible at once is the caller's part: ``write_checkpoint``
seals it under a manifest. Nothing but tensors and plain values is read: ``torch.load`` refuses other pickled objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.util import unwrap_model
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import load_content_metadata
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from buffer_rl.errors import CheckpointError
from buffer_rl_megatron.bridge import gather_parameters

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What the checkpoint says of itself, by Megatron's names: the optimizer's state is that of whole parameters."""
_VERSION = 3.0  # of Megatron-LM's state
_EXTRA = "buffer_rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was in a checkpoint. step: optimizer steps. extra: what ``save`` was given."""

    step: int
    has_optimizer: bool
    extra: Mapping[str, Any] = field(default_factory=dict)


def save(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any | None,
    scheduler: Any | None,
    folder: str,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write ``folder/iter_NNNNNNN``; without an optimizer ``folder/release``, the weights alone. Every rank calls it.

    chunks: the model's, wrapped or not. optimizer, scheduler: Megatron's. step: optimizer steps so far. extra: plain
    values that ``load`` returns.
    """
    target, name, state = _prepared(chunks, optimizer, scheduler, folder, step, extra)
    with _writing(target):
        dist_checkpointing.save(state, str(target), content_metadata=dict(_LAYOUT))
    _write_tracker(target.parent, name)


def start_save(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any | None,
    scheduler: Any | None,
    folder: str,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
) -> Callable[[], bool]:
    """``save``, from a copy of the state, in processes that are forked from the ranks: training goes on.

    The result, which every rank calls between its passes, says whether the checkpoint is whole. It raises
    CheckpointError if it cannot be written."""
    target, name, state = _prepared(chunks, optimizer, scheduler, folder, step, extra)
    queue = AsyncCallsQueue()
    with _writing(target):
        request = dist_checkpointing.save(state, str(target), async_sharded_save=True, content_metadata=dict(_LAYOUT))
        queue.schedule_async_request(request)

    def is_whole() -> bool:
        with _writing(target):
            if not queue.maybe_finalize_async_calls(blocking=False):
                return False
        _write_tracker(target.parent, name)
        return True

    return is_whole


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # fault boundary; writers report whatever they met
        raise CheckpointError(f"the checkpoint cannot be written: {error}", where=str(target)) from error


def load(chunks: Sequence[torch.nn.Module], optimizer: Any | None, scheduler: Any | None, folder: str) -> Loaded:
    """Fill model, optimizer and schedule from the newest checkpoint in ``folder``, whatever layout wrote it. Every rank
    calls it. Where the checkpoint has weights alone, or ``optimizer`` is None, so does this.

    Raises CheckpointError if something is missing or damaged, or belongs to another model.
    """
    source = newest(folder)
    try:
        common = dist_checkpointing.load_common_state_dict(str(source))
        layout = load_content_metadata(preloaded_state_dict=common) or dict(_LAYOUT)
        stored = dist_checkpointing.load_tensors_metadata(str(source))
        has_optimizer = optimizer is not None and any(key.startswith("optimizer.") for key in stored)
        if has_optimizer:
            _refuse_other_optimizers(optimizer, common, str(source))
        state = _state(
            chunks, optimizer if has_optimizer else None, scheduler if has_optimizer else None, layout, loading=True
        )
        found = dist_checkpointing.load(state, str(source))
        for key, chunk in _named(chunks).items():
            unwrap_model(chunk).load_state_dict(found[key])
        if has_optimizer:
            assert optimizer is not None
            with _corrected(optimizer), torch.no_grad():
                optimizer.load_state_dict(found["optimizer"])
            _separate_steps(optimizer)
            if scheduler is not None and "opt_param_scheduler" in found:
                scheduler.load_state_dict(found["opt_param_scheduler"])
        elif optimizer is not None:
            optimizer.reload_model_params()
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # fault boundary; torch's CheckpointException is no Exception
        raise CheckpointError(
            f"it does not load: {type(error).__name__}: {error}",
            where=str(source),
            hint="the model must be the one that was saved; --hf-checkpoint names it",
        ) from error
    return Loaded(step=int(common.get("iteration", 0)), has_optimizer=has_optimizer, extra=common.get(_EXTRA, {}))


def newest(folder: str) -> Path:
    """The checkpoint that the folder's tracker names, or the folder itself if it is one. Raises CheckpointError."""
    path = Path(folder)
    if (path / "metadata.json").is_file():
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        raise CheckpointError("this is no torch_dist checkpoint", where=str(path), expected=f"{TRACKER} in it")
    name = tracker.read_text(encoding="utf-8").strip()
    if name != RELEASE and not name.isdigit():
        raise CheckpointError(f"it says {name!r}", where=str(tracker), expected="a number or release")
    chosen = path / (RELEASE if name == RELEASE else iteration_name(int(name)))
    if not (chosen / "metadata.json").is_file():
        raise CheckpointError("the checkpoint is not whole", where=str(chosen), expected="metadata.json")
    return chosen


def iteration_name(step: int) -> str:
    """The folder of the checkpoint after ``step`` optimizer steps."""
    return f"iter_{step:07d}"


def _prepared(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any | None,
    scheduler: Any | None,
    folder: str,
    step: int,
    extra: Mapping[str, Any] | None,
) -> tuple[Path, str, dict[str, Any]]:
    name = RELEASE if optimizer is None else str(step)
    target = Path(folder, RELEASE if optimizer is None else iteration_name(step))
    gather_parameters(chunks)
    state = {
        "checkpoint_version": _VERSION,
        "iteration": step,
        _EXTRA: dict(extra or {}),
        **_state(chunks, optimizer, scheduler, _LAYOUT, loading=False),
    }
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return target, name, state


def _state(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any | None,
    scheduler: Any | None,
    layout: Mapping[str, Any],
    *,
    loading: bool,
) -> dict[str, Any]:
    metadata = {**layout, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        key: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for key, chunk in _named(chunks).items()
    }
    if optimizer is not None:
        _allocate(optimizer)
        with _corrected(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        if scheduler is not None:
            state["opt_param_scheduler"] = scheduler.state_dict()
    return state


def _named(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _refuse_other_optimizers(optimizer: Any, common: Mapping[str, Any], where: str) -> None:
    """With expert parallelism Megatron gives the experts an optimizer of their own; its state fits no other."""
    parts = len(getattr(optimizer, "chained_optimizers", [optimizer]))
    stored = sum(isinstance(key, int) for key in common.get("optimizer", {})) or 1
    if parts != stored:
        names = {1: "one optimizer", 2: "one optimizer for experts and one for the rest"}
        raise CheckpointError(
            f"it has the state of {names.get(stored, stored)}",
            where=where,
            expected=f"{names.get(parts, parts)}, as the run has",
            hint="keep --expert-model-parallel-size at 1 or above 1, as it was, or begin with the weights alone",
        )


def _with_torch_adam(optimizer: Any) -> list[Any]:
    """The parts whose optimizer is torch's Adam or AdamW, which keeps a step for each parameter. Megatron (0.16.1) is
    made for those of Apex and TransformerEngine, which keep one."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(getattr(part, "optimizer", None), torch.optim.Adam)]


def _allocate(optimizer: Any) -> None:
    """Make the state of step 0 where there is none, as Megatron asks for the step before the first one."""
    for part in _with_torch_adam(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _separate_steps(optimizer: Any) -> None:
    """Have each parameter count its own steps: Megatron gives all of them one tensor, which would count for each."""
    for part in _with_torch_adam(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


@contextmanager
def _corrected(optimizer: Any) -> Iterator[None]:
    """Within the block, two faults of Megatron's distributed optimizer (0.16.1) are mended.

    Saving, it cuts a parameter's state out of tensors without padding at the place that the parameter has in the padded
    buffer. Of a buffer with several buckets (tied embeddings have one of their own with pipeline parallelism), those
    behind the first are saved shifted; Megatron warns of it in its log. Loading, it asks the checkpoint for the step of
    torch's Adam, which is among the parameter groups."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    distributed = [part for part in parts if hasattr(part, "get_parameter_state_dp_zero")]
    stepping = [part for part in _with_torch_adam(optimizer) if part in distributed]
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


def _write_tracker(folder: Path, name: str) -> None:
    if dist.get_rank() == 0:
        (folder / TRACKER).write_text(name, encoding="utf-8")
    dist.barrier()
