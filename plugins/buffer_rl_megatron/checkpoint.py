"""Weights and optimizer state as a distributed checkpoint of Megatron's (``torch_dist``), for any later layout.

The folder is laid out as Megatron-LM and slime do: ``iter_0000010/`` (or ``release/``: weights alone) beside a file
with the iteration's name. Making the folder durable and visible at once is the caller's part: ``write_checkpoint``
seals it under a manifest. Nothing but tensors and plain values is read, whatever pickles the folder has.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from multiprocessing.managers import SyncManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.serialization import load_content_metadata
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata, MCoreSavePlan
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import _get_layout

from buffer_rl.cluster.fork_server import die_with_parent
from buffer_rl.errors import CheckpointError, raised_as
from buffer_rl_megatron.bridge import gather_parameters
from buffer_rl_megatron.compat import current_device
from buffer_rl_megatron.optimizer import check_stored, restore, sharded_state
from buffer_rl_megatron.options import TRACKER

RELEASE = "release"
_LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,  # a rank of each group of replicas gathers, not all of them
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What the checkpoint says of itself, by Megatron's names: the optimizer's state is that of whole parameters."""
_VERSION = 3.0  # of Megatron-LM's state
_PLAIN_ALONE, _ANYTHING = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_INDEX_MODULES = {
    *("torch", "torch.serialization", "megatron.core.dist_checkpointing.strategies.torch"),
    *(f"torch.distributed.checkpoint.{name}" for name in ("filesystem", "metadata", "planner")),
}
_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


def save(chunks: Sequence[torch.nn.Module], optimizer: Any | None, folder: str, *, step: int) -> None:
    """Write ``folder/iter_NNNNNNN``; without an optimizer ``folder/release``, the weights alone. Every rank calls it.

    chunks: the model's, wrapped or not. optimizer: Megatron's. step: optimizer steps so far. Raises CheckpointError if
    it cannot be written.
    """
    _start(chunks, optimizer, folder, step)(True)


def start_save(
    chunks: Sequence[torch.nn.Module], optimizer: Any | None, folder: str, *, step: int
) -> Callable[[], bool]:
    """``save``, from a copy of the state, beside training.

    The result, which every rank calls between its passes, says whether the checkpoint is whole. It raises
    CheckpointError if it cannot be written."""
    return partial(_start(chunks, optimizer, folder, step), False)


def _start(chunks: Sequence[torch.nn.Module], optimizer: Any | None, folder: str, step: int) -> Callable[[bool], bool]:
    """Have processes that are forked from the ranks write. The result says whether the checkpoint is whole; if its
    argument is true, it waits for that."""
    name = RELEASE if optimizer is None else str(step)
    target = Path(folder, RELEASE if optimizer is None else iteration_name(step))
    queue = AsyncCallsQueue()
    gather_parameters(chunks)
    with _writing(target):
        layout = _layout_of(chunks, optimizer)
        state = _state(chunks, optimizer, layout, loading=False)
        if dist.get_rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        _start_collector()
        request = dist_checkpointing.save(
            {"checkpoint_version": _VERSION, "iteration": step, **state},
            str(target),
            async_sharded_save=True,
            content_metadata=layout,
        )
        queue.schedule_async_request(_bound_to_this_rank(request))

    def is_whole(wait: bool) -> bool:
        with _writing(target):
            if not queue.maybe_finalize_async_calls(blocking=wait):
                return False
            _write_tracker(target.parent, name)
        return True

    return is_whole


