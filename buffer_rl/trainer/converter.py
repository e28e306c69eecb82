"""Parts for model converters (``--model-converter-path``): a base class that maps one tensor at a time, and a reader
of folders.

A converter whose parameters hold several tensors of the folder (fused attention, stacked experts) implements
``buffer_rl.kinds.trainer.ModelConverter`` itself, with ``folder_tensors`` and ``buffer_rl.trainer.model.unique_state``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, PluginError, raised_as
from buffer_rl.trainer.model import checked_pairs, unique_state


class NameMap(ABC):
    """A model converter that maps the names and tensors of the folder to the model's and back, one tensor at a time.

    One tensor may become any number, under other names and in other shapes. Neither method sees two tensors together.
    """

    def __init__(self, args: Args) -> None:
        self.args = args

    @abstractmethod
    def to_trainer(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """One tensor of the folder as any number of the model's, by the names of its ``state_dict``."""

    @abstractmethod
    def to_hf(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The inverse: one tensor of the model as any number of the folder's."""

    def load(self, model: torch.nn.Module, folder: str) -> None:
        """Copy every tensor of the folder into the model.

        Raises PluginError if ``to_trainer`` gives a name that the model lacks, another shape than the model's, or no
        pairs; ConfigError if the folder cannot be read.
        """
        state = model.state_dict()
        for name, tensor in folder_tensors(folder):
            what = f"to_trainer of {name}"
            for own_name, converted in checked_pairs(self.to_trainer(name, tensor), what):
                target = state.get(own_name)
                if target is None:
                    raise PluginError(f"{what} yielded {own_name!r}", expected="a name of the trainer's model")
                if target.shape != converted.shape:
                    raise PluginError(
                        f"{what} yielded {own_name!r} of shape {tuple(converted.shape)}",
                        expected=f"the shape {tuple(target.shape)}",
                    )
                target.copy_(converted)

    def export(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's weights under the folder's names, tied weights once. Raises PluginError if ``to_hf`` gives no
        pairs."""
        for name, tensor in unique_state(model).items():
            yield from checked_pairs(self.to_hf(name, tensor), f"to_hf of {name}")


def folder_tensors(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a folder's safetensors files with their names, on the CPU, one in memory at a time.

    Raises ConfigError if there is no such file, or one is damaged.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError("there are no safetensors files", where=folder, hint="a model converter reads those")
    for file in files:
        unreadable = raised_as(
            ConfigError, "not a readable safetensors file", (SafetensorError, OSError), where=str(file)
        )
        with unreadable, safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name)
