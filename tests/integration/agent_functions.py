"""Agents of runs, one that kills processes of its run, and a filter that notes the rows."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from buffer_rl.agents import remote_client
from buffer_rl.agents.programs import Program
from buffer_rl.agents.remote import Remote
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.cluster.process import auth_headers
from buffer_rl.embedded.launcher import EmbeddedEngine, EmbeddedLauncher
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.lease import current_lease
from buffer_rl.verbs.drill.faults import descendants

GAME = Path(__file__).parents[2] / "examples" / "agent" / "agent.py"
PHASES = runpy.run_path(str(Path(__file__).with_name("agent_program.py")))["PHASES"]


async def asks_and_plays(args: Any, sample: Any, session: Any) -> Any:
    """Two sub-agents at once, whose questions differ, and the game of the example, which is scored."""
    await asyncio.gather(*(session.chat([{"role": "user", "content": text}]) for text in ("0-1", "2-3")))
    play = PluginRegistry().resolve("agent", f"{GAME}:play")
    return await play(args, sample, session)


def note_rows(args: Any, groups: list[Any]) -> None:
    """Append a line for each row of the rollout to ``rows.jsonl`` in the run's folder."""
    with (Path(args.run_dir) / "rows.jsonl").open("a", encoding="utf-8") as file:
        for row in (row for group in groups for row in group.rows):
            line = {
                "row": str(row.row_id),
                "tokens": row.tokens,
                "mask": row.loss_mask,
                "log_probs": row.rollout_log_probs,
                "spans": [[span.version, span.start, span.end] for span in row.weight_versions],
            }
            file.write(json.dumps(line) + "\n")


async def plays_plainly(args: Any, sample: Any, session: Any) -> Any:
    """The game alone, as ``agent_program.py`` plays it."""
    play = PluginRegistry().resolve("agent", f"{GAME}:play")
    return await play(args, sample, session)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for ``condition``, a minute at most."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - it is about other processes
            await asyncio.sleep(0.01)


class NotedLauncher(EmbeddedLauncher):
    """Starts the embedded engine, and writes its process and address into the run's folder."""

    def __call__(self, args: Any, index: int, log_path: str) -> EmbeddedEngine:
        engine = super().__call__(args, index, log_path)
        Path(args.run_dir, "engine").write_text(f"{engine.process.pid} {engine.url}")
        return engine


noted = NotedLauncher("-m", "buffer_rl.embedded.server")


class Killer:
    """Kills the rollout worker, the Buffer or the driver of a run, as its folder is called, once in each of ``PHASES``:
    rollout i + 1 in phase i of one of its plays, in which a turn of the group is recorded."""

    def __init__(self, args: Any, sample: Any) -> None:
        self._args, self._row, self._folder = args, str(sample.row_id), Path(args.run_dir)
        self._lease = current_lease()
        rollout, place = divmod(sample.uid.row, args.rollout_batch_size)
        is_chosen = (place, sample.sample_index) == (rollout % args.rollout_batch_size, rollout % 4)
        is_victim = self._folder.name in ("worker", "buffer", "driver")
        self._phase = PHASES[rollout - 1] if is_victim and is_chosen and 0 < rollout <= len(PHASES) else ""

    async def reach(self, phase: str) -> None:
        """A point of the play."""
        if await self._is_time(phase):
            await self._kill("")

    async def sampled(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """What ``ask`` gives. The engine is stopped before, and goes on when the victim is dead."""
        if not await self._is_time("while it is sampled"):
            return await ask()
        pid, url = (self._folder / "engine").read_text().split()
        os.kill(int(pid), signal.SIGSTOP)
        try:
            answer = ask()
            await until(lambda: self._is_at(url))
        finally:
            await self._kill(f"; kill -CONT {pid}")
        return await answer

    async def _kill(self, then: str) -> None:
        """The play stays where it is until it ends with the victim, or the victim is replaced."""
        victim = self._victim()
        await asyncio.to_thread(subprocess.run, f"kill -KILL {victim}{then}", shell=True, start_new_session=True)
        await until(lambda: self._victim() != victim)

    def _is_at(self, url: str) -> bool:
        """Whether the engine has all requests of the rollout, that of this sample among them."""
        assert self._lease.requests is not None
        running = set(self._lease.requests._running)
        request = urllib.request.Request(
            f"{self._args.router_url}/workers", headers=auth_headers(self._args.engine_api_key)
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            loads = {worker["url"]: worker["load"] for worker in json.load(response)["workers"]}
        is_same = running == self._lease.requests._running and len(running) == loads[url]
        return is_same and any(self._row in rid for rid in running)

    async def _is_time(self, phase: str) -> bool:
        """Whether to kill now. What is to be gone with the driver is noted."""
        if phase != self._phase:
            return False
        mark = self._folder / f"killed {phase}"
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        await until(lambda: self._num_recorded() > 0)
        if self._folder.name == "driver":
            processes = [each for root in (self._victim(), os.getppid()) for each in descendants(root)]
            mark.write_text("".join(f"{each.pid} {each.command}\n" for each in processes))
        return True

    def _num_recorded(self) -> int:
        """Turns of the group that the next lease may replay."""
        group = self._lease.group
        assert group is not None
        query = "SELECT count(*) FROM turns WHERE sample LIKE ? AND version = ?"
        with closing(sqlite3.connect(self._folder / "agents.sqlite")) as journal:
            return int(journal.execute(query, (f"%|{group.uid}|%", group.version)).fetchone()[0])

    def _victim(self) -> int:
        if self._folder.name == "worker":
            return os.getpid()
        if self._folder.name == "driver":
            return int((self._folder / "driver.pid").read_text())
        with closing(LedgerAudit(self._folder / "ledger.sqlite")) as audit:
            return int(audit.facts()["note:pid"].split()[0])


def finish(session: Any, body: Any) -> None:
    """Tell the session's end over HTTP, as a program does."""
    headers = {"Authorization": f"Bearer {session.api_key}"}
    request = urllib.request.Request(f"{session.base_url}/finish", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


class Programs(Remote):
    """Four programs a worker that play as ``agent_program.py``, and die as it does."""

    def programs(self, args: Any) -> list[Program]:
        program = str(Path(__file__).with_name("agent_program.py"))
        words = [sys.executable, "-I", "-S", program, remote_client.__file__]
        return [Program(option="--agent-path", words=words, environ={"KILLS": args.run_dir})] * 4


programs = Programs()


async def plays_and_kills(args: Any, sample: Any, session: Any) -> Any:
    """Two questions, and what ``asks_and_plays`` does; one sample of a rollout kills, see ``Killer``."""
    killer = Killer(args, sample)
    first, second = ([{"role": "user", "content": text}] for text in ("4-5", "6-7"))
    await killer.reach("before the request")
    await session.chat(first)
    await killer.sampled(lambda: session.chat(second))
    await killer.reach("between turns")
    reward = await asks_and_plays(args, sample, session)
    await killer.reach("before the finish")
    await asyncio.to_thread(finish, session, {"reward": reward})
    await killer.reach("finished")
