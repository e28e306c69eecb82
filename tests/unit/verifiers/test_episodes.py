"""Episodes as samples: what becomes of those that raise, hang, end the program or block it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.agents import command, programs
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import Status
from harness.agent_play import AgentEngine
from harness.processes import holds_within
from harness.verifiers_play import Episodes, play, programs_left

GONE_S = 20.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TERM_S", 0.3)
    monkeypatch.setattr(programs, "PAUSE_S", 0.05)


async def played(toy: Path, *prompts: str, agent: Any = None, **options: Any) -> Any:
    tasks = [{"idx": number, "prompt": prompt} for number, prompt in enumerate(prompts)]
    given = {"agent_heartbeat_s": 1.5, **options}
    playing = play(agent or Episodes(sys.executable), AgentEngine(), "toy", tasks, run_dir=toy, **given)
    fake, metrics = await asyncio.wait_for(playing, 90)
    assert holds_within(GONE_S, lambda: programs_left() == [])
    return fake, metrics


async def test_an_episode_has_the_reward_of_its_trained_agents_and_others_are_context(toy: Path) -> None:
    fake, metrics = await played(toy, "one", "two", num_samples=2)
    assert [each.reward for group in fake.finished for each in group] == [1.0] * 4
    assert [len(each.rows) for group in fake.finished for each in group] == [1] * 4
    assert (metrics["turns"], metrics["untrained"], metrics.get("failed")) == (1.5, 0.5, None)


@pytest.mark.slow
async def test_with_a_reward_key_its_rewards_and_metrics_are_named(toy: Path) -> None:
    fake, _ = await played(toy, "one", reward_key="total")
    assert fake.finished[0][0].reward == {"score": 0.5, "half": 1.0, "words": 1.0, "total": 1.0}


@pytest.mark.slow
async def test_an_episode_that_fails_or_ends_its_program_is_played_again(toy: Path) -> None:
    """A process that is killed costs no play; what is not valid, and ``SystemExit`` of a taskset, do."""
    prompts = [f"{what} {toy / what}" for what in ("raise", "exit")]
    fake, metrics = await played(toy, *prompts)
    assert [each.reward for group in fake.finished for each in group] == [1.0, 1.0]
    assert (metrics["failed"], metrics.get("killed")) == (1.0, None)
    fake, metrics = await played(toy, f"die {toy / 'die'}")
    assert (fake.finished[0][0].reward, metrics["killed"], metrics.get("failed")) == (1.0, 1.0, None)
    log = (toy / "logs" / "agents_0_0.log").read_text()
    assert "EpisodeError: ValueError: no luck" in log
    assert "SystemExit: out" in log


@pytest.mark.slow
async def test_an_episode_that_hangs_is_truncated_and_its_program_plays_on(toy: Path) -> None:
    agent = Episodes(sys.executable, verifiers_episodes=1)
    options = {"agent_timeout_s": 3.0, "agent_heartbeat_s": 0.9}
    fake, metrics = await played(toy, f"hang {toy / 'hang'}", "one", agent=agent, **options)
    found = sorted((str(group.uid), group[0].status) for group in fake.finished)
    assert found == [("source:0:0", Status.TRUNCATED), ("source:1:0", Status.COMPLETED)]
    assert (metrics["end_timeout"], metrics.get("killed")) == (0.5, None)


@pytest.mark.slow
async def test_an_episode_that_blocks_its_program_ends_it_and_another_one_is_started(toy: Path) -> None:
    agent = Episodes(sys.executable, verifiers_episodes=1)
    options = {"agent_timeout_s": 12.0, "agent_heartbeat_s": 0.9}
    await played(toy, f"block {toy / 'block'}", "one", agent=agent, **options)
    assert "an episode blocks the event loop" in (toy / "logs" / "agents_0_0.log").read_text()


@pytest.mark.slow
async def test_rows_of_no_taskset_are_named(toy: Path) -> None:
    tasks = [{"idx": number, "prompt": "one"} for number in range(3)]
    playing = play(Episodes(sys.executable), AgentEngine(), "none", tasks, run_dir=toy, num_finished=1)
    with pytest.raises(RolloutError, match="taskset 'none' not found"):
        await asyncio.wait_for(playing, 90)
