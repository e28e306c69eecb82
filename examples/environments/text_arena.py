"""Games of textarena for one player, as environments."""

from __future__ import annotations

import re
import threading
from typing import Any, ClassVar

import textarena


class TextArena:
    """A row's ``metadata`` has ``game``, a name of textarena's such as ``TowerOfHanoi-v0``, and perhaps ``settings``.

    The model sees what the game says, in its words. The reward is the game's, which it gives at the end.
    textarena draws from Python's generator of the whole process: games begin one after another, each from its seed. A
    game that goes on drawing in its steps, such as Blackjack, is repeatable with ``--rollout-concurrency 1`` alone."""

    beginning: ClassVar[threading.Lock] = threading.Lock()

    def reset(self, game: str, seed: int, settings: dict[str, Any] | None = None) -> str:
        """The game's rules, and its first words."""
        self._score = {"score": 0.0, "won": 0.0}
        with self.beginning:
            self._game = textarena.make(game, **(settings or {}))
            self._game.reset(num_players=1, seed=seed)
        return self._heard()

    def step(self, action: str) -> tuple[str, None, bool]:
        """Play a move."""
        is_over, _ = self._game.step(action)
        if is_over:
            rewards, _ = self._game.close()
            score = float((rewards or {}).get(0, 0.0))
            self._score = {"score": score, "won": float(score == 1)}
        return ("" if is_over else self._heard()), None, is_over

    def reward(self) -> dict[str, float]:
        """``won``: whether the game gave a whole 1."""
        return self._score

    def _heard(self) -> str:
        """What the game has said since the last move."""
        _, said = self._game.get_observation()
        if isinstance(said, str):  # a game of another name than ...-raw, with all that it has said
            return said
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(message) for _, message, kind in said if kind is not own)


class GuessTheNumber(TextArena):
    """The game of this name in the few characters that a very small model reads: ``2-7``, then ``<`` or ``>``, and
    ``?`` for a move that the game refuses. The settings are ``min_number``, ``max_number`` and ``max_turns``."""

    def reset(self, settings: dict[str, Any], seed: int) -> str:  # type: ignore[override]
        """The range alone, in place of the rules."""
        super().reset("GuessTheNumber-v0-raw", seed, settings)
        return f"{settings['min_number']}-{settings['max_number']}"

    def step(self, action: str) -> tuple[str, None, bool]:
        """A number without the brackets that the game asks for."""
        said, reward, is_over = super().step(f"[{action}]")
        hint = re.search("higher|lower", said)
        return {"higher": ">", "lower": "<"}.get(hint[0] if hint else "", "?"), reward, is_over
