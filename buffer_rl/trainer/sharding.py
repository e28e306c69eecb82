"""A trained model under FSDP2 (``torch.distributed.fsdp.fully_shard``): split over ranks, or in two number formats.

Split over ranks: transformers reads each rank's part of a folder and applies FSDP2 by the plan of the architecture. A
weight is whole only while its module computes. Each backward pass leaves on each rank the sum over all ranks of the
gradient of its part: a sum, as everything here is divided once, by the framework.

In bfloat16: the weights stay float32. Those of a module are cast while it computes, and gradients are cast back before
they are summed. A rank that has the whole model is one of one, and does not wait for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from buffer_rl.args import Args
from buffer_rl.errors import CheckpointError, raised_as

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PART = "shard-"
"""What the names of the files of ``save_parts`` begin with."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """size: number of ranks that one copy is split over. copies: number of copies. half: compute in bfloat16."""

    size: int
    copies: int
    half: bool = False

    @classmethod
    def of(cls, args: Args, world_size: int) -> Sharding | None:
        """As ``--fsdp-size`` and ``--bf16`` say; None if each rank has the whole model, all of what is trained in
        float32."""
        if args.fsdp_size == 1 and (not args.bf16 or args.lora_rank):  # a frozen base needs no float32 weights
            return None
        size = world_size if args.fsdp_size == -1 else args.fsdp_size
        return cls(size, world_size // size, args.bf16)

    @property
    def splits(self) -> bool:
        """Whether a rank has a part of the model, and so waits for others in each pass."""
        return self.size > 1

    def loading(self) -> dict[str, Any]:
        """What ``from_pretrained`` is called with, in addition."""
        if not self.splits:  # transformers makes no FSDP module there: see ``apply``
            return {}
        from transformers.distributed.configuration_utils import DistributedConfig

        config = DistributedConfig(fsdp_size=self.size, dp_replicate_size=self.copies, fsdp_mixed_precision=self.half)
        return {"distributed_config": config}

    def apply(self, module: PreTrainedModel) -> None:
        """Have a model that was loaded so, and tried out, compute with its parts and sum gradients."""
        if not self.splits:
            self._apply_to_whole(module)
        for part in fsdp_modules(module):
            part.set_gradient_divide_factor(1.0)  # the default is the number of ranks
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor of its own

    def _apply_to_whole(self, module: PreTrainedModel) -> None:
        """Each rank is a mesh of its own. All ranks call it."""
        import torch.distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        kind = next(module.parameters()).device.type
        dist: Any = torch.distributed
        if not dist.is_initialized():
            dist.init_process_group("gloo" if kind == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(kind, (self.copies, 1), mesh_dim_names=("copies", "own"))["own"]
        policy = MixedPrecisionPolicy()
        if self.half:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*layers_of(module), module):
            fully_shard(part, mesh=mesh, mp_policy=policy)


def layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The decoder layers: what is in a list of modules that is in no other one."""
    for part in module.children():
        if isinstance(part, torch.nn.ModuleList):
            yield from part
        else:
            yield from layers_of(part)


def gather_tied_once(module: PreTrainedModel) -> None:
    """Have tied embeddings gathered for the input and the output layer at once; before the first pass.

    transformers 5.23 has them gathered by two groups, of the embeddings and of the root. If parts are padded, each has
    a padded copy of its own, and the optimizer changes one of them."""
    embeddings, head = (cast("Any", get()) for get in (module.get_input_embeddings, module.get_output_embeddings))
    if head is None or head.weight is not embeddings.weight:
        return
    lists = [part._get_fsdp_state()._fsdp_param_groups for part in fsdp_modules(module)]
    groups = [(each, group) for each in lists for group in each]
    owners = {id(param._module_info.module): (*at, param) for at in groups for param in at[1].fsdp_params}
    if not {id(embeddings), id(head)} <= owners.keys():
        return
    *_, kept = owners[id(embeddings)]
    of_state, group, extra = owners[id(head)]
    kept._module_info.shared_modules.append(head)
    kept._module_info.shared_param_names.append("weight")
    group.fsdp_params.remove(extra)
    if not group.fsdp_params:
        of_state.remove(group)


def fsdp_modules(module: torch.nn.Module) -> Iterator[Any]:
    """The modules whose weights are gathered together; found without an import of FSDP, which takes a second."""
    return (part for part in module.modules() if hasattr(part, "set_requires_gradient_sync"))


def reshard(module: torch.nn.Module) -> None:
    """After a pass without gradient, in which modules stay whole: until this, ``named_parameters`` are copies."""
    for part in fsdp_modules(module):
        part.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, which shares memory with the whole; of a tensor that is not split itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. All ranks call this for the same tensors in the same order."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _checkpoint() -> Any:
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def save_parts(tensors: Mapping[str, torch.Tensor], folder: Path, group: Any = None) -> None:
    """Write a safetensors file a rank. All ranks call it, and meet in the process group, if not in the default one."""
    dcp = _checkpoint()
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def load_parts(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read what any number of ranks wrote in place. All ranks call it. Raises CheckpointError if something is missing,
    damaged or of another shape."""
    dcp = _checkpoint()
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with raised_as(CheckpointError, "not readable", Exception, where=str(folder)):  # fault boundary: damaged files
        saved = reader.read_metadata().state_dict_metadata
    require_shapes(tensors, {name: tuple(entry.size) for name, entry in saved.items()}, folder)
    dcp.load(dict(tensors), storage_reader=reader)


def require_shapes(tensors: Mapping[str, torch.Tensor], found: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Raises CheckpointError unless the shapes that were found are those of ``tensors``."""
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        name = differing[0]
        what = f"{len(differing)} weights do not fit, such as {name}: {found.get(name, 'absent')}"
        hint = "the checkpoint was made by another --hf-checkpoint"
        raise CheckpointError(what, where=str(where), expected=f"{wanted.get(name, 'absent')}", hint=hint)
