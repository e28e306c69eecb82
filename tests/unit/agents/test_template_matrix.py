"""Public chat templates: which goes on behind what was sampled; the table of ``docs/agents.md``.

    python tests/unit/agents/test_template_matrix.py

writes it. The templates are no part of the repository: a folder of them lies beside it, or the test is skipped.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from buffer_rl.agents.conversation import Conversation
from buffer_rl.agents.turns import Turn, rows, turn_digest
from buffer_rl.errors import DataError
from harness.chat_tokenizer import byte_tokenizer
from harness.talk import tool, user

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT.parent / "shared" / "data" / "chat_templates"
PAGE = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- The table is written by: python tests/unit/agents/test_template_matrix.py -->\n", "\n<!-- end -->"
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|<eos>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NUMBER = {"type": "integer", "description": "A number."}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": NUMBER}}},
}
ANSWERS = {
    "plain": "It is four.",
    "reasoning": "<think>\nhm\n</think>\n\nIt is four.",
    "call": CALL,
    "two calls": f"{CALL}\n{CALL}",
    "reasoning, call": f"<think>\nhm\n</think>\n\n{CALL}",
    "cut": "It is fo",
}
TEMPLATES = sorted(FOLDER.glob("*.jinja"))
MARK = "WHATTHEMODELSAYS"


def following(answer: str) -> list[dict[str, Any]]:
    """What comes behind the answer: a result for each call, else a question."""
    return [tool("4", name="add")] * answer.count("<tool_call>") or [user("And now?")]


def as_sampled(answer: str, prompt: str) -> str:
    """The answer as a model gives it behind what the prompt wrote of its reasoning."""
    opened = re.search(r"<think>\s*(</think>\s*)?\Z", prompt)
    if opened is None:
        return answer
    rest = answer.removeprefix("<think>\nhm\n</think>\n\n")
    if opened[1] is not None:
        return rest
    return ("hm" if rest != answer else "") + "\n</think>\n\n" + rest


def end_of_answer(tokenizer: Any, answer: str, tools: list[Any]) -> str:
    """The special token that the template writes behind an answer; that of the tokenizer if it does not say."""
    messages = [user("2 + 2?"), {"role": "assistant", "content": MARK}, *following(answer)]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
    except Exception:
        return "<eos>"
    found = SPECIAL.search(text.partition(MARK)[2])
    return found[0] if found else "<eos>"


def outcome(path: Path, kind: str, history: str) -> str:
    """The cause of the second prompt; "refused" if the template accepts no such messages."""
    template = path.read_text(encoding="utf-8")
    special = sorted({*SPECIAL.findall(template), "<bos>", "<eos>"})
    tokenizer = byte_tokenizer(template, special, bos_token="<bos>", eos_token="<eos>")
    talk, answer = Conversation(tokenizer, history=history), ANSWERS[kind]  # type: ignore[arg-type]
    tools = [ADD] if "call" in kind else []
    turns: list[Turn] = []

    def play(messages: list[dict[str, Any]], sampled: str, end: str) -> Any:
        prompt = talk.prompt(messages, tools)
        output = [*as_sampled(sampled, prompt.text).encode(), *([tokenizer.convert_tokens_to_ids(end)] if end else [])]
        known = {"finish_reason": "stop" if end else "length", "matched": output[-1] if end else None}
        logs, digest = (-1.0,) * len(output), turn_digest(prompt.ids, {})
        turn = Turn(prompt_ids=prompt.ids, output_ids=tuple(output), log_probs=logs, digest=digest, **known)
        turns.append(turn)
        return prompt, talk.record(prompt, turn).message

    question = user("2 + 2?")
    _, message = play([question], answer, "" if kind == "cut" else end_of_answer(tokenizer, answer, tools))
    results = following(answer)
    for result, call in zip(results, message.get("tool_calls", ()), strict=False):
        result["tool_call_id"] = call["id"]
    try:
        prompt, _ = play([question, message, *results], "Four.", "<eos>")
    except DataError:
        return "refused"
    found = rows(turns)
    assert len(found) == (1 if prompt.cause == "extends" else 2)
    assert sum(sum(row.loss_mask) for row in found) == sum(len(turn.output_ids) for turn in turns)
    return str(prompt.cause)


def table() -> str:
    lines = [f"| template | {' | '.join(ANSWERS)} |", f"|---|{'---|' * len(ANSWERS)}"]
    for path in TEMPLATES:
        cells = []
        for kind in ANSWERS:
            kept, appended = (outcome(path, kind, history) for history in ("template", "append"))
            extends = [history for history, found in (("template", kept), ("append", appended)) if found == "extends"]
            cells.append({2: "yes", 1: "`append`"}.get(len(extends), "" if kept == "refused" else f"no: `{kept}`"))
        lines.append(f"| {path.stem} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.skipif(not TEMPLATES, reason="no chat templates beside the repository (../shared/data/chat_templates)")
def test_public_templates_go_on_behind_what_was_sampled_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    made = table()
    with capsys.disabled():
        print(f"\n{made}")
    assert PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0] == made


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
