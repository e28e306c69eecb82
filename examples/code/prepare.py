"""Makes small functions to write, programs for the warm-up, and a small model with random weights. Needs no network.

    python examples/code/prepare.py [--output FOLDER] [--seed N]

writes, into ``examples/code/build`` unless told otherwise,

    train.jsonl, heldout.jsonl, dev.jsonl    two steps to take with a number, and tests; no two are in two of them
    shown.jsonl                              steps with a program, for the warm-up
    model/                                   a Hugging Face folder: random weights and tokenizer
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer_rl.testing.tiny import make_char_tokenizer, make_tiny_model

HERE = Path(__file__).resolve().parent
SIZES = {"heldout": 100, "dev": 40, "train": 2_000, "shown": 6_000}
CHARACTERS = "0123456789+-*()x; "
PARTS = ("def f(x):", " return ")
"""Beside characters the tokenizer has these texts as tokens."""
SIGNS = "+-*"
TESTED = (-7, -1, 0, 1, 2, 10)
"""The arguments that a program is tested with."""
Step = tuple[str, int]


def value(steps: Sequence[Step], x: int) -> int:
    """What is left of ``x`` after the steps, which are taken from left to right."""
    for sign, number in steps:
        x = {"+": x + number, "-": x - number, "*": x * number}[sign]
    return x


def task(steps: Sequence[Step]) -> dict[str, Any]:
    """A row: the steps, such as ``+12 *3;``, and tests of a program that takes them."""
    tests = [{"fn": "f", "args": [x], "expected": value(steps, x)} for x in TESTED]
    return {"prompt": " ".join(f"{sign}{number}" for sign, number in steps) + ";", "metadata": {"tests": tests}}


def program(steps: Sequence[Step]) -> str:
    """One that takes them, such as ``def f(x): return (x+12)*3``."""
    (first, number), (second, other) = steps
    start = f"x{first}{number}"
    inner = f"({start})" if second == "*" and first != "*" else start
    return f"{PARTS[0]}{PARTS[1]}{inner}{second}{other}"


def make_data(folder: Path, seed: int = 0) -> None:
    """Write the data files."""
    numbers = random.Random(seed)
    drawn: dict[tuple[Step, Step], None] = {}
    while len(drawn) < sum(SIZES.values()):
        first, second = ((numbers.choice(SIGNS), numbers.randint(2, 99)) for _ in range(2))
        drawn[first, second] = None
    functions = list(drawn)
    for name, size in SIZES.items():
        chosen, functions = functions[:size], functions[size:]
        rows = [task(each) | ({"label": program(each)} if name == "shown" else {}) for each in chosen]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(folder: Path, seed: int = 0) -> None:
    """Write the model with its tokenizer."""
    tokenizer = make_char_tokenizer(CHARACTERS)
    tokenizer.add_tokens(list(PARTS))
    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24}
    make_tiny_model(folder, characters=CHARACTERS, vocab=len(tokenizer), seed=seed, init_scale=0.05, **sizes)
    tokenizer.save_pretrained(folder)


def prepare(folder: Path, seed: int = 0) -> None:
    """Write everything."""
    folder.mkdir(parents=True, exist_ok=True)
    make_data(folder, seed)
    make_model(folder / "model", seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the data and the model of examples/code")
    parser.add_argument("--output", default=HERE / "build", type=Path, help="folder to write to")
    parser.add_argument("--seed", default=0, type=int, help="seed of the data and of the weights")
    flags = parser.parse_args()
    prepare(flags.output, flags.seed)
