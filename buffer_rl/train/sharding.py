"""One copy of a model split over several ranks, by FSDP2 (``torch.distributed.fsdp.fully_shard``).

transformers reads each rank's part of a folder and applies FSDP2 by the plan of the architecture. A weight is whole
only while its module computes. Each backward pass leaves on each rank the sum over all ranks of the gradient of its
part: a sum, as everything here is divided once, by the framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from buffer_rl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from buffer_rl.args import Args

PART = "shard-"
"""What the names of the files of ``save_parts`` begin with."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """size: number of ranks that one copy is split over. copies: number of copies; their gradients are summed too."""

    size: int
    copies: int

    @classmethod
    def of(cls, args: Args, world_size: int) -> Sharding | None:
        """As ``--fsdp-size`` says; None if each rank has the whole model."""
        if args.fsdp_size == 1:
            return None
        size = world_size if args.fsdp_size == -1 else args.fsdp_size
        return cls(size, world_size // size)

    def loading(self) -> dict[str, Any]:
        """What ``from_pretrained`` is called with, in addition."""
        if self.size * self.copies == 1:  # transformers makes no FSDP module there: see ``apply``
            return {}
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(fsdp_size=self.size, dp_replicate_size=self.copies)}

    def apply(self, module: PreTrainedModel) -> None:
        """Have a model that was loaded so compute with its parts, and sum gradients. Raises ConfigError for tied
        embeddings that cannot be split into equal parts."""
        embeddings: Any = module.get_input_embeddings()
        vocabulary = embeddings.weight.shape[0]
        if self.size * self.copies == 1:
            _shard_on_one_rank(module)
        elif vocabulary % self.size and getattr(module, "all_tied_weights_keys", None):
            # transformers 5.23 gathers a tied output layer by itself, from a copy if parts are padded, which stays as
            # it is when the optimizer changes the embeddings.
            raise ConfigError(
                f"{vocabulary} tied embeddings are no multiple of {self.size} ranks",
                where="--fsdp-size",
                expected=f"a divisor of {vocabulary}",
            )
        for part in fsdp_modules(module):
            part.set_gradient_divide_factor(1.0)  # the default is the number of ranks
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor of its own


def _shard_on_one_rank(module: PreTrainedModel) -> None:
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(module.parameters()).device.type
    dist: Any = torch.distributed
    if not dist.is_initialized():
        dist.init_process_group("gloo" if kind == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(kind, (1,))
    for layers in [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


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


def save_parts(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a safetensors file a rank. All ranks call it."""
    dcp = _checkpoint()
    dcp.save(dict(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_parts(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read what any number of ranks wrote in place. All ranks call it. Raises CheckpointError if something is missing,
    damaged or of another shape."""
    dcp = _checkpoint()
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # fault boundary: damaged files
        raise CheckpointError(f"not readable: {error}", where=str(folder)) from error
    require_shapes(tensors, {name: tuple(entry.size) for name, entry in saved.items()}, folder)
    dcp.load(dict(tensors), storage_reader=reader)


def require_shapes(tensors: Mapping[str, torch.Tensor], found: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Raises CheckpointError unless the shapes that were found are those of ``tensors``."""
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        name = differing[0]
        raise CheckpointError(
            f"{len(differing)} weights do not fit, such as {name}: {found.get(name, 'absent')}",
            where=str(where),
            expected=f"{wanted.get(name, 'absent')}",
            hint="the checkpoint was made by another --hf-checkpoint",
        )
