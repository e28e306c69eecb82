"""The child's side of a reward process: computes rewards one after another, and may be killed at any time.

The parent waits for one frame per sample; this process waits for the next batch, and ends when the parent's
end of the socket closes. Frames are a 4-byte big-endian length and a body: pickle towards this process,
JSON towards the parent, which therefore never unpickles what user code produced.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import io
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from buffer_rl.config import load_args
from buffer_rl.contract_check import check_group_rewards, check_reward
from buffer_rl.errors import BufferRLError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import traceback_tail
from buffer_rl.rollout.failures import FailureKind, kind_of
from buffer_rl.types import Sample, SampleGroup

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """Which reward function: a reference of the user's, or (``registered``) a name that data may choose.

    of_group: it scores a whole ``SampleGroup``, and answers with one number a sample.
    """

    reference: str
    registered: bool
    of_group: bool = False

    @property
    def kind(self) -> str:
        """The plugin kind of the function."""
        return "group_reward" if self.of_group else "reward"

    def resolve(self, registry: PluginRegistry) -> Callable[..., Any]:
        """The function. Raises PluginError."""
        find = registry.resolve_registered if self.registered else registry.resolve
        return cast("Callable[..., Any]", find(self.kind, self.reference))

    def check(self, value: object, item: Sample | SampleGroup) -> Any:
        """The function's answer for ``item``, as JSON values. Raises RewardError if it cannot be used."""
        name = f"{self.kind} {self.reference!r}"
        if isinstance(item, SampleGroup):
            return check_group_rewards(value, len(item), where=f"{name}, group {item.uid}")
        return check_reward(value, where=f"{name}, row {item.row_id}")


def main(file_descriptor: int) -> None:
    """Serve the socket until the parent closes it."""
    _die_with_parent()
    for stream in (sys.stdout, sys.stderr):  # what user code prints is read while it runs, and after it was killed
        cast("io.TextIOWrapper", stream).reconfigure(line_buffering=True)
    with socket.socket(fileno=file_descriptor) as channel:
        try:
            _serve(channel)
        except (EOFError, ConnectionError):
            return  # the parent has gone or has closed the pool


def _serve(channel: socket.socket) -> None:
    try:
        args: Any = load_args(pickle.loads(_receive(channel)))
        registry = PluginRegistry.from_flags(args.plugin)
    except BufferRLError as error:
        _send(channel, {"error": str(error)})
        return
    _send(channel, {"ok": None})
    functions: dict[RewardTarget, Callable[..., Any]] = {}
    while True:
        target, items = pickle.loads(_receive(channel))
        try:
            if target not in functions:
                functions[target] = target.resolve(registry)
        except BufferRLError as error:
            _send(channel, {"error": str(error)})
            continue
        _send(channel, {"ok": None})
        _score(channel, functions[target], args, target, items)


def _score(
    channel: socket.socket,
    function: Callable[..., Any],
    args: Any,
    target: RewardTarget,
    items: Sequence[Sample | SampleGroup],
) -> None:
    for item in items:
        _send(channel, _outcome(function, args, target, item))


def _outcome(
    function: Callable[..., Any], args: Any, target: RewardTarget, item: Sample | SampleGroup
) -> dict[str, Any]:
    try:
        value = function(args, item)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except BaseException as error:  # fault boundary: user code, which may also call sys.exit
        return {"error": f"{type(error).__name__}: {error}\n{traceback_tail(error)}", "kind": kind_of(error)}
    try:
        return {"ok": target.check(value, item)}
    except BufferRLError as error:
        return {"error": error.what, "expected": error.expected, "kind": FailureKind.INVALID}


async def _awaited(value: Any) -> Any:
    return await value


def _receive(channel: socket.socket) -> bytes:
    (length,) = HEADER.unpack(_exactly(channel, HEADER.size))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        block = channel.recv(min(length - len(parts), 1 << 20))
        if not block:
            raise EOFError
        parts += block
    return bytes(parts)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    body = orjson.dumps(message)
    channel.sendall(HEADER.pack(len(body)) + body)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even while user code hangs.

    Linux means the parent's thread that started it: the one of the event loop that the pool belongs to.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
