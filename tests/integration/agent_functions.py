"""An agent of runs, and a filter that notes its rows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from buffer_rl.agents import remote_client
from buffer_rl.agents.programs import Program
from buffer_rl.agents.remote import Remote
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.plugin.registry import PluginRegistry

GAME = Path(__file__).parents[2] / "examples" / "agent" / "agent.py"


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


class Programs(Remote):
    """Four programs a worker that play as ``agent_program.py``, and die as it does."""

    def programs(self, args: Any) -> list[Program]:
        program = str(Path(__file__).with_name("agent_program.py"))
        words = [sys.executable, "-I", "-S", program, remote_client.__file__]
        return [Program(option="--agent-path", words=words, environ={"KILLS": args.run_dir})] * 4


programs = Programs()


def send(args: Any, moment: str) -> None:
    """Once in a run, kill the rollout worker or the Buffer if the run's name says so."""
    victim = Path(args.run_dir).name
    if victim not in moment:
        return
    try:
        (Path(args.run_dir) / f"killed_{moment}").touch(exist_ok=False)
    except FileExistsError:
        return
    if victim == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    audit = LedgerAudit(Path(args.run_dir) / "ledger.sqlite")
    os.kill(int(audit.facts()["note:pid"].split()[0]), signal.SIGKILL)
    audit.close()


async def plays_and_kills(args: Any, sample: Any, session: Any) -> Any:
    """As ``asks_and_plays``; two of its samples kill the rollout worker, or the Buffer, in the middle of a play."""
    for text in ("4-5", "6-7"):
        await session.chat([{"role": "user", "content": text}])
        if sample.sample_index == 2 and (sample.uid.row, text) in ((1, "4-5"), (5, "6-7")):
            send(args, f"worker_{text}")
            send(args, f"buffer_{text}")
    return await asks_and_plays(args, sample, session)
