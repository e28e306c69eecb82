"""An agent of runs, and a filter that notes its rows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

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
