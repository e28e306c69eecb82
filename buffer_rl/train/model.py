"""Loading, exporting and writing Hugging Face causal language models, from folders only."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from buffer_rl.errors import ConfigError, PluginError, short_repr
from buffer_rl.kinds.trainer import ModelConverter
from buffer_rl.options.section import flag_of, required
from buffer_rl.plan.roles import CRITIC
from buffer_rl.plugin.calls import call, construct, contained, place, raised, returned
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.train.output_layer import fuse_where_possible
from buffer_rl.train.packing import pack_where_possible

if TYPE_CHECKING:
    from buffer_rl.args import Args


BUCKET_BYTES = 256 * 1024 * 1024
"""Largest bucket of ``weight_buckets``: large enough to amortise a transfer, small beside an engine's memory."""


def prepare_torch(args: Args, seed: int) -> None:
    """Threads, random state and determinism of this process, as ``args`` say; before a model is built."""
    torch.set_num_threads(args.num_train_threads)
    seed_all(seed)
    # The run has a display of its own, and what this process prints goes into a log file.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        torch.use_deterministic_algorithms(True)


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def initial_folder(args: Args, model: str) -> tuple[str | None, str]:
    """The folder of weights that ``model`` ("actor", "ref", "teacher" or "critic") starts with, and the flag that names
    it."""
    option = {"ref": "ref_load", "teacher": "opd_teacher_load", CRITIC: "critic_load"}.get(model, "hf_checkpoint")
    if not getattr(args, option):
        option = "hf_checkpoint"
    return getattr(args, option), flag_of(option)


def pick_device(requested: str) -> torch.device:
    """The device for ``--train-device``: ``auto`` takes CUDA where there is one. Raises ConfigError."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "CUDA was asked for and torch sees no CUDA device",
            where="--train-device",
            hint="use --train-device cpu, or install a CUDA build of torch",
        )
    return torch.device(requested)


def load_model(
    path: str | None, device: torch.device, flag: str, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model in the folder ``path``, as ``load_pretrained`` loads it. Raises ConfigError, too, for
    one that is not causal."""
    what = "causal language model"
    model = load_pretrained(AutoModelForCausalLM, what, path, device, flag, trust_remote_code=trust_remote_code)
    _require_causal(model, str(path), flag)
    pack_where_possible(model)
    fuse_where_possible(model)
    return model


def load_pretrained(
    auto_class: Any, what: str, path: str | None, device: torch.device, flag: str, *, trust_remote_code: bool
) -> PreTrainedModel:
    """The model that ``auto_class`` of transformers makes of the folder ``path``, in float32 on ``device``, without
    dropout. what: such a model, for messages, as ``flag``, the option that named the folder.

    Nothing is fetched, and no code of the folder is run unless ``trust_remote_code`` says so. Raises ConfigError if the
    folder is missing, damaged, or lacks weights that the architecture has (transformers would fill them with random
    numbers).
    """
    folder = checked_folder(path, flag)
    try:
        loaded: Any = auto_class.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # fault boundary: a damaged folder fails in many ways, all for the user to mend
        raise ConfigError(f"{folder} does not load as a {what}: {type(error).__name__}: {error}", where=flag) from error
    model: PreTrainedModel = loaded[0]
    absent = sorted(loaded[1]["missing_keys"])
    if absent:
        raise ConfigError(f"{folder} lacks {len(absent)} weights of its architecture, such as {absent[0]}", where=flag)
    # eval() turns dropout off for good: with it, the probabilities of a token would differ between two passes, and
    # the ratio of new to old probabilities would not start at 1.
    torch.nn.Module.to(model, device)
    torch.nn.Module.eval(model)
    return model


def _require_causal(model: PreTrainedModel, folder: str, flag: str) -> None:
    """Raises ConfigError if a token's logits depend on the tokens after it, as the rows of a batch are padded on the
    right without a mask. The check reads the gradient, which is exactly 0 under a causal mask, whatever the size of
    the weights."""
    embedded: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1] * 1  # some architectures work on it in place, which a leaf does not allow

    embedding: Any = model.get_input_embeddings()
    handle = embedding.register_forward_hook(keep)
    try:
        ids = torch.arange(8, device=embedding.weight.device)[None] % embedding.weight.shape[0]
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits
            (gradient,) = torch.autograd.grad(logits[:, :4].square().sum(), embedded[:1])
        gradient = gradient.reshape(ids.numel(), -1)
    except Exception as error:  # fault boundary: many architectures, not all of which take tokens alone
        raise ConfigError(
            f"{type(model).__name__} cannot be trained: 8 tokens fail with {type(error).__name__}: {error}", where=flag
        ) from error
    finally:
        handle.remove()
    if gradient[4:].abs().max() > 1e-6 * gradient[:4].abs().max():
        raise ConfigError(
            f"{type(model).__name__} in {folder} is no causal language model: a token's logits depend on later tokens",
            where=flag,
            expected="a model that sees only the tokens before it",
            hint='models of the BERT family do with "is_decoder": true in config.json',
        )


