"""The publication of one version: write → pause → flush → update → check → continue.

Who waits for whom: the publisher waits for the trainer (to write) and for every engine (each call with a
deadline). Whatever fails, the engines are told to continue, so that none stays paused, and the transport to free what
it prepared.
"""

from __future__ import annotations

import time
from typing import Any

from buffer_rl.contracts import WeightTransport
from buffer_rl.errors import BufferRLError, EngineError
from buffer_rl.weights.disk import EngineControl, WeightSource


class Publisher:
    """Publishes versions through one transport. compare: after each, compare the weights that the engines serve."""

    def __init__(
        self, transport: WeightTransport, source: WeightSource, engines: EngineControl, *, compare: bool = False
    ) -> None:
        self._compare = compare
        self._transport = transport
        self._source = source
        self._engines = engines

    def publish(self, version: int) -> dict[str, float]:
        """Have every engine sample from ``version``. Returns the seconds of each part.

        Raises EngineError if an engine refuses the weights or reports another version afterwards.
        """
        started = time.monotonic()
        prepared = self._transport.prepare(self._source, version)
        paused = time.monotonic()
        try:
            self._load(prepared, version)
        except BaseException as error:
            self._discard(prepared, error)
            raise
        self._transport.cleanup(prepared)
        return {"write_time": paused - started, "pause_time": time.monotonic() - paused}

    def _load(self, prepared: Any, version: int) -> None:
        failure: BaseException | None = None
        try:
            # Retract rather than abort: a request that is still running is computed again, on the new weights.
            self._engines.pause("retract")
            self._engines.flush()
            self._transport.load(self._engines, prepared, version)
            self._check(version)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._resume(failure)

    def _check(self, version: int) -> None:
        wrong = {url: found for url, found in self._engines.versions().items() if found != str(version)}
        if wrong:
            raise EngineError(f"engines report other weights than version {version}: {wrong}", where="publish")
        if self._compare and len(set((found := self._engines.checksums()).values())) > 1:
            raise EngineError(f"engines serve different weights as version {version}: {found}", where="publish")

    def _discard(self, prepared: Any, failure: BaseException) -> None:
        discard = getattr(self._transport, "discard", None)
        if discard is None:
            return
        try:
            discard(prepared)
        except BufferRLError as error:
            failure.add_note(f"and what was prepared for them could not be freed: {error}")

    def _resume(self, failure: BaseException | None) -> None:
        try:
            self._engines.resume()
        except BufferRLError as error:
            if failure is None:
                raise
            failure.add_note(f"and the engines could not be continued: {error}")
