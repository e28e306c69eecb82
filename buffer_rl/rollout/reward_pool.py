"""The processes that compute synchronous rewards, as a rollout worker sees them; their own side is ``reward_process``.

Who waits for whom: ``RewardPool.score`` waits for a free process, then for the end of the batch, or until the sample at
work exceeds its deadline. A process that misses a deadline is killed, one that dies is noticed by the end of its
stream; either way the sample that it worked on has failed, and a fresh process goes on with the next ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple, cast

from buffer_rl.cluster.fork_server import kill_descendants, start_process
from buffer_rl.errors import PluginError, RolloutError
from buffer_rl.records.groups import Sample, SampleGroup
from buffer_rl.rollout.failures import COSTLY, FailureKind
from buffer_rl.rollout.reward_process import DONE, HEADER, RewardTarget

START_TIMEOUT_S = 120.0  # interpreter, args, plugin registry; and, separately, the import of the user's module
EXIT_TIMEOUT_S = 5.0
MAX_LOST_PER_CALL = 2  # processes; then the rest of the call is given up: each costs a deadline or a fresh start
MIN_PART_S = 0.1  # of expected work: smaller parts of a group are not worth a message of their own
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from buffer_rl.rollout.reward_process import main; main(*map(int, sys.argv[2:]))"
)


class Outcome(NamedTuple):
    """One sample's reward, or why there is none. metadata: what the function changed of the metadata of each sample
    that it was called with (``reward_process.changed_metadata``); empty if it changed none."""

    value: Any = None
    kind: FailureKind | None = None
    text: str = ""
    expected: str = ""
    hint: str = ""
    metadata: Sequence[Mapping[str, Any]] = ()


class RewardPool:
    """At most ``num_workers`` reward processes, started when first needed. Belongs to one event loop.

    stdout: the file descriptor that takes what they print; this process's standard output where absent.
    live: the processes that run; idle: those of them without a batch.
    """

    def __init__(self, args_json: str, *, num_workers: int, timeout_s: float, stdout: int | None = None) -> None:
        self._args_json = args_json
        self._stdout = stdout
        self._timeout_s = timeout_s
        self._num_workers = num_workers
        self._free = asyncio.Semaphore(num_workers)
        self._seconds: dict[RewardTarget, float] = {}  # of one item, in the last calls
        self.idle: list[_Process] = []
        self.live: set[_Process] = set()
        self._closed = False

    async def score(self, target: RewardTarget, samples: Sequence[Sample | SampleGroup]) -> list[Outcome]:
        """One outcome for each sample (or group, as the function wants), in order. Samples of a slow function are
        shared out over the processes in contiguous parts, however busy these are: work comes first in, first out.

        Raises PluginError if the function cannot be resolved in the reward process, RolloutError if such a process
        does not start.
        """
        lost: list[FailureKind] = []
        expected_s = self._seconds.get(target, 0.0) * len(samples)
        num_parts = max(1, min(self._num_workers, len(samples), int(expected_s / MIN_PART_S)))
        if num_parts == 1:
            return await self._score_part(target, samples, lost)
        ends = [len(samples) * part // num_parts for part in range(num_parts + 1)]
        parts = [self._score_part(target, samples[start:end], lost) for start, end in itertools.pairwise(ends)]
        answers = await asyncio.gather(*parts, return_exceptions=True)  # no part is left running
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [outcome for part in cast("list[list[Outcome]]", answers) for outcome in part]

    async def _score_part(
        self, target: RewardTarget, samples: Sequence[Sample | SampleGroup], lost: list[FailureKind]
    ) -> list[Outcome]:
        """Outcomes of ``samples``. lost: how each process was lost that the call cost, in this part or another."""
        outcomes: list[Outcome] = []
        async with self._free:
            while len(outcomes) < len(samples):
                if len(lost) >= MAX_LOST_PER_CALL:
                    why = f"not run: {MAX_LOST_PER_CALL} samples of this group already cost a reward process"
                    outcomes.extend([Outcome(kind=lost[-1], text=why)] * (len(samples) - len(outcomes)))
                    break
                batch = await self._score_on_one(target, samples[len(outcomes) :])
                lost += [outcome.kind for outcome in batch if outcome.kind in COSTLY]
                outcomes += batch
        return outcomes

    async def aclose(self) -> None:
        """Kill every process and wait until they are reaped."""
        self._closed = True
        self.idle.clear()
        for process in list(self.live):
            self._discard(process)
            await process.wait_reaped()

    async def _score_on_one(self, target: RewardTarget, samples: Sequence[Sample | SampleGroup]) -> list[Outcome]:
        while self.idle and not self.idle[-1].runs():  # what user code left behind may end a process between batches
            self._discard(self.idle.pop())
        process = self.idle.pop() if self.idle else await self._start()
        healthy = False
        try:
            outcomes, healthy = await process.score(target, samples, self._timeout_s)
        finally:  # a cancelled process is in the middle of a batch: its later answers would go to the wrong samples
            if healthy and not self._closed:
                self.idle.append(process)
            else:
                self._discard(process)
        self._seconds[target] = (self._seconds.get(target, process.seconds) + process.seconds) / 2
        return outcomes

    async def _start(self) -> _Process:
        if self._closed:
            raise RolloutError("the reward processes were stopped")
        process = _Process(self._stdout)
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
    """One reward process, the socket to it and the file of its answers. seconds: of an item of the last batch."""

    def __init__(self, stdout: int | None) -> None:
        self._resolved: set[RewardTarget] = set()
        self.seconds = 0.0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._channel, theirs = socket.socketpair()
        self._answers = _memory_file()
        descriptors = (theirs.fileno(), self._answers.fileno())
        with theirs:
            arguments = [json.dumps(sys.path), *map(str, descriptors)]
            # Not multiprocessing, which would run the caller's main module again; in a session of its own, so that what
            # the user's code started ends with it.
            self._child = start_process(
                [sys.executable, "-c", _BOOT, *arguments],
                streams=(1 if stdout is None else stdout, 2),
                env=os.environ,
                pass_fds=descriptors,
                stage="trial",
                forked=["-m", "buffer_rl.rollout.reward_process", *arguments],
            )
        self._channel.setblocking(False)

    @property
    def pid(self) -> int:
        return self._child.pid

    def runs(self) -> bool:
        return self._child.poll() is None

    async def set_up(self, args_json: str) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
        await self._send(args_json)
        try:
            answer = await self._receive(START_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError) as error:
            what = f"a reward process did not start: {await self._exit_reason(error)}"
            hint = "its own error is in the log of its rollout worker; else look at the limits (ulimit -a)"
            raise RolloutError(what, where=f"process {self.pid}", hint=hint) from error
        if "error" in answer:
            raise RolloutError(f"a reward process could not be set up: {answer['error']}")

    async def score(
        self, target: RewardTarget, samples: Sequence[Sample | SampleGroup], timeout_s: float
    ) -> tuple[list[Outcome], bool]:
        """Outcomes of ``samples``, in order, and whether the process goes on; if not, the last one says why not, and
        the rest is missing."""
        try:
            await self._begin(target, samples)
        except (TimeoutError, EOFError, ConnectionError) as error:
            return [Outcome(kind=FailureKind.CRASH, text=f"on import, {await self._exit_reason(error)}")], False
        assert self._reader is not None
        began = since = time.monotonic()  # since: when the sample at work began
        lost: Outcome | None = None
        while True:
            try:
                async with asyncio.timeout(since + timeout_s - time.monotonic()):
                    await self._reader.readexactly(len(DONE))
            except TimeoutError:
                text = f"no reward within --rm-timeout-s {timeout_s:g} s; the process was killed"
                lost = Outcome(kind=FailureKind.TIMEOUT, text=text)
            except (EOFError, ConnectionError) as error:
                lost = Outcome(kind=FailureKind.CRASH, text=await self._exit_reason(error))
            answers = self._read_answers()
            if answers:
                since = answers[-1]["at"]
                self.seconds = (since - began) / len(answers)
            if lost is None or lost.kind is FailureKind.CRASH or since + timeout_s <= time.monotonic():
                break
            lost = None
        outcomes = [_read_outcome(answer) for answer in answers]
        if lost is not None and len(outcomes) < len(samples):
            outcomes.append(lost)
        return outcomes, lost is None

    async def _begin(self, target: RewardTarget, samples: Sequence[Sample | SampleGroup]) -> None:
        """Send a batch, and wait for the import of the function where the process does not have it yet."""
        self._answers.truncate(0)
        self._answers.seek(0)  # of the child, too: the two share the open file
        await self._send((target, list(samples)))
        if target in self._resolved:
            return
        answer = await self._receive(START_TIMEOUT_S)
        if "error" in answer:
            raise PluginError(answer["error"], where="reward process")
        self._resolved.add(target)

    def _read_answers(self) -> list[dict[str, Any]]:
        """Those of the batch that are there as a whole."""
        size = os.fstat(self._answers.fileno()).st_size
        lines, _, _ = os.pread(self._answers.fileno(), size, 0).rpartition(b"\n")
        answers: list[dict[str, Any]] = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
        return answers

    def kill(self) -> None:
        """Kill the process and what it started, daemons too, without waiting."""
        try:
            if self.runs():
                kill_descendants(self._child.pid)
            os.killpg(self._child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._child.kill()
        if self._writer is not None:
            self._writer.close()
        else:
            self._channel.close()
        self._answers.close()
        self._child.poll()

    async def wait_reaped(self) -> None:
        """Wait until the process has been reaped."""
        await asyncio.to_thread(self._child.wait, EXIT_TIMEOUT_S)

    async def _send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._writer.drain()

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._reader is not None
        async with asyncio.timeout(timeout_s):
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            answer: dict[str, Any] = json.loads(await self._reader.readexactly(length))
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


def _memory_file() -> IO[bytes]:
    """A file that ends with its last descriptor, without a disk where the system has such."""
    if sys.platform == "linux":
        return open(os.memfd_create("rewards"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _read_outcome(answer: dict[str, Any]) -> Outcome:
    if "kind" in answer:
        more = {name: answer.get(name, "") for name in ("expected", "hint")}
        return Outcome(kind=FailureKind(answer["kind"]), text=answer["error"], **more)
    return Outcome(value=answer["ok"], metadata=answer.get("metadata", ()))
