"""LoRA (arXiv 2106.09685): a frozen base, and for each of some of its matrices the product of two narrow ones.

A layer computes ``x W^T + s x A^T B^T`` with ``s = alpha / rank``; B is 0 at first, so that the run starts from the
base's own probabilities. peft makes the adapters in place, in float32 whatever the base's number format. They are whole
on each rank and equal on all: drawn with the run's seed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError
from buffer_rl.trainer.sharding import whole

ALL_LINEAR = "all-linear"
PART = ".default.weight"
"""What the names of adapters' weights have, and no others; those of embeddings, which are no linear layers, do not."""
_BASE = ".base_layer."
_END = 1024
_PEFT = "base_model.model."
"""What names in a folder of peft's begin with."""
_UNKNOWN = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "layers_pattern",
)


def add_adapters(module: PreTrainedModel, args: Args) -> dict[str, torch.Tensor]:
    """Have modules adapters, which alone are trained from now on; the base is frozen. Returns a copy of what they start
    with, which is empty if that is 0: those of ``--lora-adapter-path``, or new ones of ``--target-modules``.

    Raises ConfigError for modules that are not there or that cannot have one alone (tied embeddings), for experts,
    whose matrices are no linear layers, under ``all-linear``, and for an adapter of another kind, rank or base."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners import tuners_utils

    tuners_utils._torch_supports_distributed = False  # else, of a base in several copies, it takes a part for the whole
    targets: Any = ALL_LINEAR if args.target_modules == [ALL_LINEAR] else args.target_modules
    saved: dict[str, torch.Tensor] = {}
    if args.lora_adapter_path is not None:
        targets, saved = _read_adapter(Path(args.lora_adapter_path), args)
    else:
        _require_targets(module, targets)
    alpha: Any = args.lora_alpha  # peft declares it as an integer, and only divides it
    config = LoraConfig(r=args.lora_rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    # What peft and transformers need to load the written folder by itself.
    config.task_type, config.base_model_name_or_path = "CAUSAL_LM", os.path.abspath(str(args.hf_checkpoint))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        try:
            inject_adapter_in_model(config, module)
        except ValueError as error:
            raise ConfigError(str(error), where="--lora-rank and --target-modules") from error
    for name, weight in module.named_parameters():
        if PART in name:
            weight.data = weight.data.float()
        if weight.requires_grad != (PART in name):
            raise ConfigError(f"{name} is not of a linear layer", where="--target-modules", expected="linear layers")
    return _copied(module, saved, str(args.lora_adapter_path)) if saved else {}


def _read_adapter(folder: Path, args: Args) -> tuple[Any, dict[str, torch.Tensor]]:
    """The target modules and the weights of a folder in peft's format."""
    where = f"--lora-adapter-path {folder}"
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        saved = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"not readable: {error}", where=where, expected="a folder in peft's format") from error
    if config.get("peft_type") != "LORA" or (odd := [name for name in _UNKNOWN if config.get(name)]):
        what = config.get("peft_type") if config.get("peft_type") != "LORA" else f"LoRA with {', '.join(odd)}"
        raise ConfigError(f"the adapter is {what}", where=where, expected="plain LoRA")
    found, asked = (config.get("r"), config.get("lora_alpha")), (args.lora_rank, args.lora_alpha)
    if found != asked:
        raise ConfigError(
            f"the adapter's rank and alpha are {found[0]} and {found[1]:g}, not {asked[0]} and {asked[1]:g}",
            where=where,
            hint=f"--lora-rank {found[0]} --lora-alpha {found[1]:g}",
        )
    return config["target_modules"], saved


