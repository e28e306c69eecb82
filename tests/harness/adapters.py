"""Random adapters of a model folder, in peft's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from buffer_rl.trainer.lora import write_adapter


def with_random_adapter(
    model: str, folder: Path, seed: int, *, targets: str | list[str] = "all-linear", scale: float = 0.2
) -> Any:
    """Write the adapter into ``folder``. Returns the module with it, in float32."""
    load: Any = AutoModelForCausalLM.from_pretrained
    module = load(model, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)
    inject_adapter_in_model(config, module)
    for name, weight in module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=scale)
    write_adapter(module, folder)
    return module
