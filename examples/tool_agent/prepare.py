"""Makes sums, conversations that show the tools' use, and a small model with random weights. Needs no network.

    python examples/tool_agent/prepare.py [--output FOLDER] [--seed N]

writes, into ``examples/tool_agent/build`` unless told otherwise,

    train.jsonl, heldout.jsonl, dev.jsonl    questions and answers; no question is in two of them
    shown.jsonl                              whole conversations, for the warm-up
    model/                                   a Hugging Face folder: random weights, tokenizer, chat template
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from buffer_rl.testing.tiny import make_char_tokenizer, make_tiny_model

HERE = Path(__file__).resolve().parent
SIZES = {"heldout": 200, "dev": 100, "train": 4_000, "shown": 8_000}
CHARACTERS = "0123456789+-*[]uat"
SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}
CALL = ("<tool_call>", '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>")
"""Beside characters the tokenizer has these texts, and the names of the tools, as tokens."""
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{{ 'a' if add_generation_prompt }}"
)
"""``[add][subtract][multiply]u34*12a``, and the model goes on. So small a model is told the tools' names alone."""


def load_tools() -> Sequence[Callable[[int, int], int]]:
    """Those of ``calculator.py``."""
    spec = importlib.util.spec_from_file_location("calculator", HERE / "calculator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tools: Sequence[Callable[[int, int], int]] = module.TOOLS
    return tools


def question(tool: Callable[[int, int], int], a: int, b: int) -> dict[str, Any]:
    """A row with its answer."""
    prompt = [{"role": "user", "content": f"{a}{SIGNS[tool.__name__]}{b}"}]
    return {"prompt": prompt, "label": str(tool(a, b))}


def conversation(tool: Callable[[int, int], int], a: int, b: int, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """A row that shows a call, the tool's answer and the model's."""
    row = question(tool, a, b)
    call = {"type": "function", "function": {"name": tool.__name__, "arguments": {"a": a, "b": b}}}
    shown = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": row["label"]},
        {"role": "assistant", "content": row["label"]},
    ]
    return {"prompt": [*row["prompt"], *shown], "tools": schemas}


def make_data(folder: Path, seed: int = 0) -> None:
    """Write the data files."""
    from transformers.utils.chat_template_utils import get_json_schema

    tools, numbers = load_tools(), random.Random(seed)
    schemas = [get_json_schema(tool) for tool in tools]
    drawn: dict[tuple[str, int, int], Callable[[int, int], int]] = {}
    while len(drawn) < sum(SIZES.values()):
        tool = numbers.choice(tools)
        drawn[tool.__name__, numbers.randint(10, 99), numbers.randint(10, 99)] = tool
    questions = [(tool, a, b) for (_, a, b), tool in drawn.items()]
    for name, size in SIZES.items():
        chosen, questions = questions[:size], questions[size:]
        rows = [conversation(*each, schemas) if name == "shown" else question(*each) for each in chosen]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(folder: Path, seed: int = 0) -> None:
    """Write the model with its tokenizer and chat template."""
    tokenizer = make_char_tokenizer(CHARACTERS)
    tokenizer.add_tokens([*CALL, *SIGNS])
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24}
    make_tiny_model(folder, characters=CHARACTERS, vocab=len(tokenizer), seed=seed, init_scale=0.05, **sizes)
    tokenizer.save_pretrained(folder)


def prepare(folder: Path, seed: int = 0) -> None:
    """Write everything."""
    folder.mkdir(parents=True, exist_ok=True)
    make_data(folder, seed)
    make_model(folder / "model", seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the data and the model of examples/tool_agent")
    parser.add_argument("--output", default=HERE / "build", type=Path, help="folder to write to")
    parser.add_argument("--seed", default=0, type=int, help="seed of the data and of the weights")
    flags = parser.parse_args()
    prepare(flags.output, flags.seed)
