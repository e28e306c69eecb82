"""The examples of agents: their data, what they send to a model, and when their scripts fail."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from buffer_rl.agents.conversation import Cause, Conversation
from buffer_rl.agents.tools import ToolAgent
from buffer_rl.agents.turns import Turn
from buffer_rl.cli import main
from buffer_rl.observe.gains import EvalGain
from buffer_rl.records.groups import Sample

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def load(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", EXAMPLES / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("game")
    load("agent", "prepare").prepare(folder)
    return folder


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    load("tool_agent", "prepare").prepare(folder)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


class Player:
    """In place of OpenAI's client: answers with what ``guess`` makes of the messages."""

    def __init__(self, guess: Any) -> None:
        self.guess = guess
        self.chat = SimpleNamespace(completions=self)

    def with_options(self, **options: Any) -> Player:
        return self

    async def create(self, *, model: str, messages: list[dict[str, Any]]) -> Any:
        message = SimpleNamespace(content=self.guess(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def bisect(messages: list[dict[str, Any]]) -> str:
    low, high = map(int, messages[0]["content"].split("-"))
    for guess, hint in zip(messages[1::2], messages[2::2], strict=True):
        low, high = (low, int(guess["content"]) - 1) if hint["content"] == "<" else (int(guess["content"]) + 1, high)
    return str((low + high) // 2)


def played(guess: Any, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    agent = load("agent", "agent")
    monkeypatch.setattr(agent, "client", lambda: Player(guess))
    sample = Sample(prompt=row["prompt"], label=row["label"])
    return asyncio.run(agent.play(None, sample, SimpleNamespace(base_url="", api_key="")))


def test_bisection_wins_every_game_and_no_range_is_in_both_files(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, heldout = rows(game, "train"), rows(game, "heldout")
    for row in [*train, *heldout]:
        assert played(bisect, row, monkeypatch) == {"score": 1.0, "won": 1.0}
    ranges = [{row["prompt"][0]["content"] for row in part} for part in (train, heldout)]
    assert [len(part) for part in ranges] == [36, 9]
    assert not ranges[0] & ranges[1]


def test_a_game_that_is_not_won_scores_by_the_guesses_that_the_hints_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": [{"role": "user", "content": "0-8"}], "label": {"secret": 7, "guesses": 4}}

    def score(*guesses: str) -> dict[str, float]:
        answers = iter(guesses)
        return played(lambda messages: next(answers), row, monkeypatch)

    assert score("u") == score("9") == {"score": 0.0, "won": 0.0}
    assert score("1", "2", "x") == score("1", "2", "2") == score("1", "8", "8") == {"score": 0.1, "won": 0.0}
    assert score("1", "2", "3", "4") == {"score": 0.2, "won": 0.0}
    assert score("1", "2", "3", "7") == {"score": 1.0, "won": 1.0}


def test_the_game_is_played_with_the_real_client(game: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, data, config = EXAMPLES / "agent" / "agent.py", game / "heldout.jsonl", EXAMPLES / "agent" / "train.yaml"
    words = ["--kind", "agent", f"{reference}:play", "--on", str(data), "--config", str(config)]
    assert main(["plugins", "check", *words]) == 0
    assert "1 request, reward {'score': 0.0, 'won': 0.0}: 'yes'" in capsys.readouterr().out


def test_the_game_fails_if_too_few_are_won() -> None:
    run = load("agent", "run")
    records = [{"step": 0, "eval/heldout/won": 0.0}, {"step": 0, "loss": 1.0}, {"step": 25, "eval/heldout/won": 0.39}]
    assert run.curve(records) == [(0, 0.0), (25, 0.39)]
    assert "0.390 of the held-out games are won; expected at least 0.4" in run.verdict(run.curve(records))
    assert run.verdict([(0, 0.0), (25, 0.4)]) is None
    assert "1 evaluations" in run.verdict([(25, 0.9)])


def test_no_question_is_in_two_files_and_every_label_is_its_answer(calculator: Path) -> None:
    sizes = load("tool_agent", "prepare").SIZES
    found = {name: rows(calculator, name) for name in sizes}
    questions = [row["prompt"][0]["content"] for part in found.values() for row in part]
    assert {name: len(part) for name, part in found.items()} == sizes
    assert len(set(questions)) == len(questions)
    for row in found["heldout"]:
        assert str(eval(row["prompt"][0]["content"])) == row["label"]


def test_the_warm_up_shows_the_tokens_that_the_built_in_agent_sends(calculator: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(calculator / "model")
    agent = ToolAgent(load("tool_agent", "calculator").TOOLS)
    shown = rows(calculator, "shown")[0]
    text = tokenizer.apply_chat_template(shown["prompt"], tools=shown["tools"], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids
    conversation, sent = Conversation(tokenizer), []

    class Session:
        """Answers what was shown."""

        def chat(self, messages: Any, tools: Any) -> Any:
            prompt = conversation.prompt(messages, tools)
            assert tuple(ids[: len(prompt.ids)]) == prompt.ids
            end = ids.index(tokenizer.eos_token_id, len(prompt.ids)) + 1
            output = tuple(ids[len(prompt.ids) : end])
            sent.append((prompt.cause, end))
            turn = Turn(prompt_ids=prompt.ids, output_ids=output, log_probs=(0.0,) * len(output), digest="", matched=1)
            return conversation.record(prompt, turn).message

    agent(None, Sample(prompt=shown["prompt"][:1]), Session())  # type: ignore[arg-type]
    assert [cause for cause, _ in sent] == [Cause.NEW, Cause.EXTENDS]
    assert sent[-1][1] == len(ids)


def test_the_calculator_fails_if_it_learned_too_little() -> None:
    verdict = load("tool_agent", "run").verdict
    gain = EvalGain(name="heldout", first_step=0, before=0.3, last_step=60, after=0.49)
    assert "went from 0.300 to 0.490; expected +0.2" in verdict([gain])
    assert verdict([EvalGain(name="heldout", first_step=0, before=0.3, last_step=60, after=0.51)]) is None
    assert "no evaluation named 'heldout'" in verdict([])
