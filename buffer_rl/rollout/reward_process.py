"""Processes that compute synchronous rewards and can be killed: the parent's side (``RewardPool``), and the child's
(``main``), which computes rewards one after another and ends when the parent's end of the socket closes.

Who waits for whom: ``RewardPool.score`` waits for a free process, then for one answer per sample, each within its
deadline. A process that misses a deadline is killed, one that dies is noticed by the end of its stream; either way
the sample that it worked on has failed, and a fresh process goes on with the next ones. The child waits for the next
batch.

Frames are a 4-byte big-endian length and a body: pickle towards the child, JSON towards the parent, which therefore
never unpickles what user code produced.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import io
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from buffer_rl.config import load_args
from buffer_rl.contract_check import check_group_rewards, check_reward
from buffer_rl.errors import BufferRLError, PluginError, RolloutError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import traceback_tail
from buffer_rl.rollout.failures import COSTLY, FailureKind, kind_of
from buffer_rl.types import Sample, SampleGroup

HEADER = struct.Struct(">I")
START_TIMEOUT_S = 120.0  # interpreter, args, plugin registry; and, separately, the import of the user's module
EXIT_TIMEOUT_S = 5.0
MAX_LOST_PER_CALL = 2  # processes; then the rest of the call is given up: each costs a deadline or a fresh start
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from buffer_rl.rollout.reward_process import main; main(int(sys.argv[2]))"
)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """Which reward function: the user's reference, or (``registered``) a name that data may choose.

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
            return  # the parent has ended or has closed the pool


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
    (length,) = HEADER.unpack(_receive_exactly(channel, HEADER.size))
    return _receive_exactly(channel, length)


def _receive_exactly(channel: socket.socket, length: int) -> bytes:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One sample's reward, or why there is none."""

    value: Any = None
    kind: FailureKind | None = None
    text: str = ""
    expected: str = ""


class RewardPool:
    """At most ``num_workers`` reward processes, started when first needed. Belongs to one event loop.

    live: the processes that run; idle: those of them without a batch.
    """

    def __init__(self, args_json: str, *, num_workers: int, timeout_s: float) -> None:
        self._args_json = args_json
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(num_workers)
        self.idle: list[_Process] = []
        self.live: set[_Process] = set()
        self._closed = False

    async def score(self, target: RewardTarget, samples: Sequence[Sample | SampleGroup]) -> list[Outcome]:
        """One outcome for each sample (or group, as the function wants), in order.

        Raises PluginError if the function cannot be resolved in the reward process, RolloutError if such a process
        does not start.
        """
        outcomes: list[Outcome] = []
        async with self._free:
            while len(outcomes) < len(samples):
                lost = [outcome.kind for outcome in outcomes if outcome.kind in COSTLY]
                if len(lost) >= MAX_LOST_PER_CALL:
                    outcomes.extend([_skipped_outcome(lost[-1])] * (len(samples) - len(outcomes)))
                    break
                await self._score_on_one(target, samples[len(outcomes) :], outcomes)
        return outcomes

    async def aclose(self) -> None:
        """Kill every process and wait until they are reaped."""
        self._closed = True
        self.idle.clear()
        for process in list(self.live):
            self._discard(process)
            await process.wait_reaped()

    async def _score_on_one(
        self, target: RewardTarget, samples: Sequence[Sample | SampleGroup], outcomes: list[Outcome]
    ) -> None:
        process = self.idle.pop() if self.idle else await self._start()
        healthy = False
        try:
            healthy = await process.score(target, samples, outcomes, self._timeout_s)
        finally:  # a cancelled process is in the middle of a batch: its later answers would go to the wrong samples
            if healthy and not self._closed:
                self.idle.append(process)
            else:
                self._discard(process)

    async def _start(self) -> _Process:
        if self._closed:
            raise RolloutError("the reward processes were stopped")
        process = _Process.spawn()
        self.live.add(process)
        try:
            await process.set_up(self._args_json)
        except BaseException:
            self._discard(process)
            raise
        return process

    def _discard(self, process: _Process) -> None:
        process.kill()
        self.live.discard(process)


class _Process:
    """One reward process and the socket to it."""

    def __init__(self, child: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._child = child
        self._channel = channel
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    def spawn(cls) -> _Process:
        """Start an interpreter. Not multiprocessing: that would run the caller's main module again."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that what the user's code started can be killed with it
            )
        ours.setblocking(False)
        return cls(child, ours)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def set_up(self, args_json: str) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
        await self._send(args_json)
        try:
            answer = await self._receive(START_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError) as error:
            raise RolloutError(
                f"a reward process did not start: {await self._exit_reason(error)}",
                where=f"process {self.pid}",
                hint="its own error is above, on the standard error of the rollout worker",
            ) from error
        if "error" in answer:
            raise RolloutError(f"a reward process could not be set up: {answer['error']}")

    async def score(
        self, target: RewardTarget, samples: Sequence[Sample | SampleGroup], outcomes: list[Outcome], timeout_s: float
    ) -> bool:
        """Append outcomes for ``samples`` until all have one or the process is lost (then False)."""
        try:
            await self._send((target, list(samples)))
            answer = await self._receive(START_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError) as error:
            outcomes.append(Outcome(kind=FailureKind.CRASH, text=f"on import, {await self._exit_reason(error)}"))
            return False
        if "error" in answer:
            raise PluginError(answer["error"], where="reward process")
        for _ in samples:
            try:
                answer = await self._receive(timeout_s)
            except TimeoutError:
                text = f"no reward within --rm-timeout-s {timeout_s:g} s; the process was killed"
                outcomes.append(Outcome(kind=FailureKind.TIMEOUT, text=text))
                return False
            except (EOFError, ConnectionError) as error:
                outcomes.append(Outcome(kind=FailureKind.CRASH, text=await self._exit_reason(error)))
                return False
            outcomes.append(_read_outcome(answer))
        return True

    def kill(self) -> None:
        """Kill the process and what it started, without waiting."""
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._child.kill()
        if self._writer is not None:
            self._writer.close()
        else:
            self._channel.close()
        self._child.poll()

    async def wait_reaped(self) -> None:
        """Wait until the process has been reaped."""
        await asyncio.to_thread(self._child.wait, EXIT_TIMEOUT_S)

    async def _send(self, message: Any) -> None:
        assert self._writer is not None
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(HEADER.pack(len(body)) + body)
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._writer.drain()

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._reader is not None
        async with asyncio.timeout(timeout_s):
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            answer: dict[str, Any] = orjson.loads(await self._reader.readexactly(length))
        return answer

    async def _exit_reason(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {START_TIMEOUT_S:g} s"
        try:
            code = await asyncio.to_thread(self._child.wait, EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the process closed its connection"
        if code >= 0:
            return f"the process ended with exit status {code}"
        return f"the process was killed by {signal.Signals(-code).name}"


def _read_outcome(answer: dict[str, Any]) -> Outcome:
    if "kind" in answer:
        return Outcome(kind=FailureKind(answer["kind"]), text=answer["error"], expected=answer.get("expected", ""))
    return Outcome(value=answer["ok"])


def _skipped_outcome(kind: FailureKind | None) -> Outcome:
    return Outcome(kind=kind, text=f"not run: {MAX_LOST_PER_CALL} samples of this group already cost a reward process")
