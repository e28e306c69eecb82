"""LoRA (arXiv 2106.09685): a frozen base, and for each of some of its matrices the product of two narrow ones.

A layer computes ``x W^T + s x A^T B^T`` with ``s = alpha / rank``; B is 0 at first, so that the run starts from the
base's own probabilities. peft makes the adapters in place, in float32 whatever the base's number format. They are whole
on each rank and equal on all: drawn with the run's seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from buffer_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from buffer_rl.args import Args

ALL_LINEAR = "all-linear"
PART = ".lora_"
"""What the names of adapters' weights have, and no others."""
_BASE = ".base_layer."
_END = 1024


def add_adapters(module: PreTrainedModel, args: Args) -> None:
    """Have the modules of ``--target-modules`` adapters, which alone are trained from now on; the base is frozen.

    Raises ConfigError for modules that are not there or that cannot have one alone (tied embeddings), and for experts,
    whose matrices are no linear layers, under ``all-linear``."""
    from peft import LoraConfig

    targets = ALL_LINEAR if args.target_modules == [ALL_LINEAR] else args.target_modules
    _require_targets(module, targets)
    alpha: Any = args.lora_alpha  # peft declares it as an integer, and only divides it
    config = LoraConfig(r=args.lora_rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        try:
            module.add_adapter(config)
        except ValueError as error:
            raise ConfigError(str(error), where="--target-modules") from error
    for name, weight in module.named_parameters():
        if PART in name:
            weight.data = weight.data.float()
        if weight.requires_grad != (PART in name):
            raise ConfigError(f"{name} would {'' if weight.requires_grad else 'not '}be trained", where="--lora-rank")


def _require_targets(module: PreTrainedModel, targets: str | list[str]) -> None:
    config: Any = module.config.get_text_config(decoder=True)
    experts = next((name for name, _ in module.named_parameters() if ".experts." in name), None)
    if targets == ALL_LINEAR and experts is not None:
        raise ConfigError(
            f"experts such as {experts} would have no adapter: their matrices are no linear layers",
            where="--target-modules",
            expected="the names of linear layers",
            hint="--target-modules q_proj k_proj v_proj o_proj trains the attention alone",
        )
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


def base_digest(module: torch.nn.Module) -> str | None:
    """Tells bases apart by the names, shapes and ends of their weights; None if the module has no adapters."""
    if not layers_with_adapter(module):
        return None
    found = hashlib.sha256()
    for name, tensor in sorted(base_state(module.state_dict()).items()):
        flat = tensor.reshape(-1)
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
        delta: torch.Tensor = layer.get_delta_weight(layer.active_adapters[0])
        return weight.detach().float() + delta.float()


@contextmanager
def base_alone(module: Any) -> Iterator[None]:
    """The module computes without its adapters."""
    module.disable_adapters()
    try:
        yield
    finally:
        module.enable_adapters()
