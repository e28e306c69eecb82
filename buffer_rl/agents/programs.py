"""Programs that a rollout worker starts to play its samples: they lease them as agents elsewhere do, one after another.

One that ends is started again; the samples that it held are played again. All end with the worker, however it ends
(``command_watch``).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import BinaryIO

from buffer_rl.agents import remote_client
from buffer_rl.agents.command import OF_THE_RUN, started
from buffer_rl.args import Args
from buffer_rl.cluster.environment import direct_variables
from buffer_rl.errors import BufferRLError, ConfigError

_log = logging.getLogger(__name__)
URL_VARIABLE, KEY_VARIABLE = "BUFFER_RL_LEASE_URL", "BUFFER_RL_LEASE_API_KEY"
CLIENT_VARIABLE = "BUFFER_RL_REMOTE_CLIENT"
STARTS = 3
"""How often a program may end in a row without having had a sample."""
PAUSE_S = 0.5
"""Before a program is started again."""
ENDS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command that leases samples: from the address in ``BUFFER_RL_LEASE_URL``, with the key in
    ``BUFFER_RL_LEASE_API_KEY``; ``BUFFER_RL_REMOTE_CLIENT`` is the path of ``remote_client.py``.

    option: that names the command, for errors. words: program and arguments. environ: further variables.

    Example:
        Program(option="--my-python", words=["python3", "/opt/play.py"])
    """

    option: str
    words: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Programs:
    """The programs of one rollout worker. Belongs to its event loop.

    log: a path with one ``{}`` for the number of the program, which its output is appended to; None for none.
    lost: called with the number of a program that has ended. failed: called with the error if one cannot be started.
    """

    _programs: Sequence[Program]
    _args: Args
    _log: str | None
    _: KW_ONLY
    lost: Callable[[int], None]
    failed: Callable[[BufferRLError], None]

    def __post_init__(self) -> None:
        self._idle_starts = [0] * len(self._programs)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, url: str, key: str) -> None:
        """Keep them running from now on. url: of the leases; the number of each program is appended, as a path."""
        self._tasks = [
            asyncio.get_running_loop().create_task(self._keep(number, f"{url}/programs/{number}", key))
            for number in range(len(self._programs))
        ]

    def has_leased(self, number: int) -> None:
        """Note that a program has got a sample."""
        if number < len(self._idle_starts):
            self._idle_starts[number] = 0

    async def aclose(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ENDS_S)

    async def _keep(self, number: int, url: str, key: str) -> None:
        program = self._programs[number]
        while True:
            self._idle_starts[number] += 1
            try:
                end = await self._run(number, self._environ(program, url, key))
            except OSError as error:
                end = f"no process can be started: {error}"
            self.lost(number)
            if self._idle_starts[number] >= STARTS:
                break
            _log.warning("a program of %s is started again. It ended %s", program.option, end)
            await asyncio.sleep(PAUSE_S)
        what = f"a program ended {STARTS} times in a row before it had a sample, at last {end}"
        self.failed(ConfigError(what, where=f"{program.option}: {' '.join(program.words)[:200]}"))

    async def _run(self, number: int, environ: Mapping[str, str]) -> str:
        """How it ended."""
        with self._logged(number) as log:
            process = await started(self._programs[number].words, environ, log=log)
            try:
                status = await process.status()
                return f"with status {status}; {process.errors.shown}"
            finally:
                await process.stop()

    def _logged(self, number: int) -> AbstractContextManager[BinaryIO | None]:
        if self._log is None:
            return nullcontext()
        path = Path(self._log.format(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)

    def _environ(self, program: Program, url: str, key: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_RUN)}
        own = {URL_VARIABLE: url, KEY_VARIABLE: key, CLIENT_VARIABLE: remote_client.__file__}
        return kept | direct_variables(self._args) | dict(program.environ) | own
