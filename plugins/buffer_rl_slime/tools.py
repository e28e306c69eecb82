"""Small helpers that slime's functions import: ``run`` for coroutines, hooks of samples, loss masks of conversations,
trace spans that record nothing, and names that can be imported and not used."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any, ClassVar, NoReturn, TypeVar

from buffer_rl.errors import ConfigError, RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.plugin.signature import keywords_for
from buffer_rl.records.groups import GroupUid, Sample
from buffer_rl.rollout import prompts
from buffer_rl.rollout.lease import lease_or_none
from buffer_rl.rollout.prompts import PromptEncoder
from buffer_rl.rollout.sft import encode_conversation
from buffer_rl_slime.names import PAGE

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
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
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
    lease = lease_or_none()
    if lease is not None and name_or_path == lease.context.args.hf_checkpoint:
        return lease.context.tokenizer
    return prompts.load_tokenizer(name_or_path)


def load_processor(name_or_path: str, **kwargs: Any) -> None:
    """None: there are no images here."""
    return None


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, with the caller's context variables. In a rollout it runs on the rollout's event loop, to
    which engines and rewards belong, while the caller's thread waits, at most ``--rollout-timeout-s``; elsewhere on an
    event loop of its own.

    Raises RolloutError if it is called on the rollout's event loop itself, which could never go on.
    """
    lease = lease_or_none()
    loop = None if lease is None else lease.context.loop
    if lease is None or loop is None or not loop.is_running():
        return asyncio.run(work)
    if _is_current(loop):
        work.close()
        what, where = "run() is called in a coroutine, which would wait for itself", "slime.utils.async_utils.run"
        raise RolloutError(what, where=where, expected="a synchronous function", hint="await the coroutine instead")
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    tasks: list[asyncio.Task[None]] = []
    variables = copy_context()

    async def finish() -> None:
        try:
            done.set_result(await work)
        except asyncio.CancelledError:
            done.cancel()
            raise
        except BaseException as error:  # the caller's thread raises it
            done.set_exception(error)

    loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(finish(), context=variables)))
    try:
        return done.result(timeout=lease.context.args.rollout_timeout_s)
    except TimeoutError:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        raise


def _is_current(loop: asyncio.AbstractEventLoop) -> bool:
    with suppress(RuntimeError):
        return asyncio.get_running_loop() is loop
    return False


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """``value``, a sample or nested lists of samples, after every hook saw each sample, in order.

    A hook ``(args, sample, ...)`` gets those of ``kwargs`` that it names; it changes the sample or returns another.
    Raises RolloutError for anything else that it returns."""
    paths = getattr(args, "rollout_sample_hook_path", None) or []
    if not paths:
        return value
    if not isinstance(value, Sample):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    for path in paths:
        hook = load_function(path)
        answer = hook(args, value, **keywords_for(hook, kwargs))
        answer = await answer if inspect.isawaitable(answer) else answer
        if answer is not None and not isinstance(answer, Sample):
            what = f"it returned {type(answer).__name__}"
            raise RolloutError(what, where=f"hook {path!r}", expected="Sample or None")
        value = value if answer is None else answer
    return value


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Of each mask the tokens from the first 1 on; 0 where there is none."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of conversations. tokenizer_type: a ``--loss-mask-type``.

    Unlike slime's, whose masks count tokens of messages rendered apart, white space behind an answer's end token is not
    trained on (``docs/runs.md#supervised-fine-tuning``)."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._prompts = PromptEncoder(tokenizer)

    def get_loss_mask(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        """``[num_tokens]`` token ids, and 1 for each that is trained on. Raises DataError for a conversation whose
        answers cannot be found."""
        prompt = [dict(message) for message in messages]
        where = GroupUid("conversation", 0, 0)  # for messages: the caller alone knows which row it is
        sample = Sample(uid=where, prompt=prompt, metadata={"tools": tools} if tools else {})
        return encode_conversation(self._prompts, sample, self.tokenizer_type)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """See the function of this name."""
        return get_response_lengths(loss_masks)


class Span:
    """Takes attributes and keeps none."""

    def set_attr(self, key: str, value: Any) -> Span:
        return self

    def update_attrs(self, attrs: Mapping[str, Any] | None) -> Span:
        return self

    set = set_attr
    update = update_attrs


@contextmanager
def trace_span(target: Any, name: str, attrs: Mapping[str, Any] | None = None, **kwargs: Any) -> Iterator[Span]:
    """A span around a block."""
    yield Span()


def trace_event(target: Any, name: str, attrs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
    """A moment."""


def trace_function(name: str, **kwargs: Any) -> Callable[[Any], Any]:
    """A decorator that leaves the function as it is."""
    return lambda function: function


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """No attributes."""
    return {}


def _refuse(name: str, hint: str) -> NoReturn:
    raise ConfigError(f"{name} cannot be had here", where="an import of slime", hint=f"{hint}; see {PAGE}")


def build_processor_kwargs(multimodal_inputs: Any = None) -> NoReturn:
    """Refused: there are no images here."""
    _refuse("build_processor_kwargs", "there are no images")


def encode_image_for_rollout_engine(image: Any) -> NoReturn:
    """Refused: there are no images here."""
    _refuse("encode_image_for_rollout_engine", "there are no images")