def _layout_of(chunks: Sequence[torch.nn.Module], optimizer: Any | None) -> dict[str, Any]:
    """Megatron writes a parameter of all layers as one tensor, which must be whole. Of a frozen parameter there is no
    optimizer state: if any layer has one, each layer has tensors of its own."""
    if optimizer is None:
        return dict(_LAYOUT)
    own = [parameter for chunk in chunks for parameter in unwrap_model(chunk).decoder.layers.parameters()]
    frozen = not all(parameter.requires_grad for parameter in own)
    found = torch.tensor(int(frozen), device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {**_LAYOUT, "non_homogeneous_layers": True} if found else dict(_LAYOUT)


def _bound_to_this_rank(request: Any) -> Any:
    """The request with a copy of the state that is kept until it is done (the host's memory that a device copies to is
    shared with the writer, and would be used again), and with writers that end with this rank."""
    if request.async_fn is None:  # this rank has nothing to write
        return request
    rank, _, results = request.async_fn_args
    return request._replace(
        async_fn=partial(_write, os.getpid(), request.async_fn),
        async_fn_args=(rank, request.preload_fn(), results),
        preload_fn=None,
    )


def _write(rank_pid: int, write: Callable[..., None], *args: Any) -> None:
    """In the process that is forked from a rank. A killed rank would else leave it and its children behind, and with
    them memory of the device."""
    die_with_parent(rank_pid)
    os.register_at_fork(after_in_child=partial(die_with_parent, os.getpid()))
    write(*args)


def _start_collector() -> None:
    """The process that collects what writers report. Megatron's own would outlive a killed rank."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(die_with_parent, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()


def _writing(target: Path) -> AbstractContextManager[None]:
    caught = (Exception, CheckpointException)  # fault boundary; writers report whatever they met
    return raised_as(CheckpointError, "the checkpoint cannot be written", caught, where=str(target))


def load(chunks: Sequence[torch.nn.Module], optimizer: Any | None, folder: str) -> int:
    """Fill model and optimizer from the newest checkpoint in ``folder``, whatever layout wrote it, and return the
    optimizer steps before it. Every rank calls it. Where the checkpoint has weights alone, or ``optimizer`` is None, so
    does this.

    Raises CheckpointError if something is missing or damaged, or belongs to another model.
    """
    source = newest(folder)
    try:
        with _plain_values_alone():
            return _load(chunks, optimizer, source)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # fault boundary; torch's CheckpointException is no Exception
        where, hint = str(source), "the model must be the one that was saved; --hf-checkpoint names it"
        raise CheckpointError(f"it does not load: {type(error).__name__}: {error}", where=where, hint=hint) from error


def _load(chunks: Sequence[torch.nn.Module], optimizer: Any | None, source: Path) -> int:
    common = dist_checkpointing.load_common_state_dict(str(source))
    layout = load_content_metadata(preloaded_state_dict=common) or dict(_LAYOUT)
    stored = dist_checkpointing.load_tensors_metadata(str(source))
    has_optimizer = optimizer is not None and any(_OF_OPTIMIZER.match(key) for key in stored)
    if has_optimizer:
        check_stored(optimizer, common, layout, stored, str(source))
    state = _state(chunks, optimizer if has_optimizer else None, layout, loading=True)
    found = dist_checkpointing.load(state, str(source))
    for key, chunk in _named(chunks).items():
        unwrap_model(chunk).load_state_dict(found[key])
    if has_optimizer:
        restore(optimizer, found["optimizer"])
    elif optimizer is not None:
        optimizer.reload_model_params()
    return int(common.get("iteration", 0))


@contextmanager
def _plain_values_alone() -> Iterator[None]:
    """Within the block nothing but tensors, plain values and torch's own records of them are read from a checkpoint:
    Megatron and torch would run what any pickle in it says."""
    before = {name: os.environ.pop(name) for name in (_PLAIN_ALONE, _ANYTHING) if name in os.environ}
    os.environ[_PLAIN_ALONE] = "1"
    cast(Any, filesystem).pickle = SimpleNamespace(load=lambda file: _Index(file).load())
    try:
        yield
    finally:
        cast(Any, filesystem).pickle = pickle
        del os.environ[_PLAIN_ALONE]
        os.environ.update(before)


class _Index(pickle.Unpickler):
    """Reads ``.metadata``, which says where the tensors are. Raises UnpicklingError for what is no part of it."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _INDEX_MODULES and "." not in name:
            found = super().find_class(module, name)
            is_record = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            if (is_record and found.__module__ == module) or found in (
                torch.Size,
                _get_layout,
                MCoreMetadata,
                MCoreSavePlan,
            ):
                return found
            if isinstance(found, torch.dtype):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's index")


def newest(folder: str) -> Path:
    """The checkpoint that the folder's tracker names, or the folder itself if it is one. Raises CheckpointError."""
    path = Path(folder)
    if (path / "metadata.json").is_file():
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        within = sorted(path.glob(f"trainer/{TRACKER}")) or sorted(path.glob(f"step_*/trainer/{TRACKER}"))
        hint = f"--load {within[-1].parent}" if within else ""
        what = "this is no torch_dist checkpoint"
        raise CheckpointError(what, where=str(path), expected=f"{TRACKER} in it", hint=hint)
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


def _state(
    chunks: Sequence[torch.nn.Module], optimizer: Any | None, layout: Mapping[str, Any], *, loading: bool
) -> dict[str, Any]:
    metadata = {**layout, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        key: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for key, chunk in _named(chunks).items()
    }
    if optimizer is not None:
        state["optimizer"] = sharded_state(optimizer, state, metadata, loading=loading)
    if loading:
        for model in (state[key] for key in _named(chunks)):
            # TransformerEngine's, for 8-bit floats: pickled, and not there where other layers were saved.
            model.update({key: LocalNonpersistentObject(None) for key in model if "_extra_state" in key})
    return state


def _named(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _write_tracker(folder: Path, name: str) -> None:
    if dist.get_rank() == 0:
        (folder / TRACKER).write_text(name, encoding="utf-8")
    dist.barrier()
