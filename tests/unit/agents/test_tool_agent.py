"""The built-in agent, and the options of agents."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.agents.options import AgentOptions
from buffer_rl.agents.tools import MOST_ERROR_TEXT, ToolAgent
from buffer_rl.cli import main
from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import Status
from harness.agent_play import AgentEngine, make_args, roll


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


def words(text: str) -> list[str]:
    """Split a text.

    Args:
        text: what to split
    """
    return text.split()


def fails(how: str) -> str:
    """Fail.

    Args:
        how: an exception's name
    """
    raise {"value": ValueError("no " * 400), "exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[how]


def gives(what: str) -> Any:
    """Give something.

    Args:
        what: its name
    """
    return {"words": {"word": "né 你好"}, "name": "\udcff", "places": {(0, 1): "x"}}[what]


async def waits(name: str) -> str:
    """Wait.

    Args:
        name: whose turn it is
    """
    return name


LIST = [add, words]


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(*answers: str, tools: Any = (add, words, fails), **options: Any) -> tuple[Any, AgentEngine]:
    """The sample that the built-in agent made of these answers of the model, and the engine."""
    left = iter(answers)
    engine = AgentEngine(lambda prompt, params: next(left))
    options = {"rollout_max_response_len": 200, **options}
    fake, _ = await roll(ToolAgent(tools), engine, num_samples=1, **options)
    return fake.finished[0][0], engine


async def test_tools_are_called_until_an_answer_has_no_calls() -> None:
    sample, engine = await play(call("add", {"a": 1}) + call("words", {"text": "x y"}), "3")
    assert engine.prompts[0] == "Tadd,words,fails,up0a"
    assert engine.prompts[1].endswith('<eos>t3t["x", "y"]a')
    assert (sample.response, sample.status, sample.reward) == ("3", Status.COMPLETED, 1.0)
    assert [message["role"] for message in sample.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    calls = sample.messages[1]["tool_calls"]
    assert [message["tool_call_id"] for message in sample.messages[2:4]] == [each["id"] for each in calls]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (call("subtract", {}), "error: there is no tool 'subtract'; there are add, words, fails"),
        (call("add", {"a": 1, "c": 2}), "error: TypeError"),
        (call("add", {}), "error: TypeError"),
        (call("fails", {"how": "value"}), "error: ValueError: no no"),
        (call("fails", {"how": "exit"}), "error: SystemExit"),
        (call("fails", {"how": "interrupt"}), "error: KeyboardInterrupt"),
    ],
)
async def test_what_cannot_be_called_or_raises_is_told_to_the_model(asked: str, told: str) -> None:
    sample, _ = await play(asked, "so")
    content = sample.messages[2]["content"]
    assert content.startswith(told)
    assert len(content) <= MOST_ERROR_TEXT
    assert sample.response == "so"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("words", '{"word": "né 你好"}'),
        ("name", "?"),
        ("places", "error: TypeError: keys must be str, int, float, bool or None, not tuple"),
    ],
)
async def test_a_result_of_any_kind_is_a_text_that_the_model_can_read(what: str, told: str) -> None:
    sample, _ = await play(call("gives", {"what": what}), "so", tools=[gives])
    assert (sample.messages[2]["content"], sample.response) == (told, "so")


async def test_the_model_reads_the_error_alone_and_the_log_has_its_traceback_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong, asked = call("add", {}), call("fails", {"how": "exit"})
    left = iter([asked, asked + wrong, "so"])
    engine = AgentEngine(lambda prompt, params: next(left))
    fake, metrics = await roll(ToolAgent([add, fails]), engine, num_samples=1, rollout_max_response_len=200)
    results = [each["content"] for each in fake.finished[0][0].messages if each["role"] == "tool"]
    expected = "error: TypeError: add() missing 1 required positional argument: 'a'"
    assert results == ["error: SystemExit: 3", "error: SystemExit: 3", expected]
    assert metrics["agent/tool_errors"] == 3
    logged = [record.getMessage() for record in caplog.records if record.name == "buffer_rl.agents.tools"]
    assert [text.split(" raised ")[0] for text in logged] == ["the tool 'fails'", "the tool 'add'"]
    assert f'File "{__file__}"' in logged[0]


async def test_a_call_that_is_none_is_an_answer() -> None:
    sample, engine = await play('<tool_call>{"name": "add", "arguments": [1]}</tool_call>')
    assert len(engine.calls) == 1
    assert sample.response.startswith("<tool_call>")


async def test_a_model_that_calls_forever_is_cut_at_the_turns() -> None:
    sample, engine = await play(*[call("add", {"a": 1})] * 9, agent_max_turns=3)
    assert (len(engine.calls), sample.status, sample.reward) == (3, Status.TRUNCATED, 0.0)


async def test_tools_run_beside_each_other_and_off_the_loop() -> None:
    meeting = threading.Barrier(2, timeout=30)

    def meet(name: str) -> str:
        """Wait for another.

        Args:
            name: of this one
        """
        meeting.wait()
        return "met"

    engine = AgentEngine(lambda prompt, params: "done" if "met" in prompt else call("meet", {"name": "x"}))
    fake, _ = await roll(ToolAgent([meet]), engine, num_samples=2, rollout_max_response_len=200)
    assert [sample.response for sample in fake.finished[0]] == ["done", "done"]


async def test_tools_are_named_by_reference_also_as_a_list() -> None:
    left = iter([call("words", {"text": "a b"}), "two"])
    engine = AgentEngine(lambda prompt, params: next(left))
    options = {"tools_path": [f"{__file__}:LIST", f"{__file__}:fails"], "rollout_max_response_len": 200}
    fake, _ = await roll(None, engine, num_samples=1, **options)
    assert engine.prompts[0].startswith("Tadd,words,fails,")
    assert fake.finished[0][0].response == "two"


def test_two_tools_of_one_name_and_a_tool_without_a_schema_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tools-path: two tools have the name 'add'"):
        ToolAgent([add, [add]])

    def untyped(a):  # type: ignore[no-untyped-def]
        """No types."""

    with pytest.raises(ConfigError, match=r"--tools-path: 'untyped' has no schema"):
        ToolAgent([untyped])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tools_path": ["a:b"], "agent_path": "c:d"}, "an agent of yours calls tools itself"),
        ({"agent_path": "c:d", "custom_generate_function_path": "e:f"}, "an agent takes its place"),
        ({"tools_path": ["a:b"], "custom_convert_samples_to_train_data_path": "e:f"}, "it returns values per row"),
        ({"agent_path": "c:d", "partial_rollout": True}, "an answer that was aborted is asked for again"),
        ({"agent_path": "c:d", "rollout_timeout_s": 100.0, "agent_timeout_s": 51.0}, "a sample may be played twice"),
    ],
)
def test_options_that_contradict_an_agent_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        AgentOptions.check(make_args(**{"agent_path": None, **options}))
    assert "--" in caught.value.where


def test_options_without_an_agent_and_those_of_an_agent_pass() -> None:
    AgentOptions.check(make_args(agent_path=None, custom_generate_function_path="e:f"))
    AgentOptions.check(make_args(rollout_timeout_s=100.0, agent_timeout_s=50.0))


COMMANDS = [
    (["--agent-path", "{file}:nothing"], "has no 'nothing'"),
    (["--agent-path", "{file}:call"], "(args, sample, session)"),
    (["--agent-path", "{file}:add", "--tools-path", "{file}:add"], "an agent of yours calls tools itself"),
    (
        ["--tools-path", "{file}:add", "--partial-rollout", "--mask-offpolicy-in-partial-rollout"],
        "--tools-path and --partial-rollout",
    ),
    (["--agent-path", "x:y", "--agent-max-turns", "0"], "--agent-max-turns"),
    (["--agent-path", "x:y", "--agent-overflow", "ignore"], "--agent-overflow"),
    (["--tools-path", "{file}:nothing"], "nothing"),
    (["--tools-path", "{file}:add", "{file}:add"], "two tools have the name 'add'"),
    (["--tools-path", "{file}:call"], "has no schema"),
    (["--tools-path", "{file}:waits"], "the tool 'waits' is async"),
]


@pytest.mark.parametrize(("flags", "what"), COMMANDS, ids=[what for _, what in COMMANDS])
def test_each_refusal_comes_from_the_command_before_anything_starts(
    flags: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_task: dict[str, str]
) -> None:
    given = [each.format(file=__file__) for each in flags]
    fixed = [word for name, value in tiny_task.items() for word in (f"--{name}", value)]
    assert main(["train", "--dry-run", "--num-rollout", "1", *fixed, "--run-dir", str(tmp_path / "run"), *given]) != 0
    out = capsys.readouterr()
    assert what in out.out + out.err
