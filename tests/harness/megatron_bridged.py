"""A Megatron trainer whose bridge is not that of the package, and has only what the trainer asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from buffer_rl_megatron.bridge import Bridge
from buffer_rl_megatron.trainer import MegatronTrainer


class OwnBridge:
    def __init__(self, bridge: Bridge) -> None:
        self.config = bridge.config
        self._bridge = bridge

    def build(self, *, value_head: bool = False, provider: Any = None) -> list[torch.nn.Module]:
        return self._bridge.build(value_head=value_head, provider=provider)

    def load(self, chunks: Iterable[torch.nn.Module], folder: str) -> None:
        self._bridge.load(chunks, folder)

    def export(self, chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._bridge.export(chunks)


class BridgedTrainer(MegatronTrainer):
    def make_bridge(self, folder: str) -> Bridge:
        return cast("Bridge", OwnBridge(super().make_bridge(folder)))
