"""Programs that a worker starts to lease its samples: real processes, which die, hang and leave others behind."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.agents import command, play, programs, remote
from buffer_rl.agents.programs import Program
from buffer_rl.agents.remote import Remote
from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import Status
from harness.agent_play import AgentEngine, roll
from harness.agent_programs import program
from harness.processes import descendants, holds_within

GONE_S = 20.0
LEASING = """
import importlib.util
spec = importlib.util.spec_from_file_location("remote_client", os.environ["BUFFER_RL_REMOTE_CLIENT"])
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)
url, key = os.environ["BUFFER_RL_LEASE_URL"], os.environ["BUFFER_RL_LEASE_API_KEY"]
assert {name for name in os.environ if name.startswith("BUFFER_RL_")} == {
    "BUFFER_RL_LEASE_URL", "BUFFER_RL_LEASE_API_KEY", "BUFFER_RL_REMOTE_CLIENT"}
for episode in client.leases(url, key, wait_s=5.0):
    with episode:
        index = int(episode.sample["row_id"].split("/")[1][0])
        answer = ask(episode.sample["prompt"], base=episode.base_url, key=episode.api_key)
"""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "GRACE_S", 0.3)
    monkeypatch.setattr(command, "TERM_S", 0.3)
    monkeypatch.setattr(programs, "PAUSE_S", 0.05)
    monkeypatch.setenv("BUFFER_RL_ENGINE_API_KEY", "hunter2")


class Starting(Remote):
    """Starts ``number`` programs of the body ``LEASING`` and ``body``."""

    def __init__(self, folder: Path, body: str, number: int = 1, start: str = LEASING) -> None:
        self.words = shlex.split(program(folder, start + body))
        self.number = number

    def programs(self, args: Any) -> list[Program]:
        return [Program(option="--my-python", words=self.words, environ={"MINE": "yes"})] * self.number


async def rolled(agent: Any, run_dir: Path, **options: Any) -> Any:
    given = {"num_samples": 2, "run_dir": run_dir, **options}
    fake, metrics = await asyncio.wait_for(roll(agent, AgentEngine(), **given), 60)
    return fake, {name.removeprefix("agent/"): value for name, value in metrics.items() if name.startswith("agent/")}


def left_of(folder: Path) -> list[int]:
    return [each.pid for each in descendants(os.getpid()) if str(folder) in each.command]


async def test_programs_play_the_samples_and_what_they_write_is_logged(tmp_path: Path) -> None:
    body = """
        print("program", os.environ["MINE"], flush=True)
        episode.finish({"score": 0.25 * index, "length": len(answer)})
"""
    fake, metrics = await rolled(Starting(tmp_path, body, 2), tmp_path, num_samples=4, reward_key="score")
    assert [each.reward for each in fake.finished[0]] == [{"score": 0.25 * i, "length": 1.0} for i in range(4)]
    assert (metrics["turns"], metrics.get("failed"), metrics.get("killed")) == (1, None, None)
    logs = [path.read_text() for path in sorted((tmp_path / "logs").glob("agents_0_*.log"))]
    assert len(logs) == 2
    assert sum(log.count("program yes") for log in logs) >= 4  # other groups are played meanwhile
    assert holds_within(GONE_S, lambda: left_of(tmp_path) == [])


async def test_a_program_that_dies_is_started_again_and_its_sample_has_the_same_answers(tmp_path: Path) -> None:
    """Its death is noticed at once: a heartbeat is missed after 30 s only."""
    body = f"""
        if not os.path.exists({str(tmp_path / "died")!r}):
            open({str(tmp_path / "died")!r}, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        episode.finish(0.5)
"""
    began = time.monotonic()
    fake, metrics = await rolled(Starting(tmp_path, body), tmp_path, num_samples=1)
    assert time.monotonic() - began < 20
    (sample,) = fake.finished[0]
    assert (sample.status, sample.reward, metrics["killed"]) == (Status.COMPLETED, 0.5, 1)
    assert metrics.get("failed") is None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("sys.exit('verses is not installed')", "with status 1; the end of its errors:\nverses is not installed"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "with status 137; it wrote no errors"),
        (None, "with status 127; the end of its errors:\n/no/such/python cannot be run"),
    ],
)
async def test_a_program_that_cannot_be_started_ends_the_run_with_the_end_of_its_errors(
    tmp_path: Path, body: str | None, named: str
) -> None:
    agent = Starting(tmp_path, body or "", start="")
    if body is None:
        agent.words = ["/no/such/python", "play.py"]
    with pytest.raises(ConfigError) as caught:
        await rolled(agent, tmp_path)
    for part in ("--my-python: ", "ended 3 times in a row before it had a sample, at last", named):
        assert part in str(caught.value)


async def test_programs_that_lease_nothing_end_the_run_with_a_word_on_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STARTS_S", 1.0)
    with pytest.raises(ConfigError, match=r"no agent has leased a sample for 1 s") as caught:
        await rolled(Starting(tmp_path, "time.sleep(600)", start=""), tmp_path, agent_timeout_s=0.5)
    assert "logs/agents_*.log" in caught.value.hint
    assert holds_within(GONE_S, lambda: left_of(tmp_path) == [])


async def test_what_a_program_has_started_ends_with_the_worker_though_it_is_deaf(tmp_path: Path) -> None:
    body = f"""
        code = "import time; time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code, {str(tmp_path)!r}], start_new_session=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        episode.finish(1.0)
"""
    fake, _ = await rolled(Starting(tmp_path, body), tmp_path, num_samples=1)
    assert fake.finished[0][0].reward == 1.0
    assert holds_within(GONE_S, lambda: left_of(tmp_path) == [])
