"""Models from Hugging Face folders, new weights for them, and checksums of the weights that are served.

New weights come as a folder, or in parts between ``/begin_weight_update`` and ``/end_weight_update``. Nothing of the
parts is served before the end, which takes all or nothing. A refused part ends the update: the next call has to be
another begin.

Checksums have the shape of SGLang's ``/weights_checker``. They are of the tensors that the forward pass reads, which
are prepared from the Hugging Face weights (see ``FastDecoder``) and named after where they are used. Equal weights give
equal checksums in engines with the same architecture, number format, device kind and decoder.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from buffer_rl.embedded.fallback import FallbackDecoder
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.kept_weights import Changes, KeptWeights, steps_to
from buffer_rl.errors import EngineError, raised_as
from buffer_rl.files.hf_config import text_config
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.weights.shared_memory import bytes_view

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Source = str | Mapping[str, torch.Tensor]
"""Of weights: a folder, or tensors under the names of a Hugging Face checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded. context_length None: the model's own limit. returns_experts: see ``FallbackDecoder``."""

    model_path: str
    device: str = "cpu"
    dtype: str = "float32"
    context_length: int | None = None
    deterministic: bool = False
    trust_remote_code: bool = False
    returns_experts: bool = False


def load_module(path: str, options: LoadOptions) -> Any:
    """The causal language model in ``path``, loaded as the model of ``options`` is, in evaluation mode; no code of the
    folder is run unless ``trust_remote_code`` says so. Raises EngineError if it is not there, cannot be read, or lacks
    weights (which ``transformers`` alone would fill with random numbers)."""
    from transformers import AutoModelForCausalLM

    if not Path(path, "config.json").is_file():
        raise EngineError("no model folder (config.json is missing)", where=path)
    trust = options.trust_remote_code
    how: Any = {"dtype": DTYPES[options.dtype], "local_files_only": True, "trust_remote_code": trust}
    module, _ = _loaded(partial(AutoModelForCausalLM.from_pretrained, path, **how), path)
    return _prepared(module, options.device)


def _loaded(load: Callable[..., Any], where: str) -> Any:
    from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging.disable_progress_bar  # a log file is no place for one
    quiet()
    try:
        module, info = load(output_loading_info=True)
    except Exception as error:  # fault boundary: many libraries raise many types while reading a model
        raise EngineError(f"cannot load the model: {error}", where=where) from error
    _require_none(sorted(str(key) for key in info["mismatched_keys"]), "of the wrong shape", where)
    _require_none(sorted(info["missing_keys"]), "missing", where)
    return module, info


