"""Where a rank's models come from and how their weights leave: from a Hugging Face folder and back, by default.

``--custom-model-provider-path`` builds the model in place of transformers, and ``--model-converter-path`` maps the
names and tensors of the folder to the model's and back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from buffer_rl.contracts import ModelConverter
from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import call, construct, place, raised, returned, short_repr
from buffer_rl.train import model as models

CONFIG_FILES = ("config.json", "generation_config.json")
_MODEL = "a torch module with forward(input_ids, use_cache).logits, get_output_embeddings() and weights to train"


class ModelFactory:
    """Builds models of one run, and turns their weights into those of a Hugging Face folder.

    Raises PluginError, naming provider or converter, for whatever they do wrong.
    """

    def __init__(self, args: Any, registry: PluginRegistry, device: torch.device) -> None:
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
                ModelConverter, construct("converter", name, registry.resolve("converter", name), args)
            )

    def build(self, path: str | None, flag: str) -> PreTrainedModel:
        """The model with the weights of the folder ``path``, which ``flag`` names, in float32 and without dropout.

        A provider sees ``path`` as ``args.hf_checkpoint``. Without a converter it loads the weights itself.
        """
        if self._provider:
            model = self._provided(path)
        else:
            trust = self._args.trust_remote_code
            model = models.load_model(path, self._device, flag, trust_remote_code=trust)
        if self._converter is not None:
            self._fill(self._converter, model, models.checked_folder(path, flag))
        return model

    def hf_state(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """The weights under the names of a Hugging Face folder, tied weights once."""
        if self._converter is None:
            return models.hf_state(model) if isinstance(model, PreTrainedModel) else models.unique_state(model)
        found: dict[str, torch.Tensor] = {}
        for own_name, tensor in models.unique_state(model).items():
            for name, converted in self._pairs("to_hf", own_name, self._converter.to_hf(own_name, tensor)):
                if name in found:
                    raise self._refused("to_hf", own_name, f"{name} twice", "each name of the folder once")
                found[name] = converted
        return found

    def save_hf(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""
        if self._converter is None and isinstance(model, PreTrainedModel):
            models.save_hf(model, tokenizer, path)
            return
        target = Path(path)
        target.mkdir(parents=True, exist_ok=True)
        for name in CONFIG_FILES:  # the architecture is that of the folder that the run started from
            source = Path(self._args.hf_checkpoint) / name
            if source.is_file():
                shutil.copyfile(source, target / name)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.hf_state(model).items()}
        save_torch_state_dict(state, target)
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
        return cast(PreTrainedModel, model)

    def _try_out(self, model: Any) -> None:
        """Two tokens through the model: what it cannot do is said before the run."""
        kind, name, at = "model_provider", self._provider_name, "forward of its model"
        ids = torch.zeros((1, 2), dtype=torch.long, device=self._device)
        try:
            with torch.no_grad():
                answer: Any = model(input_ids=ids, use_cache=False)
        except Exception as error:  # fault boundary: the user's model
            raise raised(kind, name, error, at=at) from error
        logits = getattr(answer, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, 2):
            raise returned(kind, name, answer, "an object with logits [1, 2, vocabulary] for two tokens", at=at)

    def _fill(self, converter: ModelConverter, model: PreTrainedModel, folder: str) -> None:
        """Copy the folder's tensors into the model, through the converter; every weight must get one."""
        state = model.state_dict()
        filled: set[int] = set()
        for name, tensor in _tensors_of(Path(folder)):
            for own_name, converted in self._pairs("to_trainer", name, converter.to_trainer(name, tensor)):
                target = state.get(own_name)
                if target is None:
                    raise self._refused("to_trainer", name, f"{own_name!r}", "a name of the trainer's model")
                if target.shape != converted.shape:
                    what = f"{own_name!r} of shape {tuple(converted.shape)}"
                    raise self._refused("to_trainer", name, what, f"the shape {tuple(target.shape)}")
                target.copy_(converted)
                filled.add(target.data_ptr())
        absent = [name for name, tensor in models.unique_state(model).items() if tensor.data_ptr() not in filled]
        if absent:
            raise self._refused("to_trainer", folder, f"nothing for {len(absent)} weights, such as {absent[0]}", "all")

    def _pairs(self, method: str, name: str, answer: object) -> Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
            raise self._refused(method, name, short_repr(answer), "an iterator of (name, tensor)")
        for item in answer:
            if not _is_pair(item):
                raise self._refused(method, name, short_repr(item), "an iterator of (name, tensor)")
            yield item

    def _refused(self, method: str, name: str, what: str, expected: str) -> PluginError:
        where = place("converter", self._converter_name, f"{method} of {name}")
        return PluginError(f"it gave {what}", where=where, expected=expected)


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)


def _tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a folder's safetensors files, one in memory at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError("there are no safetensors files", where=str(folder), hint="a model converter reads those")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"not a readable safetensors file: {error}", where=str(file)) from error
