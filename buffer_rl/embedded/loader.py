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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from buffer_rl.embedded.fallback import FallbackDecoder
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.kept_weights import Changes, KeptWeights, steps_to
from buffer_rl.errors import EngineError
from buffer_rl.files.hf_config import text_config
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.weights.shared_bucket import open_bucket
from buffer_rl.weights.shared_memory import bytes_view
from buffer_rl.weights.tensor import LOAD_FORMAT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NOT_BEGUN = "no weight update is under way"


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


def load_module(path: str, device: str, dtype: str, *, trust_remote_code: bool = False) -> Any:
    """The causal language model in ``path``, in evaluation mode; no code of the folder is run unless
    ``trust_remote_code`` says so. Raises EngineError if it is not there, cannot be
    read, or lacks weights (which ``transformers`` alone would fill with random numbers)."""
    from transformers import AutoModelForCausalLM

    if not Path(path, "config.json").is_file():
        raise EngineError("no model folder (config.json is missing)", where=path)
    load: Any = AutoModelForCausalLM.from_pretrained
    trust = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    module, info = _loaded(lambda: load(path, **trust, **_how(dtype)), path)
    _require_none(sorted(info["missing_keys"]), "missing", path)
    return _prepared(module, device)


def _how(dtype: str) -> dict[str, Any]:
    return {"dtype": DTYPES[dtype], "output_loading_info": True}


def _loaded(load: Callable[[], Any], where: str) -> Any:
    from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging.disable_progress_bar  # a log file is no place for one
    quiet()
    try:
        module, info = load()
    except Exception as error:  # fault boundary: many libraries raise many types while reading a model
        raise EngineError(f"cannot load the model: {error}", where=where) from error
    _require_none(sorted(str(key) for key in info["mismatched_keys"]), "of the wrong shape", where)
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


class LoadedModel:
    """A decoder whose weights can be replaced by those of another folder.

    checkpoint_shapes: of all weights, under the module's own names and those of a checkpoint. kept: what deltas are of.
    """

    def __init__(self, options: LoadOptions) -> None:
        trust = options.trust_remote_code
        module = load_module(options.model_path, options.device, options.dtype, trust_remote_code=trust)
        self.options = options
        self.config = module.config
        self.eos_token_ids = _eos_token_ids(options.model_path, module.config)
        limit = context_limit(module.config, options.context_length)
        self.decoder: FastDecoder | FallbackDecoder
        if options.returns_experts and ExpertSizes.of(text_config(module.config.to_dict())) is None:
            raise EngineError(
                "the model is no mixture of experts", where=f"--return-routed-experts, {options.model_path}"
            )
        if FastDecoder.supports(module.config):
            self.decoder = FastDecoder(module, limit, deterministic=options.deterministic)
        else:
            how = {"deterministic": options.deterministic, "returns_experts": options.returns_experts}
            self.decoder = FallbackDecoder(module, limit, **how)
        self.kept = KeptWeights()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        self.checkpoint_shapes = self._shapes | _checkpoint_shapes(module)
        self._module_class: Any = type(module)
        self._config_text: bytes | None = None  # what a folder has to say whose files the fast decoder reads itself
        if isinstance(self.decoder, FastDecoder) and self._module_class.__module__.startswith("transformers."):
            self._config_text = Path(options.model_path, "config.json").read_bytes()
        self._tied = {"lm_head.weight"} if getattr(module.config, "tie_word_embeddings", False) else set()

    def replace_weights(self, path: str) -> None:
        """Take the weights in ``path``. Raises EngineError, with the old weights still in place, if they cannot be
        read or are of another model."""
        if (steps := steps_to(Path(path), self.kept.digest)) is not None:
            changes: Changes | None = None
            for step in steps:
                changes = self.kept.take(read_folder(step.folder), step.digest, step.base)
            self._serve_kept(changes if len(steps) == 1 else None)
            return
        self.kept.forget()
        config = Path(path, "config.json")
        if config.is_file() and config.read_bytes() == self._config_text and self._take(read_tensors(config.parent)):
            return
        trust = self.options.trust_remote_code
        module = load_module(path, self.options.device, self.options.dtype, trust_remote_code=trust)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        if shapes != self._shapes or module.config.model_type != self.config.model_type:
            names = sorted(n for n in shapes.keys() | self._shapes.keys() if shapes.get(n) != self._shapes.get(n))
            raise EngineError(
                f"the weights are of another model: {', '.join(names[:5]) or module.config.model_type}",
                where=path,
                expected=f"the names and shapes of {self.options.model_path}",
            )
        self.decoder.load(module)

    def with_adapter(self, folder: str, name: str) -> FastDecoder | FallbackDecoder:
        """A decoder over the same weights with the adapter in ``folder``. Raises EngineError."""
        if isinstance(self.decoder, FastDecoder):
            return self.decoder.with_adapter(folder)
        return self.decoder.with_adapter(folder, name)

    def forget_adapter(self, name: str) -> None:
        """Free an adapter, whose decoder is no longer used."""
        if isinstance(self.decoder, FallbackDecoder):
            self.decoder.forget_adapter(name)

    def replace_tensors(
        self, tensors: Mapping[str, torch.Tensor], digest: str | None = None, base: str | None = None
    ) -> None:
        """Take weights under the names of a Hugging Face checkpoint, all of them, or a delta of the version whose
        digest is ``base``. Raises EngineError, with the old weights still in place, if a tensor is missing, unknown or
        of the wrong shape, or if the version has another digest than ``digest``; without one, none is kept."""
        if digest is not None:
            self._serve_kept(self.kept.take(tensors, digest, base))
            return
        self.kept.forget()
        self._replace_whole(tensors)

    def _serve_kept(self, changes: Changes | None) -> None:
        """changes: in what is kept since it was served before; None: any."""
        try:
            if changes is None or not self.decoder.patch(self.kept.tensors, changes):
                self._replace_whole(self.kept.tensors)
        except BaseException:
            self.kept.forget()
            raise

    def _replace_whole(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._take(tensors):
            return
        where = "the tensors of the update"
        shapes = self.checkpoint_shapes
        wrong = [n for n, tensor in tensors.items() if shapes.get(n, tensor.shape) != tuple(tensor.shape)]
        _require_none(sorted(wrong), "of the wrong shape", where)
        how = _how(self.options.dtype)
        module, info = _loaded(
            lambda: self._module_class.from_pretrained(None, config=self.config, state_dict=dict(tensors), **how), where
        )
        _require_none(sorted(info["missing_keys"]), "missing", where)
        _require_none(sorted(info["unexpected_keys"]), "of another model", where)
        self.decoder.load(_prepared(module, self.options.device))

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the fast decoder took ``tensors``, without a module between. It does where they are its weights under
        the module's own names. Other names and forms are for transformers, as is the error if something is wrong."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if (
            self._config_text is None
            or not isinstance(self.decoder, FastDecoder)
            or not shapes.items() <= self._shapes.items()
            or not self._shapes.keys() - shapes.keys() <= self._tied
            or not all(tensor.dtype in DTYPES.values() for tensor in tensors.values())
        ):
            return False
        self.decoder.load_weights(tensors)
        return True


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files. Raises EngineError if one cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the weights cannot be read: {error}", where=str(folder)) from error
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
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


