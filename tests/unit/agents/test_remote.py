"""Agents elsewhere: leases, heartbeats and finishes over HTTP, with the client that ships."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.agents import play, remote_client
from buffer_rl.agents.remote import Leases, file_of, remote
from buffer_rl.agents.remote_client import Episode, leases
from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import Status
from harness.agent_play import AgentEngine, context_of, make_args, roll, user
from harness.agent_programs import CLIENT, PRELUDE

HEARTBEAT_S = 1.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "GRACE_S", 0.3)
    monkeypatch.setattr(remote_client, "PAUSE_S", 0.05)


def address(run_dir: Path) -> Path:
    file = file_of(run_dir, 0)
    assert file is not None
    return file


def ask(episode: Episode, path: str = "/chat/completions", body: Any = None) -> tuple[int, Any]:
    body = {"model": "policy", "messages": user("go")} if body is None else body
    return remote_client._post(episode.base_url + path, episode.api_key, body)


def served(run_dir: Path, act: Callable[[Episode], object]) -> threading.Thread:
    """A thread in which ``act`` plays each episode until the run ends."""

    def serve() -> None:
        for episode in leases(str(address(run_dir)), wait_s=5.0, patience_s=60.0):
            with episode:
                act(episode)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


async def rolled(run_dir: Path, act: Callable[[Episode], object], **options: Any) -> Any:
    thread = served(run_dir, act)
    given = {"num_samples": 2, "agent_heartbeat_s": HEARTBEAT_S, **options}
    fake, metrics = await roll(remote, given.pop("engine", AgentEngine()), run_dir=run_dir, **given)
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()  # the file was removed
    return fake, {name.removeprefix("agent/"): value for name, value in metrics.items() if name.startswith("agent/")}


async def test_an_agent_elsewhere_leases_asks_and_finishes(tmp_path: Path) -> None:
    modes, samples = [], []

    def act(episode: Episode) -> None:
        modes.append(oct(address(tmp_path).stat().st_mode & 0o777))
        samples.append(episode.sample)
        assert ask(episode)[0] == 200
        index = int(episode.sample["row_id"].split("/")[1][0])
        assert episode.finish(0.25 if index else None)

    fake, metrics = await rolled(tmp_path, act)
    assert [(each.status, each.reward) for each in fake.finished[0]] == [
        (Status.COMPLETED, 1.0),
        (Status.COMPLETED, 0.25),
    ]
    assert (metrics["turns"], metrics.get("failed", 0), set(modes)) == (1, 0, {"0o600"})
    assert {name: samples[0][name] for name in ("prompt", "label", "evaluation")} == {
        "prompt": user("p0"),
        "label": None,
        "evaluation": False,
    }


async def test_the_client_is_one_file_of_the_standard_library(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(CLIENT, folder / "my_client.py")
    (folder / "agent.py").write_text(
        PRELUDE
        + f"""
sys.path.insert(0, {str(folder)!r})
from my_client import leases
for episode in leases({str(address(tmp_path))!r}, wait_s=1.0):
    with episode:
        answer = ask(episode.sample["prompt"], base=episode.base_url, key=episode.api_key)
        episode.finish({{"score": 0.5, "length": len(answer)}})
