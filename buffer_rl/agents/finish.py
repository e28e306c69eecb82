"""What a program tells of its end: over HTTP (``POST .../finish``), or in the last line of its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.agents.session import AgentFailedError, check_turn_reward
from buffer_rl.errors import RewardError, short_repr
from buffer_rl.kinds.agent import GiveUp
from buffer_rl.kinds.reward import check_reward

ENDS = ("reward", "give_up", "failed")
"""Of these a finish has at most one; without any, the run's reward scores the sample."""
TEXTS = ("give_up", "failed", "answer")
TURN_REWARDS = "turn_rewards"
EXPECTED = 'such as {"reward": 1.0}, {"give_up": "reason"}, {"failed": "reason"}, or nothing: the run\'s reward'


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """reward: a number or a mapping; None if the run's reward scores the sample. give_up, failed: the reason.
    answer: the id of the completion that the run's reward is about; empty for the last one. turn_rewards: what of the
    reward belongs to single completions, by id. fault: why it cannot be used, which is a failure; empty if it can.

    Example:
        Finish.of({"reward": 1.0}).result() == 1.0
    """

    reward: float | dict[str, Any] | None = None
    give_up: str | None = None
    failed: str | None = None
    answer: str = ""
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    fault: str = field(default="", compare=False)

    @classmethod
    def of(cls, value: object) -> Finish:
        """From a JSON value; None is nothing."""
        given = {} if value is None else value
        try:
            if not isinstance(given, Mapping):
                raise RewardError(f"it is {short_repr(value)}")
            if unknown := sorted(map(str, set(given) - {*ENDS, *TEXTS, TURN_REWARDS})):
                raise RewardError(f"unknown names: {short_repr(unknown)}")
            named = [name for name in ENDS if given.get(name) is not None]
            if len(named) > 1:
                raise RewardError(f"it is {short_repr(value)}")
            if wrong := [name for name in TEXTS if not isinstance(given.get(name) or "", str)]:
                raise RewardError(f"{wrong[0]} is {short_repr(given[wrong[0]])}")
            if given.get(TURN_REWARDS) is not None and not named:
                raise RewardError(f"it has {TURN_REWARDS} and no reward")
            turns = _turn_rewards(given.get(TURN_REWARDS)) if "reward" in named else {}
            reward = check_reward(given["reward"], where="") if "reward" in named else None
        except RewardError as error:
            return cls(fault=f"its finish cannot be read: {error.what}; expected: {EXPECTED}")
        give_up, failed, answer = (given.get(name) for name in TEXTS)
        return cls(reward=reward, give_up=give_up, failed=failed, answer=answer or "", turn_rewards=turns)

    @classmethod
    def of_text(cls, text: str | bytes) -> Finish:
        """From JSON; no text is nothing."""
        try:
            return cls.of(json.loads(text) if text.strip() else None)
        except (ValueError, RecursionError) as error:
            return cls(fault=f"its finish is no JSON: {error}; expected: {EXPECTED}")

    @classmethod
    def of_output(cls, output: str) -> Finish:
        """From what a program has written: its last line that is not empty, if it begins as an object of JSON that
        names an end. Any other line, a number too, is a text that says nothing."""
        line = next((line.strip() for line in reversed(output.replace("\r", "\n").split("\n")) if line.strip()), "")
        is_meant = line.startswith("{") and any(f'"{name}"' in line for name in ENDS)
        return cls.of_text(line) if is_meant else cls()

    def result(self) -> float | dict[str, Any] | None:
        """The reward, as an agent returns it. Raises GiveUp and AgentFailedError."""
        if self.fault or self.failed is not None:
            raise AgentFailedError(self.fault or self.failed or "it said that it has failed")
        if self.give_up is not None:
            raise GiveUp(self.give_up)
        return self.reward


def _turn_rewards(given: object) -> dict[str, float]:
    """By the ids of completions. Raises RewardError."""
    if not isinstance(given or {}, Mapping):
        raise RewardError(f"{TURN_REWARDS} is {short_repr(given)}")
    return {name: check_turn_reward(number) for name, number in dict(given or {}).items()}  # type: ignore[call-overload]
