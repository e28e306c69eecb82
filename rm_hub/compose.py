"""A weighted sum of several rewards, put together in a file of one's own:

    from rm_hub.compose import weighted

    score = weighted(("rm_hub.math:score", 0.9), (brevity, 0.1))

The weighted sum of rewards is scalarisation, the plainest way to train on several objectives (Roijers et al. 2013,
A survey of multi-objective sequential decision-making, arXiv:1402.0590).
"""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from buffer_rl.errors import ConfigError, PluginError, RewardError
from buffer_rl.records.groups import Sample
from rm_hub.answers import where

Reward = Callable[[Any, Sample], Any]


class Weighted:
    """Calls every part and adds up its weighted rewards. Made by ``weighted``."""

    def __init__(self, parts: Mapping[str, tuple[Reward, float]]) -> None:
        self._parts = dict(parts)

    def __call__(self, args: Any, sample: Sample) -> dict[str, float] | float | Awaitable[Any]:
        """The sum; with ``--reward-key total``, a mapping of it and of each part's own reward by name.

        Synchronous, so that synchronous parts run in a process that can be killed; parts that are asynchronous are
        awaited one after another. Raises RewardError if a part gives no finite number.
        """
        answers = {name: call(args, sample) for name, (call, _) in self._parts.items()}
        if any(inspect.isawaitable(answer) for answer in answers.values()):
            return self._awaited(args, sample, answers)
        return self._total(args, sample, answers)

    async def _awaited(self, args: Any, sample: Sample, answers: dict[str, Any]) -> dict[str, float] | float:
        for name, answer in answers.items():
            if inspect.isawaitable(answer):
                answers[name] = await answer
        return self._total(args, sample, answers)

    def _total(self, args: Any, sample: Sample, answers: Mapping[str, Any]) -> dict[str, float] | float:
        rewards = {name: _finite(name, answer, sample) for name, answer in answers.items()}
        total = sum(weight * rewards[name] for name, (_, weight) in self._parts.items())
        return {"total": total, **rewards} if getattr(args, "reward_key", None) == "total" else total


def weighted(*parts: tuple[Reward | str, float]) -> Weighted:
    """A reward function from ``(function or "module:function", weight)`` pairs.

    References are imported here, that is when the user's file is imported, so that a wrong one is found before a run
    starts. Raises PluginError for one that does not resolve, ConfigError for no parts or a weight that is not a
    finite number.
    """
    if not parts:
        raise ConfigError("there is nothing to compose", expected='weighted(("module:function", weight), ...)')
    named: dict[str, tuple[Reward, float]] = {}
    for reward, weight in parts:
        call = _resolved(reward)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"the weight of {reward!r} is {weight!r}", expected="a finite number")
        name = reward if isinstance(reward, str) else str(getattr(reward, "__name__", type(reward).__name__))
        if name in named or name == "total":
            raise ConfigError(f"two rewards are called {name!r}", expected="each part once; 'total' is the sum")
        named[name] = (call, float(weight))
    return Weighted(named)


def _resolved(reward: Reward | str) -> Reward:
    if isinstance(reward, str):
        try:
            found = pkgutil.resolve_name(reward) if ":" in reward else None
        except (ImportError, AttributeError, ValueError) as error:
            raise PluginError(f"reward {reward!r} does not resolve: {type(error).__name__}: {error}") from error
        if found is None:
            raise PluginError(f"reward {reward!r} does not resolve", expected="module:function, or the function itself")
        reward = found
    if not callable(reward):
        raise PluginError(f"reward {reward!r:.80} cannot be called", expected="a function (args, sample) -> number")
    return reward


def _finite(name: str, answer: Any, sample: Sample) -> float:
    try:
        number = math.nan if isinstance(answer, str) else float(answer)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        what = f"the reward of the part {name!r} is {answer!r:.80}"
        raise RewardError(what, where=where(sample, "rm_hub.compose"), expected="a finite number")
    return number
