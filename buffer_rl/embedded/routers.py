"""The modules of a mixture-of-experts model that choose experts: which they are, and what they choose in a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

NUM_TOKENS = 3
"""Of the pass that tries a model out."""


@torch.no_grad()
def find_routers(model: torch.nn.Module) -> tuple[str, ...]:
    """The names of the routers, in the order of their layers; empty if there are none of the form that is known: a
    module without parts that returns, for each token, a number for each expert, the experts that were chosen and as
    many weights. A pass of a few tokens finds them."""
    found: list[str] = []
    with ExitStack() as hooks:
        for name, part in model.named_modules():
            if not any(True for _ in part.children()):
                hooks.enter_context(part.register_forward_hook(partial(_note, found, name)))
        device = next(model.parameters()).device
        model(input_ids=torch.arange(NUM_TOKENS, device=device)[None], use_cache=False)
    return tuple(found) if len(set(found)) == len(found) else ()


def _note(found: list[str], name: str, _module: Any, _args: Any, output: Any) -> None:
    if not isinstance(output, tuple) or not all(isinstance(part, torch.Tensor) for part in output):
        return
    shapes = [(part.is_floating_point(), *part.shape) for part in output if part.ndim == 2]
    chosen = [shape[-1] for shape in shapes if not shape[0] and shape[1] == NUM_TOKENS]
    sizes = [shape[-1] for shape in shapes if shape[0] and shape[1] == NUM_TOKENS]
    if len(chosen) == 1 and chosen[0] in sizes and len(sizes) == 2 and max(sizes) > chosen[0]:
        found.append(name)


@contextmanager
def recorded_experts(model: torch.nn.Module, routers: Sequence[str]) -> Iterator[list[torch.Tensor]]:
    """A list that gets what each router chooses during the block, ``[num_tokens, top_k]``, in the order of layers."""
    chosen: list[torch.Tensor] = []

    def note(_module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
        chosen.append(next(part for part in output if not part.is_floating_point()))

    with ExitStack() as hooks:
        for name in routers:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(note))
        yield chosen
