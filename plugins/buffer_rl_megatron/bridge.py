"""Hugging Face folders to Megatron models and back, in shards: names and layouts are mbridge's, transfers are here.

``load_bridge`` is called once ``parallel_state`` has its groups. Each rank reads the tensors of its own shard; an
export gathers one parameter at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.trainer.model import weight_buckets
from buffer_rl.trainer.pretrained import checked_folder
from buffer_rl_megatron.compat import current_device
from buffer_rl_megatron.layers import ValueHead, mask_padded_vocabulary
from buffer_rl_megatron.models import mapping_for, read_config, set_rotary_frequencies, shared_name


def load_bridge(
    hf_folder: str,
    *,
    sequence_parallel: bool,
    transformer_impl: str,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    core_attention: Any | None = None,
    make_vocab_size_divisible_by: int = 1,
    trust_remote_code: bool = False,
    model_class: str | None = None,
) -> Bridge:
    """The bridge of the architecture in ``hf_folder/config.json``, for the groups of ``parallel_state``.

    transformer_impl: as the option. dtype: of the parameters. overrides:
    fields of Megatron's ``TransformerConfig``, which go before what the bridge sets. core_attention: a module class in
    place of the local attention. make_vocab_size_divisible_by: the vocabulary is padded to a multiple of it times the
    tensor parallel size. model_class: reference of a subclass of mbridge's ``LLMBridge``, in place of the one that is
    known for the architecture.

    Raises ConfigError if the folder is no model's, or its architecture is unknown here or cannot be split that way.
    """
    hf_config = read_config(hf_folder, trust_remote_code=trust_remote_code)
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    mapping = mapping_for(
        hf_config,
        dtype=dtype,
        transformer_impl=transformer_impl,
        core_attention=core_attention,
        overrides={"sequence_parallel": sequence_parallel and tensor_parallel_size > 1, **(overrides or {})},
        vocab_multiple=make_vocab_size_divisible_by * tensor_parallel_size,
        model_class=model_class,
    )
    return Bridge(mapping, hf_config)


Provider = Callable[[bool, bool, int | None, Any, Callable[[], Any]], Any]
"""``(pre_process, post_process, vp_stage, config, build) -> GPTModel``: makes a chunk. ``build()`` makes the one of a
bridge without a provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """A parameter on one pipeline stage, under its name in the whole model; experts under that on expert rank 0."""

    stage: int
    chunk: int
    local_name: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split_dim: int | None
    """The dimension that tensor ranks divide; None where each has all of it."""


