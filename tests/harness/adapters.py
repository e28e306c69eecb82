"""Random adapters of a model folder, in peft's format."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from buffer_rl.trainer.lora import write_adapter

makes_adapters = pytest.mark.skipif(
    Version(importlib.metadata.version("peft")) < Version(MIN_PEFT_VERSION),
    reason=f"transformers {transformers.__version__} refuses peft before {MIN_PEFT_VERSION}",
)


def with_random_adapter(
    model: str, folder: Path, seed: int, *, targets: str | list[str] = "all-linear", scale: float = 0.2
) -> Any:
    """Write the adapter into ``folder``. Returns the module with it, in float32."""
    load: Any = AutoModelForCausalLM.from_pretrained
    module = load(model, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    module.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0))
    for name, weight in module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=scale)
    write_adapter(module, folder)
    return module