def _require_none(names: list[str], what: str, where: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise EngineError(f"weights are {what}: {', '.join(names[:5])}{more}", where=where)


def _prepared(module: Any, device: str) -> Any:
    return module.to(device).eval().requires_grad_(False)


def context_limit(config: Any, asked: int | None) -> int:
    """Most tokens of a sequence: the smaller of what was asked for and the model's limit."""
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = [int(limit) for limit in (own, asked) if limit]
    if not limits:
        raise EngineError("the model states no limit of positions", hint="pass --context-length")
    return min(limits)


def _checkpoint_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights under their names in a checkpoint, which may split what the module holds as one."""
    from transformers.core_model_loading import revert_weight_conversion

    empty = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(module, empty).items()}


@dataclass(frozen=True, slots=True)
class Serving:
    """What a model served at a moment: a decoder over the same weights, and their digest where they were kept."""

    decoder: FastDecoder | FallbackDecoder
    digest: str | None


@dataclass(frozen=True, slots=True)
class Replacement:
    """Other weights for a model. serve: has it serve them, all or none. spare: has the weights that served before
    then; None: nothing was prepared, and ``serve`` takes as long as a whole update."""

    serve: Callable[[], None]
    spare: FastDecoder | None = None


class LoadedModel:
    """A decoder whose weights can be replaced by those of another folder.

    checkpoint_shapes: of all weights, under the module's own names and those of a checkpoint. kept: what deltas are of.
    """

    def __init__(self, options: LoadOptions) -> None:
        module = load_module(options.model_path, options)
        self.options = options
        self.config = module.config
        self.eos_token_ids = _eos_token_ids(options.model_path, module.config)
        limit = context_limit(module.config, options.context_length)
        self.decoder: FastDecoder | FallbackDecoder
        if options.returns_experts and ExpertSizes.of(text_config(module.config.to_dict())) is None:
            where = f"--return-routed-experts, {options.model_path}"
            raise EngineError("the model is no mixture of experts", where=where)
        if FastDecoder.supports(module.config):
            self.decoder = FastDecoder(module, limit, deterministic=options.deterministic)
        else:
            how = {"deterministic": options.deterministic, "returns_experts": options.returns_experts}
            self.decoder = FallbackDecoder(module, limit, **how)
        self.kept = KeptWeights()
        self._digest: str | None = None  # of what serves, which may be older than what is kept
        self._lock = threading.Lock()  # what is kept, and the order of those that prepare
        self._shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        self.checkpoint_shapes = self._shapes | _checkpoint_shapes(module)
        self._module_class: Any = type(module)
        self._config_text: bytes | None = None  # what a folder has to say whose files the fast decoder reads itself
        if isinstance(self.decoder, FastDecoder) and self._module_class.__module__.startswith("transformers."):
            self._config_text = Path(options.model_path, "config.json").read_bytes()
        self._tied = {"lm_head.weight"} if getattr(module.config, "tie_word_embeddings", False) else set()

    def replace(self, source: Source, digest: str | None = None, base: str | None = None) -> None:
        """Take all weights of ``source``, or tensors that are a delta of the version whose digest is ``base``. Raises
        EngineError, with the old weights still in place, if they cannot be read or are of another model, if a tensor is
        missing, unknown or of the wrong shape, or if the version has another digest than ``digest``; without one, none
        is kept of tensors."""
        self.replacement(source, digest, base).serve()

    def serving(self) -> Serving:
        """What serves now; call it in the thread that replaces it."""
        return Serving(copy(self.decoder), self._digest)

    def replacement(
        self, source: Source, digest: str | None = None, base: str | None = None, beside: Serving | None = None
    ) -> Replacement:
        """What serves the weights of ``source``, as ``replace`` does.

        beside: what serves, and is left as it is. What can be done meanwhile is done here, in any thread: all but a
        swap if the fast decoder takes the weights itself. Otherwise transformers loads a model, which changes settings
        of the whole process, and has to wait. None: the weights are to be served at once. Raises EngineError if they
        are not those of ``digest``."""
        with self._lock:
            if isinstance(source, str):
                if (steps := steps_to(Path(source), self.kept.digest)) is None:
                    self.kept.forget()
                    own = read_tensors(Path(source)) if beside is not None and self._reads(source) else {}
                    return self._swap_of(own, beside) or Replacement(lambda: self._replace_by_folder(source))
                changes: Changes | None = None
                for step in steps:
                    changes = self.kept.take(read_folder(step.folder), step.digest, step.base)
                return self._of_kept(changes if len(steps) == 1 else None, steps[0].base if steps else None, beside)
            if digest is not None:
                return self._of_kept(self.kept.take(source, digest, base), base, beside)
            self.kept.forget()
            return self._swap_of(source, beside) or Replacement(lambda: self._replace_whole(source))

    def _of_kept(self, changes: Changes | None, base: str | None, beside: Serving | None) -> Replacement:
        """changes: in what is kept, since the version ``base``; None: any."""
        digest = self.kept.digest

        def in_place() -> None:
            with self._lock:
                if self.kept.digest != digest:
                    raise EngineError("another version has been kept since", expected=str(digest))
                try:
                    own = None if base != self._digest else changes
                    if own is None or not self.decoder.patch(self.kept.tensors, own):
                        self._replace_whole(self.kept.tensors, copies=True)
                except BaseException:
                    self.kept.forget()
                    raise
                self._digest = digest

        fresh = None if beside is None or base != beside.digest else beside.decoder
        if changes is not None and isinstance(fresh, FastDecoder):
            fresh.copy_weights()
            if fresh.patch(self.kept.tensors, changes):
                return self._swap(fresh, digest)
        return self._swap_of(self.kept.tensors, beside, digest) or Replacement(in_place)

    def _swap_of(
        self, tensors: Mapping[str, torch.Tensor], beside: Serving | None, digest: str | None = None
    ) -> Replacement | None:
        if beside is None or not self._take(tensors, beside.decoder):
            return None
        assert isinstance(beside.decoder, FastDecoder)
        return self._swap(beside.decoder, digest)

    def _swap(self, fresh: FastDecoder, digest: str | None) -> Replacement:
        def serve() -> None:
            assert isinstance(self.decoder, FastDecoder)
            self.decoder.swap_weights(fresh)
            self._digest = digest

        return Replacement(serve, spare=fresh)

    def _reads(self, path: str) -> bool:
        """Whether the folder's configuration is that of the model, and the fast decoder takes its files."""
        config = Path(path, "config.json")
        return config.is_file() and config.read_bytes() == self._config_text

    def _replace_by_folder(self, path: str) -> None:
        if self._reads(path) and self._take(read_tensors(Path(path)), self.decoder):
            self._digest = None
            return
        module = load_module(path, self.options)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        if shapes != self._shapes or module.config.model_type != self.config.model_type:
            names = sorted(n for n in shapes.keys() | self._shapes.keys() if shapes.get(n) != self._shapes.get(n))
            what = f"the weights are of another model: {', '.join(names[:5]) or module.config.model_type}"
            raise EngineError(what, where=path, expected=f"the names and shapes of {self.options.model_path}")
        self.decoder.load(module)
        self._digest = None

    def _replace_whole(self, tensors: Mapping[str, torch.Tensor], *, copies: bool = False) -> None:
        """copies: of the tensors, whose memory a module would serve: they are changed later."""
        self._digest = None
        if self._take(tensors, self.decoder):
            return
        where = "the tensors of the update"
        shapes = self.checkpoint_shapes
        wrong = [n for n, tensor in tensors.items() if shapes.get(n, tensor.shape) != tuple(tensor.shape)]
        _require_none(sorted(wrong), "of the wrong shape", where)
        state = {name: tensor.clone() if copies else tensor for name, tensor in tensors.items()}
        how = {"config": self.config, "state_dict": state, "dtype": DTYPES[self.options.dtype]}
        module, info = _loaded(partial(self._module_class.from_pretrained, None, **how), where)
        _require_none(sorted(info["unexpected_keys"]), "of another model", where)
        self.decoder.load(_prepared(module, self.options.device))

    def _take(self, tensors: Mapping[str, torch.Tensor], decoder: FastDecoder | FallbackDecoder) -> bool:
        """Whether ``decoder`` took ``tensors``, without a module between. A fast one does where they are its weights
        under the module's own names. Other names and forms are for transformers, as is the error if something is
        wrong."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if (
            self._config_text is None
            or not isinstance(decoder, FastDecoder)
            or not shapes.items() <= self._shapes.items()
            or not self._shapes.keys() - shapes.keys() <= self._tied
            or not all(tensor.dtype in DTYPES.values() for tensor in tensors.values())
        ):
            return False
        decoder.load_weights(tensors)
        return True


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files. Raises EngineError if one cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    with raised_as(EngineError, "the weights cannot be read", (OSError, SafetensorError), where=str(folder)):
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
    return tensors


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors files of a model folder hold; nothing where transformers has to look at them itself."""
    from safetensors.torch import load_file

    whole, tensors, num_read = folder / "model.safetensors", {}, 0
    try:
        names = {whole.name}
        if not whole.is_file():
            names = set(json.loads((folder / f"{whole.name}.index.json").read_bytes())["weight_map"].values())
        for name in names:
            read = load_file(folder / name)
            tensors.update(read)
            num_read += len(read)
    except Exception:  # fault boundary: transformers reads the files again and raises what is wrong with them
        return {}
    return tensors if len(tensors) == num_read else {}


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any | None:
    """The tokenizer in ``path``; None where there is none (the engine then answers with token ids only)."""
    from transformers import AutoTokenizer

    if not any(Path(path, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)


def _eos_token_ids(path: str, config: Any) -> frozenset[int]:
    """End tokens of ``config.json``, of its text part if the whole names none, and of ``generation_config.json``."""
    named = getattr(config, "eos_token_id", None)
    found: list[Any] = [config.get_text_config(decoder=True).eos_token_id if named is None else named]
    generation = Path(path, "generation_config.json")
    if generation.is_file():
        found.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    ids = [value if isinstance(value, list) else [value] for value in found if value is not None]
    return frozenset(chain.from_iterable(ids))


def tensor_checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and the bytes in row-major order."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(bytes_view(tensor))
    return digest.hexdigest()


def checksum_answer(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """The answer of ``/weights_checker``: ``per_engine_checksum`` over all tensors, in order of their names."""
    checksums = {name: tensor_checksum(tensor) for name, tensor in named}
    lines = "".join(f"{name}={checksums[name]}\n" for name in sorted(checksums))
    whole = hashlib.sha256(lines.encode()).hexdigest()
    return {
        "success": True,
        "message": f"Checksums of {len(checksums)} tensors.",
        "per_engine_checksum": whole,
        "ranks": [{"checksums": checksums, "per_gpu_checksum": whole}],
    }