def _copied(module: PreTrainedModel, saved: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    own = {name: weight for name, weight in module.named_parameters() if PART in name}
    names = {_name_of_peft(name): name for name in own}
    fits = names.keys() == saved.keys() and all(saved[key].shape == own[names[key]].shape for key in names)
    if not fits:
        odd = sorted(names.keys() ^ saved.keys())
        what = f"the adapter is of another base: {odd[0] if odd else 'shapes'} differ"
        raise ConfigError(what, where=f"--lora-adapter-path {where}")
    with torch.no_grad():
        for key, name in names.items():
            own[name].copy_(saved[key])
    return {name: weight.detach().clone() for name, weight in own.items()}


def _require_targets(module: PreTrainedModel, targets: str | list[str]) -> None:
    config: Any = module.config.get_text_config(decoder=True)
    experts = next((name for name, _ in module.named_parameters() if ".experts." in name), None)
    if targets == ALL_LINEAR and experts is not None:
        what = f"experts such as {experts} would have no adapter: their matrices are no linear layers"
        hint = "--target-modules q_proj k_proj v_proj o_proj trains the attention alone"
        raise ConfigError(what, where="--target-modules", expected="the names of linear layers", hint=hint)
    if targets != ALL_LINEAR and getattr(config, "tie_word_embeddings", False):
        ends = tuple(
            name.rpartition(".")[2]
            for name, part in module.named_modules()
            if part in (module.get_input_embeddings(), module.get_output_embeddings())  # type: ignore[no-untyped-call]
        )
        if tied := sorted(set(ends).intersection(targets)):
            raise ConfigError(
                f"{tied[0]} is tied: an adapter of it would change one of input and output alone",
                where="--target-modules",
                hint="leave it out",
            )


def write_adapter(module: Any, folder: Path) -> None:
    """Write the adapters in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {_name_of_peft(name): weight for name, weight in module.state_dict().items() if PART in name}
    save_file({name: weight.cpu().contiguous() for name, weight in own.items()}, folder / "adapter_model.safetensors")
    replace(module.peft_config["default"], inference_mode=True).save_pretrained(str(folder))


def _name_of_peft(name: str) -> str:
    return _PEFT + name.replace(".default.", ".")


def base_digest(module: torch.nn.Module) -> str | None:
    """Tells bases apart by the names, shapes and ends of their weights; None if the module has no adapters. All ranks
    call it."""
    if not layers_with_adapter(module):
        return None
    found = hashlib.sha256()
    for name, tensor in sorted(base_state(module.state_dict()).items()):
        flat = whole(tensor).reshape(-1)
        ends = torch.cat([flat[:_END], flat[-_END:]]).float().cpu().numpy().tobytes()
        found.update(f"{name} {tuple(tensor.shape)}".encode() + ends)
    return found.hexdigest()


def base_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base's weights of a state with adapters, under the names that they have without."""
    return {name.replace(_BASE, "."): tensor for name, tensor in state.items() if PART not in name}


def layers_with_adapter(module: torch.nn.Module) -> dict[str, Any]:
    """By the name of its weight without adapters, each layer that has one."""
    return {f"{name}.weight": part for name, part in module.named_modules() if hasattr(part, "lora_A")}


def merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """``W + s B A`` in float32."""
    with torch.no_grad():
        return weight.detach().float() + _delta(layer)


def _delta(layer: Any) -> torch.Tensor:
    delta: torch.Tensor = layer.get_delta_weight(layer.active_adapters[0])
    return delta.float()


class MergedChange:
    """How much of merged adapters an engine's number format leaves unchanged, from one call to the next."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def share(self, module: torch.nn.Module, dtype: str) -> float:
        """The share of the elements of matrices with an adapter whose ``W + s B A`` rounds to the same number of
        ``dtype`` as at the last call, at the first: as without adapters. All ranks call it."""
        rounded, equal, total = getattr(torch, dtype), 0, 0
        for name, layer in layers_with_adapter(module).items():
            weight, delta = whole(layer.base_layer.weight).float(), _delta(layer)
            now = (weight + delta).to(rounded)
            before = weight + self._before[name][0] @ self._before[name][1] if name in self._before else weight
            equal += int((now == before.to(rounded)).sum())
            total += now.numel()
            own = layer.active_adapters[0]
            down, up = layer.lora_A[own].weight.clone(), layer.scaling[own] * layer.lora_B[own].weight
            self._before[name] = (down.T, up.T) if layer.fan_in_fan_out else (up, down)
        return equal / total


@contextmanager
def as_at_the_start(module: Any, start: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The module computes with its adapters as ``add_adapters`` returned them; if they were 0, without."""
    with ExitStack() as undo:
        for layer in () if start else layers_with_adapter(module).values():
            layer.enable_adapters(False)
            undo.callback(layer.enable_adapters, True)
        own = {name: weight.data for name, weight in module.named_parameters() if name in start}
        for name, data in own.items():
            undo.callback(data.copy_, data.clone())
            data.copy_(start[name])
        yield
