"""What a SGLang 0.5.23 server does with requests and ``FakeEngine`` by itself does not, as it was measured.

Not here: weight updates, which the fake engine takes from disk alone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, eq=False)
class SglangRules:
    """The rules of one fake engine, and which ids of requests (rid) it has. Belongs to the engine's event loop.

    * A token id outside ``[0, vocab_size)`` or an empty prompt kills the server. vocab_size: with the padding of the
      embedding.
    * A rid is refused with HTTP 400 while the request that has it lives: ``abort_s`` seconds after the answer to its
      abort, ``disconnect_s`` after its connection was lost.
    * A request that arrives in a pause runs after it; until then no abort ends it, and it keeps its rid.
    * ``/ready`` is 503 in a pause.
    * ``sampling_seed`` changes nothing, unless the server runs with deterministic inference; the rows of a request then
      have the one seed.
    """

    vocab_size: int = 2**31
    abort_s: float = 0.03
    disconnect_s: float = 1.0
    deterministic: bool = False

    def __post_init__(self) -> None:
        self._draws = itertools.count(1)
        self._free_at: dict[str, float] = {}  # on the clock of the event loop; infinity for a request that lives on
        self._queued: set[str] = set()  # since the pause
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def paused(self) -> bool:
        """Whether the engine is paused."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """What arrives from now on waits."""
        self._resumed.clear()

    def resume(self) -> None:
        """What waited runs, but for the requests whose clients went away: these end."""
        lost = {rid for rid in self._queued if self._free_at.get(rid) != math.inf}
        self._free_at.update(dict.fromkeys(lost, _now() + self.abort_s))
        self._queued.clear()
        self._resumed.set()

    def is_deadly(self, prompt: Sequence[int]) -> bool:
        """Whether the server dies of ``prompt``."""
        return not prompt or min(prompt) < 0 or max(prompt) >= self.vocab_size

    def has(self, rid: str) -> bool:
        """Whether a request has ``rid``, so that it is refused to others."""
        return rid in self._queued or self._free_at.get(rid, 0.0) > _now()

    def hold(self, rids: Sequence[str]) -> None:
        """A request has ``rids`` from now on."""
        self._free_at.update(dict.fromkeys(rids, math.inf))
        if self.paused:
            self._queued.update(rids)

    def release(self, rids: Sequence[str], *, lost: bool) -> None:
        """The request is answered, or its connection ``lost``: then it lives on for a while."""
        self._free_at.update(dict.fromkeys(rids, _now() + self.disconnect_s if lost else 0.0))

    async def admitted(self) -> None:
        """Return when the engine is not paused."""
        await self._resumed.wait()

    def abort(self, prefix: str) -> None:
        """End the requests without a client whose rid begins with ``prefix``."""
        for rid, free_at in self._free_at.items():
            if rid.startswith(prefix) and free_at != math.inf:
                self._free_at[rid] = min(free_at, _now() + self.abort_s)

    def seed(self, params: dict[str, Any]) -> int:
        """What decides the tokens of a row: its request's seed, or chance, here a number that does not come again."""
        if self.deterministic:
            return int(params.get("sampling_seed", 0))
        return next(self._draws)

    def forget(self) -> None:
        """Another server has taken the place of this one."""
        self._free_at.clear()
        self._queued.clear()
        self._resumed.set()


def refusal(rids: Sequence[str]) -> dict[str, Any]:
    """The body of HTTP 400 for ids that are taken."""
    return {"error": {"message": f"Duplicate request ID detected: {', '.join(rids)}"}}


def _now() -> float:
    return asyncio.get_running_loop().time()
