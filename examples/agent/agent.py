"""Guess a number in a range. The player is whatever answers at an OpenAI endpoint; the game says ``<`` or ``>``."""

import functools
from typing import Any

import openai


@functools.cache
def client() -> openai.AsyncOpenAI:
    """One for all samples: a new one costs more than a game."""
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


async def play(args: Any, sample: Any, session: Any) -> dict[str, float]:
    """1 for the number, up to 0.2 for guesses that the hints allow; any other guess loses."""
    player = client().with_options(base_url=session.base_url, api_key=session.api_key)
    messages, secret, guesses = list(sample.prompt), sample.label["secret"], sample.label["guesses"]
    low, high = map(int, messages[0]["content"].split("-"))
    for number in range(guesses):
        answer = await player.chat.completions.create(model="policy", messages=messages)
        guess = answer.choices[0].message.content or ""
        if not guess.isdigit() or not low <= int(guess) <= high:
            return {"score": 0.2 * number / guesses, "won": 0.0}
        if int(guess) == secret:
            return {"score": 1.0, "won": 1.0}
        low, high = (low, int(guess) - 1) if secret < int(guess) else (int(guess) + 1, high)
        hint = "<" if secret < int(guess) else ">"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return {"score": 0.2, "won": 0.0}