class StagedUpdate:
    """The tensors of the version that is arriving, if one is. They are views of the sender's shared memory, or copies
    on its device, so that the engine's memory holds them once."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] | None = None
        self._version: str | None = None
        self._flush = False
        self.base: str | None = None

    def begin(self, selector: Any = "all", base: str | None = None) -> None:
        """Start an update, of all weights or, with ``base``, of a delta; one that was left unfinished is forgotten.
        Raises EngineError for another selector."""
        if selector != "all":
            raise EngineError(f"selector {selector!r} is not supported", expected='"all"')
        self.discard()
        self._tensors, self.base = {}, base

    def add(self, serialized: Any, load_format: Any, version: str | None, *, flush_cache: bool) -> None:
        """Stage one bucket. serialized: a list with one handle (see ``buffer_rl.weights.shared_bucket``).

        Raises EngineError, and the update is over, if no update was begun, if the bucket is in another form (pickles
        are not read), cannot be opened, or names a tensor again.
        """
        try:
            tensors = _opened(serialized, load_format)
            self.require(tensors)
        except EngineError:
            self.discard()
            raise
        self.stage(tensors, version, flush_cache=flush_cache)

    def require(self, names: Iterable[str]) -> object:
        """The update under way; another one is another object. Raises EngineError if there is none, or if it has one
        of the weights ``names`` already."""
        if self._tensors is None:
            raise EngineError(_NOT_BEGUN, hint="call /begin_weight_update first")
        twice = next((name for name in names if name in self._tensors), None)
        if twice is not None:
            raise EngineError(f"the weights {twice} came twice in one update")
        return self._tensors

    def stage(self, tensors: Mapping[str, torch.Tensor], version: str | None, *, flush_cache: bool) -> None:
        """Stage what ``require`` has allowed. version: the name of the weights, where this part says it."""
        assert self._tensors is not None
        self._tensors.update(tensors)
        self._version = self._version if version is None else version
        self._flush = self._flush or flush_cache

    def finish(self) -> tuple[dict[str, torch.Tensor], str | None, bool]:
        """All tensors, the version's name if one was given, and whether to flush; nothing is staged then. Raises
        EngineError if no update was begun."""
        if self._tensors is None:
            raise EngineError(_NOT_BEGUN, hint="/begin_weight_update comes first, and a refused part ends an update")
        taken = (self._tensors, self._version, self._flush)
        self.discard()
        return taken

    def discard(self) -> None:
        """Forget what is staged."""
        self._tensors, self._version, self._flush, self.base = None, None, False, None


def _opened(serialized: Any, load_format: Any) -> dict[str, torch.Tensor]:
    if load_format != LOAD_FORMAT:
        raise EngineError(
            f"load_format {load_format!r} is not supported: the embedded engine unpickles nothing",
            expected=f"{LOAD_FORMAT!r}, with JSON handles of shared memory",
        )
    if not isinstance(serialized, list) or len(serialized) != 1 or not isinstance(serialized[0], str):
        raise EngineError("'serialized_named_tensors' must be a list of one string", hint="the engine is one rank")
    return open_bucket(serialized[0])


def tensor_checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and the bytes in row-major order."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(bytes_view(tensor))
    return digest.hexdigest()


def checksum_answer(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """The answer of ``/weights_checker``: ``per_engine_checksum`` over all tensors, in order of their names."""
    checksums = {name: tensor_checksum(tensor) for name, tensor in named}
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(f"{name}={checksums[name]}\n".encode())
    whole = digest.hexdigest()
    return {
        "success": True,
        "message": f"Checksums of {len(checksums)} tensors.",
        "per_engine_checksum": whole,
        "ranks": [{"checksums": checksums, "per_gpu_checksum": whole}],
    }
