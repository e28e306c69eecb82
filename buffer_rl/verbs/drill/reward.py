"""The run's own reward, which fails on order: a fault meets a sample once, and its next attempt is scored.

What it needs is in the environment variable ``PLAN``, which reaches every process of the run.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.user_functions import call_user

PLAN = "DRILL_REWARD_PLAN"
"""JSON: ``folder`` for marks of faults that were put in, ``every``: one of how many groups meets one, ``kinds``."""
KINDS = ("raise", "nan", "exit", "hang", "http_429")


class TooManyRequestsError(Exception):
    """As a judge's client raises it."""

    status = 429


async def score(args: Any, sample: Any) -> Any:
    """The number that the run's own reward gives, unless it is the turn of a fault."""
    plan = json.loads(os.environ[PLAN])
    kind = fault_of(sample, plan)
    if kind and _is_first(Path(plan["folder"], f"{sample.uid}.{sample.sample_index}.{kind}".replace("/", "_"))):
        return await _fail(kind)
    return await _own(args, sample)


def fault_of(sample: Any, plan: dict[str, Any]) -> str | None:
    """Which fault the sample meets: the first one of a group may, by the group's identity alone. A second one in a
    group could meet its last attempt."""
    number = int.from_bytes(hashlib.sha256(str(sample.uid).encode()).digest()[:8], "big")
    if sample.sample_index or number % int(plan["every"]):
        return None
    kinds = plan["kinds"]
    return str(kinds[number // int(plan["every"]) % len(kinds)])


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def reward_marks(folder: Path) -> list[tuple[str, str]]:
    """The groups that met a fault of the reward, with its kind."""
    names = [path.name.rsplit(".", 2) for path in folder.iterdir()]
    return [(uid, kind) for uid, _, kind in names]


async def _fail(kind: str) -> float:
    if kind == "nan":
        return float("nan")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "http_429":
        raise TooManyRequestsError("the drill's judge has too many requests")
    if kind == "hang":
        await asyncio.sleep(3600.0)
    raise RuntimeError("the drill's reward fails here")


async def _own(args: Any, sample: Any) -> Any:
    function = _resolved(tuple(args.plugin), json.loads(os.environ[PLAN])["reward"])
    return await call_user(function, functools.partial(function, args, sample))


@functools.cache
def _resolved(plugins: tuple[str, ...], reference: str) -> Any:
    return PluginRegistry.from_flags(list(plugins)).resolve("reward", reference)
