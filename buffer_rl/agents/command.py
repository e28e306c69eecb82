"""Agents that are commands: a process for each sample, which asks the model over HTTP.

It has a process group of its own. With it ends all that it has started: at its own end, at its deadline, at the end of
its session, and when the rollout worker ends, however that happens (``command_watch``).
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from buffer_rl.agents import command_watch
from buffer_rl.agents.finish import Finish
from buffer_rl.agents.runner import deadline
from buffer_rl.agents.session import AgentFailedError, AgentKilledError, Session, SessionHandle
from buffer_rl.args import Args
from buffer_rl.cluster.environment import direct_variables
from buffer_rl.errors import EngineError
from buffer_rl.records.groups import Sample

SAMPLE_VARIABLE = "BUFFER_RL_SAMPLE"
OF_THE_RUN = ("BUFFER_RL_", "RAY_")
"""Variables that begin so are the run's: keys and addresses of its parts. A command does not get them."""
OTHER_KEYS = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")
"""They would go along with a session's key, or in its place."""
PROCESSES_PER_CORE = 4
"""Most of the time a process waits for the model."""
TERM_S = 2.0
"""Between SIGTERM and SIGKILL."""
READ_S = 2.0
"""In which the rest of the output of a process that has ended is read."""
BLOCK_BYTES, TAIL_BYTES = 1 << 16, 1 << 20
"""What is read at once, and what is kept of an output: its last line may be a finish with long texts."""
FLOOD_S = 0.005
"""Between two full blocks of output. A process that writes more is slowed down, so that it does not slow the others."""
SHOWN_LINES = 20
SHOWN_CHARACTERS = 4000


def max_processes(args: Args) -> int:
    """``--agent-max-processes`` of one rollout worker, or what this machine's cores are enough for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return args.agent_max_processes or max(1, PROCESSES_PER_CORE * cores // args.num_rollout_workers)


def sample_json(sample: Sample, base_url: str, api_key: str, *, evaluation: bool) -> dict[str, Any]:
    """What a program gets to know of its sample."""
    return {
        "row_id": str(sample.row_id),
        "prompt": sample.prompt,
        "label": sample.label,
        "metadata": sample.metadata,
        "evaluation": evaluation,
        "base_url": base_url,
        "api_key": api_key,
    }


def session_variables(base_url: str, api_key: str, args: Args, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: ``environ`` without what is the run's, and the session's addresses and keys."""
    kept = {n: value for n, value in environ.items() if not n.startswith(OF_THE_RUN) and n not in OTHER_KEYS}
    return kept | {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        **direct_variables(args, environ),
    }


