"""Commands as agents: real processes, and what becomes of their samples and of what they have started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.agents import command, command_watch, play
from buffer_rl.agents.options import AgentOptions
from buffer_rl.errors import ConfigError, RolloutError
from buffer_rl.records.groups import Status
from harness.agent_play import AgentEngine, make_args, roll
from harness.agent_programs import program
from harness.processes import descendants, holds_within, is_running

GONE_S = 20.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "GRACE_S", 0.3)
    monkeypatch.setattr(command, "TERM_S", 0.3)


async def rolled(tmp_path: Path, body: str, engine: AgentEngine | None = None, **options: Any) -> Any:
    """A rollout whose agent is ``body``, and its metrics of agents."""
    given = {"agent_path": None, "agent_command": program(tmp_path, body), "num_samples": 1, **options}
    fake, metrics = await roll(None, engine or AgentEngine(), run_dir=tmp_path, **given)
    return fake, {name.removeprefix("agent/"): value for name, value in metrics.items() if name.startswith("agent/")}


async def test_a_line_ends_where_a_program_ends_it_and_not_at_a_separator_in_its_text(tmp_path: Path) -> None:
    body = r"""
ask(sample["prompt"])
if sample["row_id"].endswith("/0.0"):
    sys.stdout.buffer.write('{"give_up": "a\u2028b"}\n'.encode())
"""
    fake, metrics = await rolled(tmp_path, body, num_samples=2)
    assert [each.remove_sample for each in fake.finished[0]] == [True, False]
    assert "gave_up_a_b" in metrics


@pytest.mark.parametrize(
    ("end", "reward"),
    [
        ('print(json.dumps({"reward": 0.25}))', 0.25),
        ('print("done"); print(json.dumps({"reward": 0.25})); print()', 0.25),
        ('assert post("/finish", {"reward": 0.5}) == (200, {"status": "finished"})', 0.5),
        ('print(json.dumps({"reward": 0.25})); post("/finish", {"reward": 0.5})', 0.5),
        ('post("/finish", {})', 1.0),
        ("print(0.25)", 1.0),
        ('print("9 of 9", end="\\r"); print(json.dumps({"reward": 0.25}))', 0.25),
        ("print(json.dumps({'score': 3}))", 1.0),
        ("pass", 1.0),
    ],
)
async def test_the_reward_is_told_over_http_or_by_the_last_line_or_is_that_of_the_run(
    tmp_path: Path, end: str, reward: float
) -> None:
    body = f'assert ask(sample["prompt"]) == "x"\n{end}'
    fake, metrics = await rolled(tmp_path, body)
    (sample,) = fake.finished[0].samples
    assert (sample.status, sample.reward, sample.response) == (Status.COMPLETED, reward, "x")
    assert (metrics["turns"], metrics.get("failed", 0)) == (1, 0)


async def test_a_mapping_is_a_reward_and_a_sample_may_be_given_up(tmp_path: Path) -> None:
    body = """
ask("go")
print(json.dumps({"give_up": "no browser"} if sample["row_id"].endswith("/0.0") else {"reward": {"score": 2}}))
"""
    fake, metrics = await rolled(tmp_path, body, num_samples=2, reward_key="score")
    masked, trained = fake.finished[0].samples
    assert (masked.remove_sample, masked.reward, trained.reward) == (True, None, {"score": 2.0})
    assert metrics["gave_up_no_browser"] == 0.5


async def test_the_environment_and_the_file_tell_of_the_sample_and_of_nothing_that_is_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"BUFFER_RL_ENGINE_API_KEY": "hunter2", "RAY_AUTH_TOKEN": "hunter2", "ANTHROPIC_AUTH_TOKEN": "hunter2"}
    for name, value in {
        **secrets,
        "OPENAI_API_KEY": "mine",
        "MY_TOKEN": "mine",
        "http_proxy": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    note = tmp_path / "note.json"
    body = f"""
