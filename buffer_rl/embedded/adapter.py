"""LoRA adapters of peft's format (arXiv 2106.09685) beside a base that many requests share.

A layer with weight ``W`` computes ``x W^T + s (x A^T) B^T``, ``s = alpha / rank``. The product of the adapter is
computed in float32 and added to that of the base, as the trainer does: it is not rounded into the weights, and a
bfloat16 base does not swallow it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from buffer_rl.errors import EngineError

Pair = tuple[torch.Tensor, torch.Tensor]
"""``A [rank, in]`` and ``s B [out, rank]``, float32."""
LowRank = tuple[torch.Tensor, torch.Tensor]
"""``[in, rank]`` and ``[rank, out]``, float32: what a product of the base has added to it."""
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def read_adapter(folder: str) -> dict[str, Pair]:
    """The pairs of a folder in peft's format, by the names of their layers. Raises EngineError if it is none."""
    try:
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        tensors = load_file(Path(folder, "adapter_model.safetensors"))
        scale = config["lora_alpha"] / config["r"]
        names = sorted(name.removesuffix(_A) for name in tensors if name.endswith(_A))
        pairs = {
            name.removeprefix(_PREFIX): (tensors.pop(name + _A).float(), scale * tensors.pop(name + _B).float())
            for name in names
        }
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError, SafetensorError) as error:
        what = f"the adapter cannot be read: {type(error).__name__}: {error}"
        raise EngineError(what, where=folder, expected="a folder in peft's format") from error
    if tensors or not pairs or config.get("use_dora") or config.get("use_rslora"):
        raise EngineError("the adapter is no plain LoRA", where=folder)
    return pairs


def joined(
    pairs: dict[str, Pair], names: Sequence[str], sizes: Sequence[int], num_inputs: int, norm: torch.Tensor | None
) -> LowRank | None:
    """The pairs of the layers ``names`` as that of one matrix, whose outputs are theirs one after another, so many each
    (``sizes``); they are taken out of ``pairs``. None if none of them has a pair. norm: the weight of the norm in front
    of it, which is folded into the matrix. Raises EngineError if a pair is of another shape."""
    downs, ups, start = [], [], 0
    for name, size in zip(names, sizes, strict=True):
        if (pair := pairs.pop(name, None)) is not None:
            down, up = pair
            if down.shape[1:] != (num_inputs,) or up.shape != (size, len(down)):
                raise EngineError(f"the adapter of {name} is of another shape", expected=f"[{size}, {num_inputs}]")
            own = torch.zeros(len(down), sum(sizes))
            own[:, start : start + size] = up.t()
            downs.append(down if norm is None else down * norm.float().cpu())
            ups.append(own)
        start += size
    return (torch.cat(downs).t().contiguous(), torch.cat(ups)) if downs else None


def require_none_left(pairs: Mapping[str, Pair]) -> None:
    """Raises EngineError if an adapter has layers that nothing took."""
    if pairs:
        raise EngineError(f"the adapter has layers that this engine adapts not: {', '.join(list(pairs)[:5])}")
