"""Episodes of the real package: several agents in one, and rewards that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.records.groups import Status
from harness.agent_play import AgentEngine
from harness.processes import holds_within
from harness.verifiers_play import Episodes, play, programs_left

from .conftest import HERE

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(300)]
ENDS_S = 200.0


@pytest.fixture(autouse=True)
def started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


async def played(agent: Any, engine: AgentEngine, taskset: str, tasks: list[dict[str, Any]], **options: Any) -> Any:
    found = await asyncio.wait_for(play(agent, engine, taskset, tasks, **options), ENDS_S)
    assert holds_within(20, lambda: programs_left() == [])
    return found


async def test_of_an_assistant_and_its_simulated_user_the_assistant_alone_is_trained(
    verifiers_python: str, tmp_path: Path
) -> None:
    """The user speaks twice and then ends it. Both are asked at the same session."""

    def say(prompt: str, params: dict[str, Any]) -> str:
        if "role-playing" not in prompt:
            return "aa"
        return "###DONE###" if prompt.count("aa") == 2 else "go on"

    agent = Episodes(verifiers_python, verifiers_args={"id": "user-sim"})
    task = {"idx": 0, "prompt": "b=", "letter": "a"}
    options = {"run_dir": tmp_path, "rollout_max_response_len": 16, "reward_key": "total"}
    fake, metrics = await played(agent, AgentEngine(say), "letters_taskset", [task], **options)
    (sample,) = fake.finished[0]
    assert sample.reward == {"share": 1.0, "begins": 1.0, "length": 2.0, "user_turns": 3.0, "total": 1.5}
    assert (metrics["turns"], metrics["untrained"], metrics.get("failed")) == (5, 3, None)
    assert [row.loss_mask for row in sample.rows] == [[1] * 3 + [0] * len("ugo ona") + [1] * 3]


async def test_rewards_that_raise_or_leave_python_are_computed_in_a_second_play_and_one_that_hangs_is_cut(
    verifiers_python: str, tmp_path: Path
) -> None:
    names = ("raise", "exit", "hang", "well")
    tasks = [{"idx": n, "prompt": name, "mark": str(tmp_path / name)} for n, name in enumerate(names)]
    options = {"run_dir": tmp_path, "agent_timeout_s": 45.0, "agent_heartbeat_s": 3.0}
    fake, metrics = await played(Episodes(verifiers_python), AgentEngine(), "faulty_taskset", tasks, **options)
    found = {str(group.uid): (group[0].status, group[0].reward) for group in fake.finished}
    assert found == {
        "source:0:0": (Status.COMPLETED, 0.75),
        "source:1:0": (Status.COMPLETED, 0.75),
        "source:2:0": (Status.TRUNCATED, 0.0),
        "source:3:0": (Status.COMPLETED, 0.25),
    }
    assert (metrics["failed"] * 4, metrics["end_timeout"] * 4, metrics.get("killed")) == (2, 1, None)
    log = (tmp_path / "logs" / "agents_0_0.log").read_text()
    for part in ("no luck", "SystemExit: out"):
        assert part in log