@dataclass(slots=True, eq=False)
class _Output:
    """The end of what a process writes; the rest is thrown away, or appended to ``log``."""

    stream: asyncio.StreamReader
    log: BinaryIO | None = None
    tail: bytearray = field(default_factory=bytearray)

    async def read(self) -> None:
        while block := await self.stream.read(BLOCK_BYTES):
            self.tail += block
            del self.tail[:-TAIL_BYTES]
            if self.log is not None:
                self.log.write(block)
            if len(block) == BLOCK_BYTES:
                await asyncio.sleep(FLOOD_S)

    @property
    def text(self) -> str:
        return self.tail.decode(errors="replace")

    @property
    def shown(self) -> str:
        """Its last lines, for an error."""
        lines = "\n".join(self.text.splitlines()[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]
        return f"the end of its errors:\n{lines}" if lines.strip() else "it wrote no errors"


class WatchedProcess:
    """A command that runs. lifeline: as long as it is open, the command is kept alive. log: what it writes is appended
    to it, unbuffered."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, log: BinaryIO | None = None) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.output, self.errors = _Output(process.stdout, log), _Output(process.stderr, log)
        self._process, self._lifeline = process, lifeline
        self._readers = [asyncio.ensure_future(each.read()) for each in (self.output, self.errors)]

    async def status(self) -> int:
        """The exit status, once it is there, and the rest of the output is read. 128 and the number of the signal if
        it was killed."""
        status = await self._process.wait()
        if status < 0:  # what watches the command cannot end the rest of it
            self._signal(signal.SIGKILL)
        await asyncio.wait(self._readers, timeout=READ_S)
        return status if status >= 0 else 128 - status

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL, for all that the command has started; returns when it is gone."""
        try:
            if self._process.returncode is None:
                self._signal(signal.SIGTERM)
                await self._gone()
        finally:  # also if it is cancelled once more
            self.release()
        if self._process.returncode is None:
            await self._gone()
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
        self._process._transport.close()  # type: ignore[attr-defined]  # its pipes, of which some is unread

    def release(self) -> None:
        """Have the command killed, without waiting for it. May be called twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for reader in self._readers:
            reader.cancel()

    async def _gone(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), TERM_S)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def started(
    words: Sequence[str], environ: Mapping[str, str], *, file: str = "", log: BinaryIO | None = None
) -> WatchedProcess:
    """Start a command, whose process and all that it starts end with this one (``command_watch``). file: is removed at
    its end. Raises OSError if no process can be started. Await ``stop`` of what is returned, also after its end."""
    read_end, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", command_watch.__file__, str(read_end), file),
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
            pass_fds=[read_end],
            limit=BLOCK_BYTES,
            start_new_session=True,
        )
    except BaseException:
        os.close(lifeline)  # what was started in this moment ends with it
        raise
    finally:
        os.close(read_end)
    return WatchedProcess(process, lifeline, log)


class Commands:
    """Runs ``--agent-command``, once for each play. Belongs to the worker's event loop."""

    blocking = True

    def __init__(self, args: Args) -> None:
        self._args = args
        self._words = shlex.split(args.agent_command)
        self._places = asyncio.Semaphore(max_processes(args))
        self._folder = tempfile.TemporaryDirectory(prefix="buffer_rl_agents_")
        self._running: set[WatchedProcess] = set()

    async def run(self, session: Session, handle: SessionHandle, prompt: Sample, *, name: str) -> Any:
        """What the command says at its end. The wait for a place does not count; the deadline is for the process, with
        its start.

        Raises AgentFailedError if it exits with another status than 0, AgentKilledError if a signal ended it,
        AgentTimeoutError at its deadline, and GiveUp. If no process can be started, the session has failed."""
        async with self._places:
            limit = deadline(name, self._args.agent_timeout_s)
            try:
                async with limit, self._started(session, handle, prompt) as process:
                    return _result(await process.status(), process)
            except OSError as error:
                return session.fail(EngineError(f"no process can be started: {error}", where="--agent-command"))

    async def aclose(self) -> None:
        """Kill what runs, and remove the files."""
        for process in list(self._running):
            process.release()
        self._folder.cleanup()

    @asynccontextmanager
    async def _started(self, session: Session, handle: SessionHandle, prompt: Sample) -> AsyncIterator[WatchedProcess]:
        file = self._file(sample_json(prompt, handle.base_url, handle.api_key, evaluation=session.evaluation))
        environ = session_variables(handle.base_url, handle.api_key, self._args, os.environ)
        async with AsyncExitStack() as left:
            left.callback(file.unlink, missing_ok=True)
            process = await started(self._words, {**environ, SAMPLE_VARIABLE: str(file)}, file=str(file))
            self._running.add(process)
            left.callback(self._running.discard, process)
            left.push_async_callback(process.stop)
            yield process

    def _file(self, content: Mapping[str, Any]) -> Path:
        """A file that its owner alone can read, in a folder that is so too."""
        number, path = tempfile.mkstemp(suffix=".json", dir=self._folder.name)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(content, file, default=str)
        return Path(path)


def _result(status: int, process: WatchedProcess) -> Any:
    if status > 128 and (number := status - 128) in set(signal.Signals):
        raise AgentKilledError(f"its process was killed by {signal.Signals(number).name}; {process.errors.shown}")
    if status:
        raise AgentFailedError(f"its process exited with status {status}; {process.errors.shown}")
    return Finish.of_output(process.output.text).result()