assert not [name for name in sys.modules if name.startswith(("buffer_rl", "numpy"))]
""",
        encoding="utf-8",
    )
    agent = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-I", "-S", str(folder / "agent.py")])
    try:
        fake, _ = await roll(remote, AgentEngine(), run_dir=tmp_path, reward_key="score")
        assert await asyncio.to_thread(agent.wait, 60) == 0
    finally:
        agent.kill()
        agent.wait()
    assert [each.reward for each in fake.finished[0]] == [{"score": 0.5, "length": 1.0}] * 2


async def test_an_agent_without_heartbeats_has_lost_its_sample_which_is_played_again(tmp_path: Path) -> None:
    late: list[Any] = []

    def act(episode: Episode) -> None:
        assert ask(episode)[0] == 200
        if not late:
            late.append(episode)
            episode.ended.set()  # as if it was killed: no more heartbeats
            episode._is_finished = True
            return
        if len(late) == 1:
            assert late[0].finish(5.0) is False
            late.append([ask(late[0])[0], ask(late[0], "/finish", {"reward": 5})[0], ask(late[0], "/heartbeat", {})[0]])
        episode.finish(0.5)

    fake, metrics = await rolled(tmp_path, act, num_samples=1)
    assert (fake.finished[0][0].reward, metrics["killed"], late[1]) == (0.5, 1, [410] * 3)
    assert metrics["late"] >= 2


@pytest.mark.slow
async def test_heartbeats_keep_a_lease_and_a_deadline_ends_it(tmp_path: Path) -> None:
    ended: list[bool] = []

    def act(episode: Episode) -> None:
        ask(episode)
        ended.append(episode.ended.wait(30.0))

    options = {"num_samples": 1, "agent_heartbeat_s": 0.6, "agent_timeout_s": 2.5}
    fake, metrics = await rolled(tmp_path, act, **options)
    assert (fake.finished[0][0].status, metrics["end_timeout"], ended) == (Status.TRUNCATED, 1, [True])


async def test_what_an_agent_elsewhere_raises_is_in_the_report(tmp_path: Path) -> None:
    def act(episode: Episode) -> None:
        ask(episode)
        if "p0" in str(episode.sample["prompt"]):
            raise ValueError("no luck")

    fake, _ = await rolled(tmp_path, act, more_groups=1)
    assert [str(group.uid) for group, _ in fake.quarantined] == ["source:0:0"]
    (line,) = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert "ValueError: no luck" in json.loads(line)["error"]


async def test_an_equal_finish_gets_the_first_ones_answer_also_after_the_end(tmp_path: Path) -> None:
    found: list[Any] = []

    def act(episode: Episode) -> None:
        ask(episode)
        if found:
            return
        told = {"reward": 0.5}
        found.extend(ask(episode, "/finish", body) for body in (told, told, {"reward": 0.75}))
        while ask(episode)[0] != 410:
            pass
        found.extend([ask(episode, "/finish", told), ask(episode, "/finish", {"reward": 0.75}), ask(episode)])
        episode.api_key = "wrong"
        found.append(ask(episode, "/finish", told))
        episode._is_finished = True

    fake, _ = await rolled(tmp_path, act)  # the run goes on, as the other sample waits for this agent
    assert [each.reward for each in fake.finished[0]] == [0.5, 1.0]
    assert [status for status, _ in found] == [200, 200, 409, 200, 409, 410, 401]


async def test_a_finish_with_a_reward_for_no_answer_is_refused_each_time_and_is_a_failure(tmp_path: Path) -> None:
    found: list[Any] = []

    def act(episode: Episode) -> None:
        ask(episode)
        if found:
            assert episode.finish(0.5)
            return
        told = {"reward": 1.0, "turn_rewards": {"chatcmpl-none": 1.0}}
        found.extend(ask(episode, "/finish", body) for body in (told, told, {"reward": 0.75}))
        episode._is_finished = True

    fake, metrics = await rolled(tmp_path, act, turn_rewards=True, advantage_estimator="reinforce_plus_plus")
    assert [status for status, _ in found] == [400, 400, 409]
    assert all("no answer is 'chatcmpl-none'" in str(answer) for _, answer in found[:2])
    assert ([each.reward for each in fake.finished[0]], metrics["failed"]) == ([0.5, 0.5], 0.5)


async def test_a_session_behind_a_proxy_has_the_address_by_which_its_sample_was_leased(tmp_path: Path) -> None:
    def act(episode: Episode) -> None:
        there = json.loads(address(tmp_path).read_text())
        headers = {"Authorization": f"Bearer {there['key']}", "Host": "agents.example", "X-Forwarded-Proto": "https"}
        request = urllib.request.Request(f"{there['url']}/lease", b'{"wait_s": 20}', headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            behind.append(json.load(response))
        mine = Episode(dict(behind[0]))  # its heartbeats go to agents.example, which is nowhere
        mine.base_url = there["url"] + mine.base_url.removeprefix("https://agents.example")
        assert all(ask(each)[0] == 200 and each.finish(0.5) for each in (episode, mine))

    behind: list[dict[str, Any]] = []
    await rolled(tmp_path, act)
    assert behind[0]["base_url"].startswith("https://agents.example/sessions/")


async def test_a_sample_that_nobody_leases_is_an_error_that_says_where_to_lease(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await asyncio.wait_for(roll(remote, AgentEngine(), run_dir=tmp_path, agent_timeout_s=0.3), 60)
    for part in ("no agent has leased a sample for 0.3 s", "/lease", str(address(tmp_path)), "remote_client.py"):
        assert part in str(caught.value)


@pytest.mark.slow
async def test_samples_wait_as_long_as_agents_are_at_work(tmp_path: Path) -> None:
    def act(episode: Episode) -> None:
        ask(episode)
        threading.Event().wait(0.5)

    fake, metrics = await rolled(tmp_path, act, num_samples=6, agent_timeout_s=1.5)
    assert [each.status for each in fake.finished[0]] == [Status.COMPLETED] * 6
    assert metrics.get("failed", 0) == 0


@pytest.mark.slow
async def test_samples_wait_for_an_agent_that_was_late_with_one(tmp_path: Path) -> None:
    late: list[Episode] = []

    def act(episode: Episode) -> None:
        ask(episode)
        if not late:
            late.append(episode)
            while ask(episode)[0] != 410:
                threading.Event().wait(0.1)
            threading.Event().wait(1.0)  # it is back within --agent-timeout-s of its deadline

    options = {"agent_timeout_s": 3.0, "agent_heartbeat_s": 30.0, "agent_max_turns": 1000}
    fake, metrics = await rolled(tmp_path, act, **options)
    assert sorted(each.status for each in fake.finished[0]) == [Status.COMPLETED, Status.TRUNCATED]
    assert metrics["end_timeout"] == 0.5


async def test_a_reward_that_is_no_json_is_a_failure_that_says_so(tmp_path: Path) -> None:
    def act(episode: Episode) -> None:
        ask(episode)
        episode.finish(np.float32(0.5) if "p0" in str(episode.sample["prompt"]) else 0.5)

    await rolled(tmp_path, act, more_groups=1)
    (line,) = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert "float32 is not JSON serializable" in json.loads(line)["error"]


async def test_whole_numbers_of_any_size_are_leased(tmp_path: Path) -> None:
    labels: list[Any] = []

    def act(episode: Episode) -> None:
        labels.append(episode.sample["metadata"]["large"])
        ask(episode)

    await rolled(tmp_path, act, num_samples=1, metadata={"large": 10**30})
    assert labels == [10**30]


async def test_leases_ask_for_the_runs_key_and_wait_for_a_sample(tmp_path: Path) -> None:
    async with context_of(AgentEngine(), remote, run_dir=tmp_path) as context:
        agents = play.Agents(context)
        try:
            agents._gateway._start()
            told = json.loads(address(tmp_path).read_text())
            post: Any = remote_client._post
            url = told["url"] + "/lease"
            assert (await asyncio.to_thread(post, url, "wrong", {}))[0] == 401
            assert (await asyncio.to_thread(post, url, told["key"], {"wait_s": 0.1}))[0] == 204
            for body in ({"wait_s": -1}, {"wait_s": "x"}, {"wait_s": 1e9}):
                assert (await asyncio.to_thread(post, url, told["key"], body))[0] == 400

            def refused() -> None:
                next(leases(told["url"], "wrong"))

            with pytest.raises(ValueError, match="answers 401"):
                await asyncio.to_thread(refused)
            again = Leases(context.args, address(tmp_path))
            assert again.allows(b"Bearer " + told["key"].encode())  # a worker that replaces another has its key
        finally:
            await agents.aclose()
    assert not address(tmp_path).exists()


def test_the_key_may_be_given() -> None:
    leases = Leases(make_args(agent_api_key="k" * 20), None)
    assert leases.allows(b"Bearer " + b"k" * 20)
    assert not leases.allows(b"")
