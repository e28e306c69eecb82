"""Small helpers that slime's functions import."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout import prompts
from buffer_rl.rollout.context import context_or_none

T = TypeVar("T")


@functools.cache
def load_function(path: str) -> Any:
    """What ``package.module.attr``, ``module:attr`` or ``./file.py:attr`` names. It comes from the run's options or
    from code, never from data. Raises PluginError."""
    return PluginRegistry().load(path)


class SingletonMeta(type):
    """Classes of which a process has one object."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]

    def clear_instances(cls) -> None:
        """Forget the objects; the next call makes a new one."""
        cls._instances.clear()


class Box:
    """Holds ``inner``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def group_by(items: Iterable[T], key: Callable[[T], Hashable] | None = None) -> dict[Hashable, list[T]]:
    """The items by ``key``, in their order."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item) if key else item, []).append(item)
    return groups


def decode_int32_meta_array(meta_info: Mapping[str, Any], keys: str | Iterable[str]) -> Any:
    """The tensor of int32 in the first of ``keys`` that is there, as base64 text, bytes or numbers; else None."""
    import torch

    names = [keys] if isinstance(keys, str) else keys
    value = next((meta_info[name] for name in names if name in meta_info), None)
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return torch.frombuffer(bytearray(value), dtype=torch.int32)
    return torch.as_tensor(value).to(dtype=torch.int32, device="cpu").reshape(-1)


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Whether an action of every ``interval`` rollouts is due after ``rollout_id``: also at an epoch's end, and the
    run's."""
    if interval is None:
        return False
    number = rollout_id + 1
    at_epoch = num_rollout_per_epoch is not None and number % num_rollout_per_epoch == 0
    return number == num_rollout or number % interval == 0 or at_epoch


def get_rollout_num_engines(args: Any) -> int:
    """Number of engines behind the router."""
    return int(args.rollout_num_engines)


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer of a Hugging Face folder. It runs code of the folder only under the run's ``--trust-remote-code``,
    whatever the call says."""
    context = context_or_none()
    if context is not None and name_or_path == context.args.hf_checkpoint:
        return context.tokenizer
    return prompts.load_tokenizer(name_or_path)


def load_processor(name_or_path: str, **kwargs: Any) -> None:
    """None: there are no images here."""
    return None