path = os.environ["BUFFER_RL_SAMPLE"]
modes = [oct(os.stat(each).st_mode & 0o777) for each in (path, os.path.dirname(path))]
json.dump([dict(os.environ), sample, path, modes, os.getpgid(0), os.getpid()], open({str(note)!r}, "w"))
assert ask("go") == "x"  # not through the proxy
"""
    fake, _ = await rolled(tmp_path, body)
    environ, sample, path, modes, group, _ = json.loads(note.read_text())
    assert "hunter2" not in str(environ)
    assert (environ["MY_TOKEN"], environ["http_proxy"]) == ("mine", "http://127.0.0.1:9")
    assert environ["OPENAI_BASE_URL"] == sample["base_url"] == environ["ANTHROPIC_BASE_URL"] + "/v1"
    assert environ["OPENAI_API_KEY"] == sample["api_key"] == environ["ANTHROPIC_API_KEY"] != "mine"
    expected = {"row_id": "source:0:0/0.0", "prompt": [{"role": "user", "content": "p0"}], "label": None}
    assert {name: sample[name] for name in expected} == expected
    assert (sample["metadata"], sample["evaluation"]) == (fake.finished[0][0].metadata, False)
    assert modes == ["0o600", "0o700"]
    assert not Path(path).parent.exists()
    assert group != os.getpgid(0)


async def test_a_command_that_exits_with_3_is_run_once_more_and_its_siblings_are_trained(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    body = f"""
ask("go")
if sample["row_id"].endswith("/0.0") and not os.path.exists({str(mark)!r}):
    open({str(mark)!r}, "w")
    sys.exit(3)
print(json.dumps({{"reward": 0.5}}))
"""
    fake, metrics = await rolled(tmp_path, body, num_samples=2)
    assert [(each.status, each.reward) for each in fake.finished[0]] == [(Status.COMPLETED, 0.5)] * 2
    assert (metrics["failed"], fake.failures) == (0.5, {})


@pytest.mark.parametrize(
    ("end", "what"),
    [
        ('print("no luck", file=sys.stderr); sys.exit(3)', r"exited with status 3; .*\n.*no luck"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
        ("""print('{"reward": "yes"}')""", "its finish cannot be read: the reward is 'yes'"),
        ("""print('{"reward": NaN}')""", "its finish cannot be read: .*(nan|finite)"),
        ("""print('{"reward": 1.0')""", "its finish is no JSON"),
        ('assert post("/finish", {"reward": [1]})[0] == 400', r"its finish cannot be read: .*\[1\]"),
        ('assert post("/finish", {"rewrad": 1})[0] == 400', "unknown names"),
        ('post("/finish", {"failed": "the browser is gone"})', "the browser is gone"),
    ],
)
async def test_why_a_command_has_failed_is_in_the_error_and_the_report(tmp_path: Path, end: str, what: str) -> None:
    body = f'ask("go")\nif "p0" in str(sample["prompt"]):\n    {end}'
    fake, _ = await rolled(tmp_path, body, more_groups=1)
    assert [str(group.uid) for group, _ in fake.quarantined] == ["source:0:0"]
    (line,) = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert re.search(what, json.loads(line)["error"])


async def test_a_command_that_asks_for_nothing_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="had asked for no answer"):
        await rolled(tmp_path, "pass", more_groups=2)


STARTS_OTHERS = """
for session in (False, True):
    for ignores in (False, True):
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=session)
        pids = os.path.join(NOTES, str(child.pid))
        open(pids, "w").close()
open(os.path.join(NOTES, str(os.getpid())), "w").close()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ask("go")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "time.sleep(600)", 'post("/finish", {}); time.sleep(600)', "os._exit(3)"])
async def test_what_a_command_has_started_ends_with_it(tmp_path: Path, end: str) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    body = f"NOTES = {str(notes)!r}\n{STARTS_OTHERS}\n{end}"
    try:
        fake, _ = await rolled(tmp_path, body, agent_timeout_s=5.0)
    except RolloutError:
        assert "_exit" in end
    else:
        assert fake.finished[0][0].status is (Status.TRUNCATED if end == "time.sleep(600)" else Status.COMPLETED)
    pids = [int(path.name) for path in notes.iterdir()]
    assert len(pids) >= 5
    assert [pid for pid in pids if is_running(pid)] == []


