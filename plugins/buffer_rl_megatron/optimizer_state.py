"""The state of Megatron's optimizers in checkpoints.

Torch's Adam keeps a step for each parameter. Those of Apex and TransformerEngine, for which Megatron (0.16.1) is made,
keep one for each parameter group.

``_corrected`` and what is below it mend faults of Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from buffer_rl.errors import CheckpointError


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
        raise CheckpointError(
            f"it has the state of {names.get(stored, stored)}, in the format {kind}",
            where=where,
            expected=f"{names.get(len(parts), len(parts))}, as the run has, or the format fully_reshardable",
            hint="keep --expert-model-parallel-size at 1 or above 1, as it was, or begin with the weights alone",
        )
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
