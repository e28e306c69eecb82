"""Makes small functions to write, programs for the warm-up, and a small model with random weights. Needs no network.

    python examples/code/prepare.py [--out FOLDER] [--seed N]

writes, into ``examples/code/build`` unless told otherwise,

    train.jsonl, heldout.jsonl, dev.jsonl    three values of a function, and tests; no function is in two of them
    shown.jsonl                              values with a program, for the warm-up
    model/                                   a Hugging Face folder: random weights and tokenizer
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from buffer_rl.testing.tiny import make_char_tokenizer, make_tiny_model

HERE = Path(__file__).resolve().parent
SIZES = {"heldout": 100, "dev": 40, "train": 300, "shown": 460}
CHARACTERS = "0123456789,;*+x"
PARTS = ("def f(x):", " return ")
"""Beside characters the tokenizer has these texts as tokens."""
TESTED = (0, 1, 2, 3, 7, 10)
"""The arguments that a program is tested with; the first three values are shown."""


def task(factor: int, summand: int) -> dict[str, Any]:
    """A row: the values of ``factor * x + summand`` at 0, 1 and 2, and its tests."""
    tests = [{"fn": "f", "args": [x], "expected": factor * x + summand} for x in TESTED]
    prompt = ",".join(str(factor * x + summand) for x in TESTED[:3]) + ";"
    return {"prompt": prompt, "metadata": {"tests": tests}}


def program(factor: int, summand: int, numbers: random.Random) -> str:
    """One of two that compute the function."""
    terms = [f"{factor}*x", str(summand)]
    numbers.shuffle(terms)
    return f"{PARTS[0]}{PARTS[1]}{'+'.join(terms)}"


def make_data(folder: Path, seed: int = 0) -> None:
    """Write the data files."""
    numbers = random.Random(seed)
    functions = [(factor, summand) for factor in range(1, 10) for summand in range(100)]
    numbers.shuffle(functions)
    for name, size in SIZES.items():
        chosen, functions = functions[:size], functions[size:]
        rows = [task(*each) for each in chosen]
        if name == "shown":
            rows = [{**row, "label": program(*each, numbers)} for row, each in zip(rows, chosen, strict=True)]
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
    parser.add_argument("--out", default=HERE / "build", type=Path, help="folder to write to")
    parser.add_argument("--seed", default=0, type=int, help="seed of the data and of the weights")
    flags = parser.parse_args()
    prepare(flags.out, flags.seed)
