"""A model of the torch trainer: its module, and its weights as those of a Hugging Face folder."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, PluginError, short_repr
from buffer_rl.kinds.trainer import ModelConverter
from buffer_rl.options.section import required
from buffer_rl.plugin.calls import call, construct, contained, place, raised, returned
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.trainer.host_memory import HostMemory, wait_for_copies
from buffer_rl.trainer.lora import PART, base_state, layers_with_adapter, merged, write_adapter
from buffer_rl.trainer.output_layer import fuse_where_possible
from buffer_rl.trainer.packing import pack_where_possible
from buffer_rl.trainer.pretrained import checked_folder, load_model
from buffer_rl.trainer.sharding import Sharding, fsdp_modules, layers_of, whole

BUCKET_BYTES = 256 * 1024 * 1024
"""Largest bucket of ``weight_buckets``: large enough to amortise a transfer, small beside an engine's memory."""
FILE_BYTES = 4 * 1024**3
"""Largest file of a folder that is written from parts."""
CONFIG_FILES = ("config.json", "generation_config.json")


class Model:
    """A module, and what its layout hides: its weights and its state, each once, wherever they are.

    module: what computes. converter: exports its weights, and ``converter_name`` is how it was named. folder: whose
    configuration ``save_hf`` copies, if transformers cannot write that of the module.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        converter: ModelConverter | None = None,
        converter_name: str | None = None,
        folder: str | None = None,
    ) -> None:
        self.module = module
        self._on_host = HostMemory()
        self._converter, self._converter_name, self._folder = converter, converter_name, folder

    def move(self, device: torch.device) -> None:
        """Move the weights to a device."""
        if device.type != "cpu":
            torch.nn.Module.to(self.module, device, non_blocking=True)
        else:
            places = itertools.count()
            module: Any = self.module
            module._apply(lambda tensor: self._on_host.copy_of(next(places), tensor))
        wait_for_copies()

    def recompute_layers(self) -> None:
        """From now on, keep no activations of the decoder layers, but compute them again in the backward pass. Raises
        ConfigError if no layers are found."""
        layers = list(layers_of(self.module))
        if not layers:
            what = f"{type(self.module).__name__} has no torch.nn.ModuleList of layers"
            raise ConfigError(what, where="--recompute-granularity", hint="leave it out")
        for layer in layers:  # transformers' own way does so only in train(), in which dropout would come back
            layer.forward = partial(_recomputed, layer.forward)

    def add_value_head(self) -> None:
        """Make the output layer one with a single output, in place: the value of the tokens so far. It starts with
        zeros, so values are 0 at first, on every rank, and is not tied to the embeddings. Raises ConfigError for an
        output layer that is not linear."""
        head: Any = self.module.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, torch.nn.Linear):
            what = f"the output layer of {type(self.module).__name__} is a {type(head).__name__}"
            raise ConfigError(what, where="--use-critic", expected="torch.nn.Linear, which becomes that of values")
        # The module stays, as the model calls it; a new one would have to be placed by each architecture.
        head.weight = torch.nn.Parameter(torch.zeros_like(head.weight[:1]))
        head.register_parameter("bias", None)
        head.out_features = 1

    def state(self) -> dict[str, torch.Tensor]:
        """What may be trained, under the module's own names, each once: the memory that a checkpoint has and is read
        into. Of a model with adapters, these alone."""
        state = unique_state(self.module)
        return {name: tensor for name, tensor in state.items() if PART in name} if self.has_adapters else state

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and no other weights."""
        return hasattr(self.module, "peft_config")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names of a Hugging Face folder, without gradient, each name once and tied weights once,
        under the name that is kept there.

        They share memory with the model where no conversion is needed. A converter is asked for one tensor at a time;
        the conversions of transformers (fused experts) are made for the whole model at once. Adapters are merged, one
        weight at a time. Raises PluginError for any fault of a converter.
        """
        if self._converter is None:
            state = base_state(unique_state(self.module))
            layers = layers_with_adapter(self.module) if self.has_adapters else {}
            is_known = isinstance(self.module, PreTrainedModel)
            for name, tensor in (revert_weight_conversion(self.module, state) if is_known else state).items():
                yield name, merged(layers[name], whole(tensor)) if name in layers else whole(tensor)
            return
        where = place("converter", self._converter_name, "export")
        names: set[str] = set()
        for name, tensor in checked_pairs(self._converter.export(self.module), where=where):
            if name in names:
                raise PluginError(f"it yielded {name} twice", where=where, expected="each name of the folder once")
            names.add(name)
            yield name, tensor.detach()

    def own_weights(self) -> dict[str, torch.Tensor] | None:
        """The model's memory, by the names in a Hugging Face folder, tied weights under each of theirs: what is copied
        there is loaded. None where a folder has weights in another form than the model."""
        own = {name: tensor.detach() for name, tensor in self.module.state_dict().items()}
        same = (name in own and own[name].data_ptr() == tensor.data_ptr() for name, tensor in self.weights())
        return own if self._converter is None and all(same) else None

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, path: str, *, writes: bool = True) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load, adapters merged and by themselves in
        ``adapter``. Of a model split over ranks, all of them call this and one ``writes``, a file at a time, so that
        none ever has the whole model."""
        if any(fsdp_modules(self.module)) or self.has_adapters:
            self._write_files(Path(path), writes)
        elif self._converter is None and isinstance(self.module, PreTrainedModel):
            self.module.save_pretrained(path)
        else:
            self._write(Path(path))
        if writes:
            tokenizer.save_pretrained(path)
            if self.has_adapters:  # in peft's format
                write_adapter(self.module, Path(path) / "adapter")

    def _write_files(self, target: Path, writes: bool) -> None:
        places: dict[str, str] = {}
        for number, bucket in enumerate(weight_buckets(self.weights(), FILE_BYTES, copy=False), 1):
            if writes:
                target.mkdir(parents=True, exist_ok=True)
                file = f"model-{number:05}.safetensors"
                save_file({name: tensor.cpu() for name, tensor in bucket.items()}, target / file, {"format": "pt"})
                places |= dict.fromkeys(bucket, file)
        if writes:
            if len(files := set(places.values())) == 1:
                (target / files.pop()).rename(target / "model.safetensors")
            else:
                (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
            config = copy(self.module.config)
            vars(config).pop("distributed_config", None)  # of the ranks of this run
            config.architectures = [type(self.module).__name__.removeprefix("FSDP")]
            config.save_pretrained(target)
            if self.module.generation_config is not None:
                self.module.generation_config.save_pretrained(target)

    def _write(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in CONFIG_FILES:  # the architecture is that of the folder that the run started from
            source = Path(required(self._folder, "hf_checkpoint")) / name
            if source.is_file():
                shutil.copyfile(source, target / name)
        # Cloned, as save_torch_state_dict refuses tensors that are rows of a larger one.
        contiguous = torch.contiguous_format
        save_torch_state_dict({name: t.cpu().clone(memory_format=contiguous) for name, t in self.weights()}, target)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def unique_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights under the model's own names, each once. Weights are the same if they are one tensor, wherever its
    storage is."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict(keep_vars=True)
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name in sorted(state, key=lambda n: n in tied):  # the sort is stable: a tied name comes after its source
        kept.setdefault(id(state[name]), (name, state[name].detach()))
    return dict(kept.values())


def weight_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES, *, copy: bool = True
) -> Iterator[dict[str, torch.Tensor]]:
    """Names and tensors in buckets of at most ``bucket_bytes``; a larger tensor has a bucket of its own. A bucket is
    yielded as soon as the next tensor does not fit: the tensors after that one are not asked for yet.

    copy: tensors are copied, on the device that they are on, so that a bucket stays as it is when the weights move on.
    """
    bucket: dict[str, Any] = {}
    filled = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = tensor.clone(memory_format=torch.contiguous_format) if copy else tensor.contiguous()
        filled += size
    if bucket:
        yield bucket


_MODEL = "a torch module with forward(input_ids, use_cache).logits, get_output_embeddings() and weights to train"


class ModelFactory:
    """Builds the models of the torch trainer.

    ``--custom-model-provider-path`` builds the model in place of transformers, and ``--model-converter-path`` loads the
    folder into the model and exports the model's weights under the folder's names. Other trainer backends build their
    own models, with or without these two.

    Raises PluginError, naming provider or converter, for any fault of theirs.
    """

    def __init__(
        self, args: Args, registry: PluginRegistry, device: torch.device, sharding: Sharding | None = None
    ) -> None:
        self._args = args
        self._sharding = sharding
        self._device = device
        self._provider_name: str | None = args.custom_model_provider_path
        self._converter_name: str | None = args.model_converter_path
        self._provider: Any = None
        self._converter: ModelConverter | None = None
        if self._provider_name:
            self._provider = registry.resolve("model_provider", self._provider_name)
        if name := self._converter_name:
            self._converter = cast(
                "ModelConverter", construct("converter", name, registry.resolve("converter", name), args)
            )

    def build(self, path: str | None, flag: str, *, frozen: bool = False) -> Model:
        """The model with the weights of the folder ``path``, which ``flag`` names, in float32 and without dropout.
        frozen: it is never trained, and with ``--bf16`` is in bfloat16.

        A provider sees ``path`` as ``args.hf_checkpoint``. Without a converter it loads the weights itself.
        """
        if self._provider:
            model = self._provided(path)
        else:
            how = {} if self._sharding is None else self._sharding.loading()
            how["trust_remote_code"] = self._args.trust_remote_code
            how["dtype"] = torch.bfloat16 if frozen and self._args.bf16 else torch.float32
            model = load_model(path, self._device, flag, **how)
        if self._converter is not None:
            self._fill(self._converter, model, checked_folder(path, flag))
        if self._provider:  # else load_model did
            if isinstance(model, PreTrainedModel):
                pack_where_possible(model)
            fuse_where_possible(model)
        if frozen:
            model.requires_grad_(False)
        return Model(
            model, converter=self._converter, converter_name=self._converter_name, folder=self._args.hf_checkpoint
        )

    def _provided(self, path: str | None) -> PreTrainedModel:
        kind, name = "model_provider", self._provider_name
        args = self._args.model_copy(update={"hf_checkpoint": path})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)  # random weights must be the same on every rank
            model: Any = call(kind, name, self._provider, args)
        head = getattr(model, "get_output_embeddings", None)
        if not isinstance(model, torch.nn.Module) or not callable(head):
            raise returned(kind, name, model, _MODEL)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise returned(kind, name, model, _MODEL, hint="no parameter requires a gradient")
        torch.nn.Module.to(model, self._device, torch.float32)
        torch.nn.Module.eval(model)  # without dropout, as in load_model
        self._try_out(model)
        return cast("PreTrainedModel", model)

    def _try_out(self, model: Any) -> None:
        """Two tokens through the model: a model that cannot do it is refused before the run."""
        kind, name, at = "model_provider", self._provider_name, "forward of its model"
        ids = torch.zeros((1, 2), dtype=torch.long, device=self._device)
        try:
            with torch.no_grad(), contained():
                answer: Any = model(input_ids=ids, use_cache=False)
        except Exception as error:  # fault boundary: the user's model
            raise raised(kind, name, error, at=at) from error
        logits = getattr(answer, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, 2):
            raise returned(kind, name, answer, "an object with logits [1, 2, vocabulary] for two tokens", at=at)

    def _fill(self, converter: ModelConverter, model: PreTrainedModel, folder: str) -> None:
        """Let the converter load the folder. Every floating-point weight holds NaN before, and none may after."""
        with torch.no_grad():
            for tensor in unique_state(model).values():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
            converter.load(model, folder)
        torch.nn.Module.to(model, self._device, torch.float32)  # the converter may have assigned tensors of the folder
        absent = [name for name, tensor in unique_state(model).items() if tensor.isnan().any()]
        if absent:
            what = f"{len(absent)} weights were not written, or hold NaN, such as {absent[0]}"
            where = place("converter", self._converter_name, f"load of {folder}")
            hint = "register a buffer that the folder lacks with persistent=False"
            raise PluginError(what, where=where, expected="a number for every element of every weight", hint=hint)


def checked_pairs(answer: object, what: str = "it", where: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors that ``what``, a method of a converter, returned. Raises PluginError for anything else."""
    expected = "an iterator of (name, tensor)"
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
        raise PluginError(f"{what} returned {short_repr(answer)}", where=where, expected=expected)
    for item in answer:
        if not _is_pair(item):
            raise PluginError(f"{what} yielded {short_repr(item)}", where=where, expected=expected)
        yield item


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)
