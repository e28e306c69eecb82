"""Makes rounds of the game and a small model with random weights: ``python examples/agent/prepare.py``."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from buffer_rl.testing.tiny import make_tiny_model

HELD_OUT = 9  # of the 45 ranges, with all their numbers
TEMPLATE = (
    "{% for message in messages %}{{ 'u' + message.content if message.role == 'user' else 'a' + message.content + "
    "'<eos>' }}{% endfor %}{{ 'a' if add_generation_prompt }}"
)
"""``u2-7a``, and the model goes on: ``4<eos>``; then ``u>a``."""


def rounds(low: int, high: int) -> list[dict[str, object]]:
    """A row for each number of a range. The label has what the model is not told."""
    prompt = [{"role": "user", "content": f"{low}-{high}"}]
    guesses = (high - low + 1).bit_length()  # as many as bisection needs
    return [{"prompt": prompt, "label": {"secret": number, "guesses": guesses}} for number in range(low, high + 1)]


def prepare(folder: Path, *, seed: int = 0) -> None:
    """Write ``train.jsonl``, ``heldout.jsonl`` and ``model`` into ``folder``; no range is in both files."""
    folder.mkdir(parents=True, exist_ok=True)
    ranges = [(low, high) for low in range(10) for high in range(low + 1, 10)]
    random.Random(seed).shuffle(ranges)
    for name, chosen in (("heldout", ranges[:HELD_OUT]), ("train", ranges[HELD_OUT:])):
        rows = [row for low, high in chosen for row in rounds(low, high)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_tiny_model(folder / "model", characters="0123456789-<>ua", chat_template=TEMPLATE, seed=seed, init_scale=0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the rounds and the model of examples/agent")
    parser.add_argument("--output", default=Path(__file__).resolve().parent / "build", type=Path)
    prepare(parser.parse_args().output)
