"""Megatron-core on the CPU: what it takes for granted of CUDA, made to mean the CPU where torch sees no CUDA device.

``install`` replaces functions once a process; ``cpu_devices`` is entered by each thread that builds or trains a model.
Where CUDA is available both do nothing, but for names that Megatron uses and without TransformerEngine does not define.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from buffer_rl.errors import ConfigError

VERSIONS = ((0, 16, 1), (0, 17))
"""The versions of megatron-core that this package was made for: from the first, up to and without the second."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A function that assumes CUDA, as ``module:attribute``, its replacement on the CPU, and what calls it.

    missing: without TransformerEngine megatron-core uses the name and does not define it, with CUDA too."""

    where: str
    replacement: Any
    cause: str
    missing: bool = False

    def apply(self) -> None:
        """Replace it. Raises ConfigError if it is not there."""
        module_name, _, attribute = self.where.partition(":")
        module = importlib.import_module(module_name)
        if self.missing and hasattr(module, attribute):
            return
        if not self.missing and not hasattr(module, attribute):
            raise ConfigError(f"{self.where} is not there to be replaced", where="megatron-core on the CPU")
        setattr(module, attribute, self.replacement)


class _Stream:
    """The one order in which a CPU computes, in place of a CUDA stream and its events: there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, _: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


PATCHES = (
    Patch(
        "torch.cuda:current_device",
        lambda: torch.device("cpu"),
        "a device of rotary embeddings, parameter and gradient buffers, p2p communication",
    ),
    Patch("torch.cuda:synchronize", _nothing, "p2p communication and the writers of checkpoints wait for the device"),
    Patch("torch.cuda:Stream", _Stream, "the token dispatcher of experts makes one"),
    Patch("torch.cuda:current_stream", _Stream, "the token dispatcher of experts compares it with its own"),
    Patch(
        "torch.cuda:stream",
        lambda _: nullcontext(),
        "the token dispatcher of experts copies counts to the host on its own stream",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        lambda *_, **__: torch.empty(0, dtype=torch.uint8),
        "recompute keeps the random state of the device; that of the CPU is kept beside it",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        _nothing,
        "recompute restores the random state of the device",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils:te_general_gemm",
        None,
        "the router asks whether it is None, and without TransformerEngine it is not defined",
        missing=True,
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        _on_host,
        "it makes the counts that all-to-all takes of CUDA tensors alone",
    ),
)
"""In the order in which they are applied. All are for ``VERSIONS``."""


def installed_version() -> str:
    """The version of megatron-core. Raises ConfigError if there is none, or none of ``VERSIONS``."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        hint = "pip install 'buffer-rl[megatron]'"
        raise ConfigError("megatron-core is not installed", where="buffer_rl_megatron", hint=hint) from error
    if not VERSIONS[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < VERSIONS[1]:
        oldest, unknown = (".".join(map(str, numbers)) for numbers in VERSIONS)
        what = f"megatron-core {version} may differ from what this package corrects and replaces"
        raise ConfigError(what, where="buffer_rl_megatron", expected=f"megatron-core>={oldest},<{unknown}")
    return version


def install(patches: Iterable[Patch] = PATCHES) -> None:
    """Apply the patches where torch sees no CUDA device; a second call changes nothing. Raises ConfigError for a
    version of megatron-core that they were not made for, with or without CUDA."""
    installed_version()
    on_cpu = not torch.cuda.is_available()
    for patch in patches:
        if on_cpu or patch.missing:
            patch.apply()


class _CpuDevices(TorchFunctionMode):
    """Maps the device "cuda" to the CPU in calls of torch, and names tensor types as if they were on a CUDA device,
    which is what the optimizer compares with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):  # a rank's rotary embeddings
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def cpu_devices() -> AbstractContextManager[Any]:
    """Has "cuda" mean the CPU for torch calls of this thread within the block; nothing where CUDA is available."""
    return nullcontext() if torch.cuda.is_available() else _CpuDevices()


def current_device() -> torch.device:
    """Where models are: CUDA's current device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