class Bridge:
    """Builds, fills and exports the models of one architecture. ``config`` is Megatron's ``TransformerConfig``."""

    def __init__(self, mapping: Any, hf_config: Any) -> None:
        self._mapping = mapping
        self.hf_config = hf_config
        self.config = mapping.config
        self.vocab_size: int = hf_config.vocab_size
        multiple = mapping.make_vocab_size_divisible_by
        self.padded_vocab_size: int = -(-self.vocab_size // multiple) * multiple
        mapping.vocab_size, mapping.padded_vocab_size = self.vocab_size, self.padded_vocab_size

    def build(
        self, *, value_head: bool = False, device: torch.device | None = None, provider: Provider | None = None
    ) -> list[torch.nn.Module]:
        """This rank's model with random weights, a chunk for each virtual pipeline stage, without data parallelism.

        value_head: the output layer is a ``ValueHead``, and the embeddings are tied to nothing. device: where the model
        goes; CUDA's current one where there is one. Chunks of a half precision compute in it and return float32.
        provider: makes each chunk, and may use what is made without it.
        """
        device = current_device() if device is None else device
        stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        chunks: list[torch.nn.Module] = []
        for vp_stage in range(stages) if stages else (None,):
            model = self._chunk(vp_stage, provider, value_head=value_head).to(device)
            for parameter in model.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            half = self.config.params_dtype in (torch.bfloat16, torch.float16)
            chunks.append(Float16Module(self.config, model) if half else model)
        return chunks

    def _chunk(self, vp_stage: int | None, provider: Provider | None, *, value_head: bool) -> Any:
        place = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        first, last = parallel_state.is_pipeline_first_stage(**place), parallel_state.is_pipeline_last_stage(**place)

        def own() -> Any:
            return GPTModel(
                config=self.config,
                transformer_layer_spec=self._mapping._get_transformer_layer_spec(vp_stage),
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=self._tied and not value_head,
                vp_stage=vp_stage,
                **{**self._mapping._get_gptmodel_args(), "vocab_size": self.padded_vocab_size},
            )

        model = own() if provider is None else provider(first, last, vp_stage, self.config, own)
        model.vp_stage = vp_stage
        set_rotary_frequencies(model, self.hf_config)
        if value_head:
            model.share_embeddings_and_output_weights = False  # on every stage, where a provider tied them
        if last and value_head:
            model.output_layer = ValueHead(self.config)
        elif last:
            rank, size = parallel_state.get_tensor_model_parallel_rank(), self._mapping.mpu.tp_size
            rows = self.padded_vocab_size // size
            if padded := min(rows, max(0, (rank + 1) * rows - self.vocab_size)):
                mask_padded_vocabulary(model.output_layer, padded)
        return model

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.hf_config, "tie_word_embeddings", False))

    @torch.no_grad()
    def load(self, chunks: Iterable[torch.nn.Module], hf_folder: str) -> None:
        """Fill all parameters of the chunks from the folder, but a ``ValueHead``. Every rank calls it.

        Raises ConfigError, on every rank if on one, if the folder lacks a tensor, has one that no parameter takes, or
        one of another shape.
        """
        used: set[str] = set()
        error: str | None = None
        try:
            with _Folder(hf_folder) as folder:
                for chunk in chunks:
                    used |= self._fill(unwrap_model(chunk), folder)
                unused = folder.names() - used
        except ConfigError as refused:
            error, unused = str(refused.what), set()
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (error, unused))
        for rank, (found, _) in enumerate(reports):
            if found is not None:
                raise ConfigError(f"rank {rank} cannot load it: {found}", where=str(hf_folder))
        left: set[str] = set.intersection(*(names for _, names in reports))
        if self._tied:
            left.discard("lm_head.weight")
        if left:
            what = f"{len(left)} of its tensors have no place in the model, such as {min(left)}"
            raise ConfigError(what, where=str(hf_folder))

    def _fill(self, model: Any, folder: _Folder) -> set[str]:
        used: set[str] = set()
        names = self._whole_names(model)
        for local_name, target in _tensors(model).items():
            if local_name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
                used.add("lm_head.weight")
                continue
            name = names[local_name]
            hf_names = self._hf_names(name)
            whole = self._mapping._weight_to_mcore_format(name, [folder.tensor(each) for each in hf_names])
            rank, size = self._tensor_place(name)
            shard = self._mapping._weight_split_across_tp(name, whole, target, size)[rank]
            if shard.shape != target.shape:
                what = f"{hf_names[0]} gives {name} the shape {tuple(shard.shape)}, not {tuple(target.shape)}"
                raise ConfigError(what)
            target.copy_(shard)
            used.update(hf_names)
        return used

    def _hf_names(self, name: str) -> list[str]:
        try:
            return list(self._mapping._weight_name_mapping_mcore_to_hf(name))
        except (NotImplementedError, IndexError) as error:  # which is how mbridge says it
            raise ConfigError(
                f"no tensor of it belongs to the parameter {name}: name one in the mapping of the architecture, as "
                "plugins/buffer_rl_megatron_glm4/README.md says"
            ) from error

    @torch.no_grad()
    def export(self, chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights under the names of the Hugging Face folder, tied weights once, on every rank.

        Collective: every rank iterates to the end. One parameter at a time is gathered; a tensor may be the model's
        own, and is read before the next optimizer step. A ``ValueHead`` is left out.
        """
        chunks = list(chunks)
        gather_parameters(chunks)
        models = [unwrap_model(chunk) for chunk in chunks]
        own = [shard for index, model in enumerate(models) for shard in self._shards(index, model)]
        tensors = [_tensors(model) for model in models]
        stages: list[Any] = [None] * self._mapping.mpu.pp_size
        dist.all_gather_object(stages, own, group=self._mapping.mpu.pp_group)
        done: set[str] = set()
        for shard in (shard for stage in stages for shard in stage):
            hf_names = self._mapping._weight_name_mapping_mcore_to_hf(shard.name)
            if done.issuperset(hf_names):  # the last stage's copy of the tied embeddings
                continue
            mine = tensors[shard.chunk][shard.local_name] if shard.stage == self._mapping.mpu.pp_rank else None
            for name, whole in self._gathered(shard, mine):
                pairs = zip(*self._mapping._weight_to_hf_format(name, whole), strict=True)
                for hf_name, tensor in pairs:
                    done.add(hf_name)
                    yield hf_name, tensor

    def _gathered(self, shard: _Shard, mine: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameter in Megatron's layout, from all tensor ranks of the stage that has it; each expert's."""
        mpu = self._mapping.mpu
        piece = torch.empty(shard.shape, dtype=shard.dtype, device=current_device()) if mine is None else mine.detach()
        if mpu.pp_size > 1:
            piece = piece.contiguous()
            dist.broadcast(piece, dist.get_global_rank(mpu.pp_group, shard.stage), group=mpu.pp_group)
        pieces = {shard.name: piece}
        if _is_expert(shard.name) and mpu.ep_size > 1:
            everyone = _all_gather(piece, mpu.ep_size, mpu.ep_group)
            prefix, _, first = shard.name.rpartition("weight")
            step = self.config.num_moe_experts // mpu.ep_size
            pieces = {f"{prefix}weight{int(first) + rank * step}": each for rank, each in enumerate(everyone)}
        group, size = (mpu.etp_group, mpu.etp_size) if _is_expert(shard.name) else (mpu.tp_group, mpu.tp_size)
        for name, each in pieces.items():
            if shard.split_dim is None or size == 1:
                yield name, each
                continue
            shards = _all_gather(each, size, group)
            each = each.view(each.shape)  # a tensor of its own, as mbridge reads attributes
            each.tensor_model_parallel, each.partition_dim = True, shard.split_dim  # type: ignore[attr-defined]
            yield name, self._mapping._weight_merge_across_tp(name, shards, each)

    def _shards(self, index: int, model: Any) -> Iterator[_Shard]:
        names = self._whole_names(model, expert_rank=0)
        for local_name, tensor in _tensors(model).items():
            if local_name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
                continue
            split = bool(getattr(tensor, "tensor_model_parallel", False)) or _is_expert(names[local_name])
            yield _Shard(
                stage=self._mapping.mpu.pp_rank,
                chunk=index,
                local_name=local_name,
                name=names[local_name],
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                split_dim=getattr(tensor, "partition_dim", 0) if split else None,
            )

    def _whole_names(self, model: Any, expert_rank: int | None = None) -> dict[str, str]:
        """Each parameter's name in the whole model, as mbridge knows it, by its name in this chunk.

        expert_rank: whose experts they are; this rank's where it is absent."""
        mpu = self._mapping.mpu
        first = 0
        if self.config.num_moe_experts:
            rank = mpu.ep_rank if expert_rank is None else expert_rank
            first = rank * (self.config.num_moe_experts // mpu.ep_size)
        layers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(model.decoder.layers)}
        own = _tensors(model)
        return {name: shared_name(name, own, layers, first) for name in own}

    def _tensor_place(self, name: str) -> tuple[int, int]:
        mpu = self._mapping.mpu
        return (mpu.etp_rank, mpu.etp_size) if _is_expert(name) else (mpu.tp_rank, mpu.tp_size)


def gather_parameters(chunks: Iterable[torch.nn.Module]) -> None:
    """Gather the parameters that the distributed optimizer would gather during the next forward pass: until then each
    replica has its own part of the newest weights, and the others' of the step before. Collective."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


class _Folder:
    """The tensors of a folder's safetensors files by name, one in memory at a time. Raises ConfigError."""

    def __init__(self, path: str) -> None:
        self._path = checked_folder(path, "Hugging Face folder")
        self._stack = ExitStack()
        self._readers: dict[str, Callable[[str], torch.Tensor]] = {}

    def __enter__(self) -> _Folder:
        files = sorted(Path(self._path).glob("*.safetensors"))
        if not files:
            raise ConfigError(f"there are no safetensors files in {self._path}")
        for file in files:
            with raised_as(ConfigError, f"{file.name} is no readable safetensors file", (SafetensorError, OSError)):
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
            self._readers |= dict.fromkeys(opened.keys(), opened.get_tensor)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._readers)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._readers:
            raise ConfigError(f"it lacks {name}")
        return self._readers[name](name)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that belong to the weights, by name."""
    state = {name: tensor for name, tensor in model.state_dict().items() if "_extra_state" not in name}
    return {**state, **dict(model.named_parameters())}


def _is_expert(name: str) -> bool:
    return ".mlp.experts.linear_fc" in name


def _all_gather(tensor: torch.Tensor, size: int, group: Any) -> list[torch.Tensor]:
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


SHARD_BYTES = 5 * 1024**3
"""Largest file, as ``save_pretrained`` of transformers makes them; a larger tensor has a file of its own."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def write_folder(
    weights: Iterable[tuple[str, torch.Tensor]],
    origin: str,
    target: str,
    *,
    writes: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights into the folder ``target``, with configuration and tokenizer of the folder ``origin``.

    At most ``shard_bytes`` of the weights are in host memory at a time, and one tensor on the device. writes: whether
    this rank does; the others iterate over the weights, as those that gather them need all ranks.
    """
    if not writes:
        for _ in weights:
            pass
        return
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(origin).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    files: list[tuple[Path, list[str]]] = []
    total = 0
    on_host = ((name, tensor.to("cpu", copy=True)) for name, tensor in weights)
    for tensors in weight_buckets(on_host, shard_bytes, copy=False):
        part = folder / f"part-{len(files)}"  # how many there will be is not known yet
        save_file(tensors, part, metadata={"format": "pt"})
        files.append((part, list(tensors)))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    places: dict[str, str] = {}
    for number, (part, names) in enumerate(files, 1):
        several = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = several if len(files) > 1 else "model.safetensors"
        part.rename(folder / name)
        places |= dict.fromkeys(names, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
