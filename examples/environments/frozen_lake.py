"""FrozenLake of gymnasium: the model sees where it stands and what is around it, and says a direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium

ACTIONS = "ldru"  # left, down, right, up: gymnasium's 0 to 3
NEIGHBOURS = ((0, -1), (1, 0), (0, 1), (-1, 0))
MAX_STEPS = 12


class FrozenLake:
    """A row's ``metadata["map"]`` has the lines of the lake: S, F (ice), H (hole), G. The ice is not slippery here."""

    def reset(self, map: Sequence[str], seed: int) -> str:
        """The first observation."""
        self._map, self._won = map, False
        self._game = gymnasium.make("FrozenLake-v1", desc=list(map), is_slippery=False, max_episode_steps=MAX_STEPS)
        place, _ = self._game.reset(seed=seed)
        self._farthest = sum(self._position(place))
        return self._seen(place)

    def step(self, action: str) -> tuple[str, float, bool]:
        """1 at the goal; nothing for a word that is no direction, which ends the game."""
        if action not in ACTIONS or not action:
            return "", 0.0, True
        place, reward, is_over, is_cut, _ = self._game.step(ACTIONS.index(action))
        self._won = reward > 0
        if self._at(self._position(place)) != "H":
            self._farthest = max(self._farthest, sum(self._position(place)))
        return self._seen(place), float(reward), is_over or is_cut

    def reward(self) -> dict[str, float]:
        """Beside the 1, up to 0.3 for the way, so that there is something to learn before the first goal."""
        whole = len(self._map) + len(self._map[0]) - 2
        return {"score": 0.3 * self._farthest / whole, "won": float(self._won)}

    def close(self) -> None:
        """End gymnasium's part."""
        self._game.close()

    def _seen(self, place: Any) -> str:
        """Row, column, and the cells to the left, below, to the right and above: ``00#FF#``."""
        row, column = self._position(place)
        return f"{row}{column}" + "".join(self._at((row + down, column + right)) for down, right in NEIGHBOURS)

    def _position(self, place: Any) -> tuple[int, int]:
        row, column = divmod(int(place), len(self._map[0]))
        return row, column

    def _at(self, position: tuple[int, int]) -> str:
        row, column = position
        is_inside = 0 <= row < len(self._map) and 0 <= column < len(self._map[0])
        return self._map[row][column] if is_inside else "#"
