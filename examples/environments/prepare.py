"""Makes the rows of a game and a small model with random weights: ``python examples/environments/prepare.py GAME``."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_rl.testing.tiny import make_tiny_model

NUMBERS_PER_RANGE = 12
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Observations and answers, one after another: ``go``, an empty line, ``00#FF#r01SFF#...``."""


def lakes(first_seed: int, number: int, taken: set[str]) -> Iterable[dict[str, Any]]:
    """Rows with different random lakes of 4 x 4, none of them in ``taken``."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    seed = first_seed
    while number:
        lake = generate_random_map(size=4, p=0.8, seed=seed)
        seed += 1
        if (text := "/".join(lake)) not in taken:
            taken.add(text)
            number -= 1
            yield {"prompt": [{"role": "user", "content": "go"}], "metadata": {"map": lake}}


def guesses(first_seed: int, number: int, taken: set[str]) -> Iterable[dict[str, Any]]:
    """Rows with different ranges of digits, none of them in ``taken``, each with several numbers to guess."""
    ranges = [(low, high) for low in range(10) for high in range(low + 1, 10)]
    random.Random(first_seed).shuffle(ranges)
    for low, high in [each for each in ranges if str(each) not in taken][:number]:
        taken.add(str((low, high)))
        turns = (high - low + 1).bit_length()  # as many as bisection needs
        settings = {"min_number": low, "max_number": high, "max_turns": turns}
        for seed in range(first_seed, first_seed + NUMBERS_PER_RANGE):
            yield {"prompt": [{"role": "user", "content": "go"}], "metadata": {"settings": settings, "seed": seed}}


@dataclass(frozen=True, slots=True)
class Game:
    """rows: made of a first seed, a number and what is taken already. characters: of the tokenizer."""

    rows: Callable[[int, int, set[str]], Iterable[dict[str, Any]]]
    characters: str
    num_train: int
    num_heldout: int


GAMES = {
    "frozen_lake": Game(lakes, "go\n0123SFHG#ldru", num_train=400, num_heldout=100),
    "text_arena": Game(guesses, "go\n0123456789-<>?", num_train=36, num_heldout=9),
}


def prepare(name: str, folder: Path, *, seed: int = 0) -> None:
    """Write ``train.jsonl``, ``heldout.jsonl`` and ``model`` into ``folder``; no row is in both files."""
    folder.mkdir(parents=True, exist_ok=True)
    game, taken = GAMES[name], set[str]()
    for file, number in (("heldout", game.num_heldout), ("train", game.num_train)):
        rows = game.rows(seed, number, taken)
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_tiny_model(folder / "model", characters=game.characters, chat_template=TEMPLATE, seed=seed, init_scale=0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the rows and the model of an environment's example")
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--output", type=Path, help="folder to write to; build/GAME beside this file")
    flags = parser.parse_args()
    prepare(flags.game, flags.output or Path(__file__).resolve().parent / "build" / flags.game)
