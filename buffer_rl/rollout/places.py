"""Places for samples in flight, of which a rollout worker has ``--rollout-concurrency``."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress


class Places:
    """Places that requests hold while the engines work on their samples. Those of an evaluation come before those of
    training; of each kind, the request that asked first.

    A request gets all its places in one moment: no two wait for each other with a part of theirs. Until the first one
    in the queue has enough of them, those that are free stay free.

    free: places that nobody holds.
    """

    def __init__(self, total: int) -> None:
        self.free = total
        self._total = total
        self._evaluations: deque[tuple[asyncio.Future[None], int]] = deque()
        self._training: deque[tuple[asyncio.Future[None], int]] = deque()

    async def acquire(self, count: int, *, evaluation: bool = False) -> None:
        """Wait for ``count`` places, and hold them. Raises ValueError if there are not as many in all."""
        if count > self._total:
            raise ValueError(f"{count} of {self._total} places were asked for")
        queue, granted = self._evaluations if evaluation else self._training, asyncio.get_running_loop().create_future()
        queue.append((granted, count))
        self._serve()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # in the moment of the cancellation
                self.release(count)
            else:
                with suppress(ValueError):
                    queue.remove((granted, count))
                self._serve()
            raise

    def release(self, count: int = 1) -> None:
        """Give places back."""
        self.free += count
        self._serve()

    def _serve(self) -> None:
        for queue in (self._evaluations, self._training):
            while queue:
                granted, count = queue[0]
                if granted.cancelled():
                    queue.popleft()
                elif count > self.free:
                    return
                else:
                    queue.popleft()
                    self.free -= count
                    granted.set_result(None)
