"""Episodes of verifiers over an engine in this process, for the tests with the real package and with a stand-in."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from buffer_rl.agents.programs import Program
from buffer_rl.agents.remote import Remote
from buffer_rl.records.groups import SampleGroup
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl_verifiers.agent import episodes
from harness.agent_play import AgentEngine, context_of, make_groups, make_ticket
from harness.fake_client import client_of
from harness.processes import descendants


class Episodes(Remote):
    """``--agent-path verifiers`` with these options, which ``make_args`` does not have."""

    def __init__(self, python: str, **options: Any) -> None:
        self._own = {"verifiers_programs": 1, "verifiers_episodes": 4, "verifiers_args": {}, **options}
        self._own["verifiers_python"] = python

    def programs(self, args: Any) -> list[Program]:
        own: Any = SimpleNamespace(**self._own, reward_key=args.reward_key)
        return episodes.programs(own)


def groups_of(taskset: str, tasks: list[dict[str, Any]], num_samples: int) -> list[SampleGroup]:
    """Groups whose rows are of these tasks."""
    groups = make_groups(len(tasks), num_samples)
    for group, task in zip(groups, tasks, strict=True):
        for sample in group:
            sample.metadata = {"verifiers": {"taskset": taskset, "task": task}}
    return groups


async def play(
    agent: Any,
    engine: AgentEngine,
    taskset: str,
    tasks: list[dict[str, Any]],
    *,
    run_dir: Path,
    num_samples: int = 1,
    **options: Any,
) -> tuple[FakeBuffer, dict[str, float]]:
    """A rollout with a group for each task but those that fail, and its metrics of agents without their first part."""
    finished = options.pop("num_finished", len(tasks))
    given = {"custom_rm_path": "harness.agent_play:one", "rollout_batch_size": finished, **options}
    async with context_of(engine, agent, run_dir=run_dir, **given) as context:
        fake = FakeBuffer(groups_of(taskset, tasks, num_samples), make_ticket(finished))
        buffer = client_of(fake, context)
        with context.active(buffer):
            output = await DefaultRollout(context.args)(context.args, 0, buffer, False)
    return fake, {
        name.removeprefix("agent/"): value for name, value in output.metrics.items() if name.startswith("agent/")
    }


def programs_left() -> list[int]:
    """Programs of verifiers that this process has started, and what they have started."""
    return [each.pid for each in descendants(os.getpid()) if "buffer_rl_verifiers" in each.command]
