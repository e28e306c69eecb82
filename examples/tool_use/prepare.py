"""Makes the sums and a small model with random weights: ``python examples/tool_use/prepare.py [--output FOLDER]``."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from buffer_rl.testing.tiny import make_tiny_model

CHARACTERS = "0123456789+-*=<>?"


def prepare(folder: Path, *, num_rows: int = 64, seed: int = 0) -> None:
    """Write ``train.jsonl`` and ``model`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        left, right, sign = numbers.randint(10, 99), numbers.randint(10, 99), numbers.choice("+-*")
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        rows.append({"prompt": f"{left}{sign}{right}=", "label": str(value)})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_tiny_model(folder / "model", characters=CHARACTERS, seed=seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the data and the model of examples/tool_use")
    parser.add_argument("--output", default=Path(__file__).resolve().parent / "build", type=Path)
    prepare(parser.parse_args().output)
