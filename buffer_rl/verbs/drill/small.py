"""A small model of the architecture and with the tokenizer of another one, for a drill on a laptop."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from buffer_rl.errors import ConfigError

LARGEST_BYTES = 100_000_000
"""Of the weights of a model that a drill takes as it is."""
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def is_small(folder: Path) -> bool:
    """Whether a drill takes the model as it is."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= LARGEST_BYTES


def write_small(source: Path, target: Path) -> None:
    """Write random weights in ``SIZES`` for the architecture of the folder ``source``, and its tokenizer, into the
    folder ``target``. Raises ConfigError if transformers cannot build it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    for name, size in SIZES.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(size, getattr(config, name)))
    if isinstance(layers := getattr(config, "layer_types", None), list):
        config.layer_types = layers[: config.num_hidden_layers]
    try:
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        factory.from_config(config).to(torch.float32).save_pretrained(target)
    except Exception as error:  # fault boundary: many architectures
        raise ConfigError(
            f"no small {config.model_type} can be made: {type(error).__name__}: {error}",
            where="--drill-model small",
            hint="--drill-model own, or a small --hf-checkpoint",
        ) from error
    for file in source.iterdir():
        is_weight = file.suffix in (".safetensors", ".bin", ".pth") or file.name.endswith(".index.json")
        if file.is_file() and not is_weight and not (target / file.name).exists():
            shutil.copy(file, target / file.name)
