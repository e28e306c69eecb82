"""The page on agents says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.agents import chat_dialect
from buffer_rl.agents.conversation import Cause
from buffer_rl.agents.dialect import OF_THE_RUN
from buffer_rl.agents.options import AgentOptions
from buffer_rl.agents.session import LIMITS, End
from buffer_rl.agents.tools import ToolAgent
from buffer_rl.cli import main
from buffer_rl.options.section import flag_of
from buffer_rl.records.groups import Sample

PAGE = Path(__file__).resolve().parents[3] / "docs" / "agents.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_the_agent_of_the_page_plays_a_sample(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent_of_the_page.py").write_text(blocks(page)[0])
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "2+3=", "label": "5"}) + "\n")
    command = next(line for line in page.splitlines() if line.startswith("buffer-rl plugins check --kind agent"))
    words = command.partition("#")[0].replace("my_agent:", "my_agent_of_the_page:").split()
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.endswith(" 2 requests, reward 1.0: '5'  train.jsonl:1\n")


def test_the_tool_of_the_page_is_called(page: str) -> None:
    names: dict[str, Any] = {}
    exec(blocks(page)[1], names)
    call = {"function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}, "id": "1", "type": "function"}
    answers = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "content": "5"}]
    asked: list[Any] = []

    class Session:
        def chat(self, messages: Any, tools: Any) -> Any:
            asked.append([dict(message) for message in messages])
            return answers[len(asked) - 1]

    ToolAgent([names["add"]])(None, Sample(prompt="2+3="), Session())  # type: ignore[arg-type]
    assert asked[1][-1] == {"role": "tool", "tool_call_id": "1", "content": "5"}


def test_every_option_of_agents_is_on_the_page(page: str) -> None:
    for name in AgentOptions.model_fields:
        assert re.search(rf"{flag_of(name)}\b", page), name


def test_the_page_has_every_metric_and_cause(page: str) -> None:
    for end in LIMITS:
        assert f"`end_{end}`" in page
    assert f"`gave_up_{End.OVERFLOW}`" in page
    for cause in Cause:
        assert f"| `{cause}` |" in page


def test_the_page_says_what_is_ignored_and_what_is_refused(page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    (ignored,) = [row for row in rows if "are ignored" in row]
    assert set(re.findall(r"`(\w+)`", ignored.split("|")[1])) == set(OF_THE_RUN)
    (refused,) = [row for row in rows if "are refused (400)" in row]
    named = {name for name in chat_dialect._NEUTRAL if not name.endswith("_penalty")}
    assert set(re.findall(r"`(\w+)`", refused.split("|")[1])) == named