async def test_a_flood_of_output_is_read_and_not_kept(tmp_path: Path) -> None:
    body = """
ask("go")
for _ in range(64):
    os.write(2, b"e" * 65536)
    os.write(1, b"o" * 65536)
print()
print(json.dumps({"reward": {"score": 0.5, "log": "x" * 500_000}}))
"""
    fake, _ = await rolled(tmp_path, body, reward_key="score")
    assert fake.finished[0][0].reward == {"score": 0.5, "log": "x" * 500_000}

    class Stream:
        blocks = [b"x" * command.BLOCK_BYTES] * 19 + [b"\nend", b""]

        async def read(self, size: int) -> bytes:
            return self.blocks.pop(0)

    output = command._Output(Stream())  # type: ignore[arg-type]
    await output.read()
    assert (len(output.tail), output.text[-4:]) == (command.TAIL_BYTES, "\nend")


@pytest.mark.slow
async def test_processes_wait_for_a_place_and_the_wait_is_not_in_their_deadline(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    body = f"""
os.mkdir({str(lock)!r})  # fails if another one has a place
ask("go")
time.sleep(1.0)
os.rmdir({str(lock)!r})
"""
    fake, metrics = await rolled(tmp_path, body, num_samples=5, agent_max_processes=1, agent_timeout_s=4.0)
    assert [each.status for each in fake.finished[0]] == [Status.COMPLETED] * 5
    assert metrics.get("failed", 0) == 0


async def test_commands_end_if_the_rollout_has_enough_groups(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    body = f"""
open(os.path.join({str(notes)!r}, str(os.getpid())), "w").close()
ask("go")
if "p1" in str(sample["prompt"]):
    time.sleep(600)
while len(os.listdir({str(notes)!r})) < 2:
    time.sleep(0.01)
"""
    options = {"over_sampling_batch_size": 2, "rollout_batch_size": 1, "agent_max_processes": 4}
    fake, _ = await rolled(tmp_path, body, num_groups=1, more_groups=1, **options)
    assert len(fake.finished) == 1
    assert [path.name for path in notes.iterdir() if is_running(int(path.name))] == []


HOLDS = """
import os, subprocess, sys, time
read_end, write_end = os.pipe()
command = [sys.executable, "-I", "-S", sys.argv[1], str(read_end), "", *sys.argv[2:]]
subprocess.Popen(command, pass_fds=[read_end], start_new_session=True)
time.sleep(600)
"""


def test_a_command_and_all_that_it_has_started_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '601'], start_new_session=True); time.sleep(600)"
    holder = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLDS, command_watch.__file__, sys.executable, "-I", "-S", "-c", code]
    )
    try:
        assert holds_within(GONE_S, lambda: len(list(descendants(holder.pid))) >= 3)
        pids = [each.pid for each in descendants(holder.pid)]
    finally:
        holder.kill()
        holder.wait()
    assert holds_within(GONE_S, lambda: not any(map(is_running, pids)))


async def test_a_session_that_has_finished_answers_an_equal_finish_and_refuses_another(tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    body = f"""
ask("go")
first = [post("/finish", {{"reward": reward}}) for reward in (0.5, 0.5, 0.75)]
first = [*(status for status, _ in first), ask("go"), post("/finish", {{}}, key="wrong")[0]]
json.dump(first, open({str(note)!r}, "w"))
"""
    fake, _ = await rolled(tmp_path, body)
    assert fake.finished[0][0].reward == 0.5
    assert json.loads(note.read_text()) == [200, 200, 409, 410, 401]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"agent_command": "no_such_program x"}, "no program 'no_such_program'"),
        ({"agent_command": "'"}, "cannot be split"),
        ({"agent_command": ""}, "it is empty"),
        ({"agent_command": "true", "agent_path": "a:b"}, "a run has one agent"),
        ({"agent_command": "true", "agent_port": 1}, "no agents lease samples"),
        ({"agent_path": "remote", "agent_port": 65530, "num_rollout_workers": 7}, "rollout worker.s port is 65536"),
    ],
)
def test_options_of_commands_that_cannot_be_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        AgentOptions.check(make_args(**{"agent_path": None, **options}))
    AgentOptions.check(make_args(agent_path=None, agent_command="true x"))


def test_a_machine_has_some_processes_for_each_core() -> None:
    cores = len(os.sched_getaffinity(0))
    assert command.max_processes(make_args(num_rollout_workers=1)) == 4 * cores
    assert command.max_processes(make_args(num_rollout_workers=1000)) == 1
    assert command.max_processes(make_args(agent_max_processes=3)) == 3