def with_value_head(model: PreTrainedModel) -> None:
    """Make the output layer one with a single output, in place: the value of the tokens so far. It starts with zeros,
    so values are 0 at first, on every rank, and is not tied to the embeddings. Raises ConfigError for an output layer
    that is not linear."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"the output layer of {type(model).__name__} is a {type(head).__name__}",
            where="--use-critic",
            expected="torch.nn.Linear, which becomes that of values",
        )
    # The module stays, as the model calls it; a new one would have to be placed by each architecture.
    head.weight = torch.nn.Parameter(torch.zeros_like(head.weight[:1]))
    head.register_parameter("bias", None)
    head.out_features = 1


def load_tokenizer(path: str | None, flag: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder ``path``. Raises ConfigError if it is missing or damaged."""
    folder = checked_folder(path, flag)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # fault boundary, as in load_model
        raise ConfigError(
            f"the tokenizer in {folder} does not load: {type(error).__name__}: {error}", where=flag
        ) from error


def save_hf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def hf_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights under the names of a Hugging Face checkpoint; tied weights once, under the name that is kept there.

    The tensors share memory with the model where no conversion is needed.
    """
    return dict(revert_weight_conversion(model, unique_state(model)))


def unique_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights under the model's own names, each storage once."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict()
    kept: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name in sorted(state, key=lambda n: n in tied):  # the sort is stable: a tied name comes after its source
        tensor = state[name].detach()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen or tensor.numel() == 0:
            seen.add(key)
            kept[name] = tensor
    return kept


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


def checked_folder(path: str | None, flag: str) -> str:
    """``path``, if it is a folder with a model. Raises ConfigError naming ``flag`` otherwise."""
    if not path:
        raise ConfigError("no model was named", where=flag, expected="a Hugging Face folder")
    folder = Path(path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"the folder {path} {what}",
            where=flag,
            expected="a folder with config.json, safetensors files and a tokenizer",
            hint="download the model first: nothing is fetched from a hub here",
        )
    return str(folder)


CONFIG_FILES = ("config.json", "generation_config.json")


_MODEL = "a torch module with forward(input_ids, use_cache).logits, get_output_embeddings() and weights to train"


class ModelFactory:
    """Builds the models of the torch trainer, and exports their weights as those of a Hugging Face folder.

    ``--custom-model-provider-path`` builds the model in place of transformers, and ``--model-converter-path`` loads the
    folder into the model and exports the model's weights under the folder's names. Other trainer backends build their
    own models, with or without these two.

    Raises PluginError, naming provider or converter, for any fault of theirs.
    """

    def __init__(self, args: Args, registry: PluginRegistry, device: torch.device) -> None:
        self._args = args
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

    def build(self, path: str | None, flag: str) -> PreTrainedModel:
        """The model with the weights of the folder ``path``, which ``flag`` names, in float32 and without dropout.

        A provider sees ``path`` as ``args.hf_checkpoint``. Without a converter it loads the weights itself.
        """
        if self._provider:
            model = self._provided(path)
        else:
            trust = self._args.trust_remote_code
            model = load_model(path, self._device, flag, trust_remote_code=trust)
        if self._converter is not None:
            self._fill(self._converter, model, checked_folder(path, flag))
        if isinstance(model, PreTrainedModel):
            pack_where_possible(model)
        fuse_where_possible(model)
        return model

    def export(self, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names of a Hugging Face folder, without gradient, each name once and tied weights once.

        They share memory with the model where no conversion is needed. A converter is asked for one tensor at a time;
        the conversions of transformers (fused experts) are made for the whole model at once.
        """
        if self._converter is None:
            yield from (hf_state(model) if isinstance(model, PreTrainedModel) else unique_state(model)).items()
            return
        where = place("converter", self._converter_name, "export")
        names: set[str] = set()
        for name, tensor in checked_pairs(self._converter.export(model), where=where):
            if name in names:
                raise PluginError(f"it yielded {name} twice", where=where, expected="each name of the folder once")
            names.add(name)
            yield name, tensor.detach()

    def own_weights(self, model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
        """The model's memory, by the names in a Hugging Face folder, tied weights under each of theirs: what is copied
        there is loaded. None where a folder has weights in another form than the model."""
        own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        same = (name in own and own[name].data_ptr() == tensor.data_ptr() for name, tensor in self.export(model))
        return own if self._converter is None and all(same) else None

    def save_hf(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""
        if self._converter is None and isinstance(model, PreTrainedModel):
            save_hf(model, tokenizer, path)
            return
        target = Path(path)
        target.mkdir(parents=True, exist_ok=True)
        for name in CONFIG_FILES:  # the architecture is that of the folder that the run started from
            source = Path(required(self._args.hf_checkpoint, "hf_checkpoint")) / name
            if source.is_file():
                shutil.copyfile(source, target / name)
        # Cloned, as save_torch_state_dict refuses tensors that are rows of a larger one.
        contiguous = torch.contiguous_format
        save_torch_state_dict({name: t.cpu().clone(memory_format=contiguous) for name, t in self.export(model)}, target)
        tokenizer.save_pretrained(path)

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
            raise PluginError(
                f"{len(absent)} weights were not written, or hold NaN, such as {absent[0]}",
                where=place("converter", self._converter_name, f"load of {folder}"),
                expected="a number for every element of every weight",
                hint="register a buffer that the folder lacks with persistent=False",
            )


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
