"""The publication of one version: connect → prepare → pause → flush → begin → publish → end → confirm → continue.

Who waits for whom: the publisher waits for the trainer (to send) and for every engine (each call with a deadline);
where the run's last engine died, for its replacement.
An engine continues only after it confirmed the version: an attempt that fails leaves all of them paused for the next
one, which connects again and sends what was prepared once. Engines of the run's own fleet that fail the last attempt,
or that leave a call open which others answer, are dropped and replaced, and the others continue; any other failure ends
the run, with the engines paused.

Roles take the actor's weights after the engines have them: see ``buffer_rl.weights.role_weights``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from buffer_rl.errors import BufferRLError, EngineError
from buffer_rl.kinds.engine import WeightTransport
from buffer_rl.weights.sender import Senders

if TYPE_CHECKING:
    from buffer_rl.engines.control import EngineControlClient
    from buffer_rl.weights.confirm import LogProbCheck

ATTEMPTS = 3
FIRST_PAUSE_S = 0.5  # doubled after each attempt; the engines stay paused
TIMEOUT_S = 600.0
MAX_REASON_CHARS = 500


class Publisher:
    """Publishes versions through one transport.

    compare: after each, compare the weights that the engines serve. check: after each, compare what they sample with
    the trainer; not of embedded engines, which take nothing that does not fit. timeout_s: of one publication; no
    attempt begins later, and none is longer than a call to an engine and one to the trainer may be. first_pause_s:
    between the first attempt and the second. notice: called with a line on a failed attempt.
    """

    def __init__(
        self,
        transport: WeightTransport,
        trainer: Senders,
        engines: EngineControlClient,
        *,
        compare: bool = False,
        check: LogProbCheck | None = None,
        timeout_s: float = TIMEOUT_S,
        first_pause_s: float = FIRST_PAUSE_S,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._compare = compare
        self._check = check
        self._transport = transport
        self._trainer = trainer
        self._engines = engines
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._notice = notice
        self._connected: tuple[str, ...] | None = None
        self._doubtful: set[str] = set()
        self._prepared: int | None = None

    def publish(self, version: int) -> dict[str, float]:
        """Have every engine sample from ``version``. Returns the seconds of each part.

        Raises EngineError if, in the last of ``ATTEMPTS``, an engine that is not the run's own did not confirm the
        version, or none did. Engines that did not stay paused."""
        started = time.monotonic()
        self._prepared, self._paused_at = None, started
        try:
            self._publish_with_retries(version, deadline=started + self._timeout_s)
        except BaseException as error:
            self._abandon(version, error)
            raise
        finally:
            self._engines.end_publication()
        if (release := getattr(self._transport, "release", None)) is not None:
            release(version)
        return {"write_time": self._paused_at - started, "pause_time": time.monotonic() - self._paused_at}

    def close(self) -> None:
        """Free what the transport has, at the end of the run."""
        self._connected = None
        self._transport.close()

    def _publish_with_retries(self, version: int, *, deadline: float) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            pause_s = self._first_pause_s * 2 ** (attempt - 1)
            try:
                if attempt == ATTEMPTS:
                    self._engines.drop_failed_engines()
                if attempt > 1:
                    self._connected = None
                self._attempt(version)
                return
            except EngineError as error:
                if attempt == ATTEMPTS or time.monotonic() + pause_s >= deadline:
                    raise
                self._notify(version, attempt, error)
            time.sleep(pause_s)

    def _notify(self, version: int, attempt: int, error: EngineError) -> None:
        if self._notice is not None:
            reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
            self._notice(f"the publication of version {version} is tried again ({attempt} of {ATTEMPTS - 1}): {reason}")

    def _attempt(self, version: int) -> None:
        self._engines.wait_for_engine()
        if self._prepared is None:
            self._connect()
            self._transport.prepare(version)
            self._prepared, self._paused_at = version, time.monotonic()
        # Retract rather than abort: a request that is still running is computed again, on the new weights.
        self._engines.pause("retract")
        self._connect()  # after the pause: it has found engines that hang, and has those that waited for weights
        self._engines.flush()
        self._update(version)
        self._engines.resume(self._sampled(version, self._confirmed(version)))

    def _connect(self) -> None:
        receivers = tuple(self._engines.targets())
        if receivers != self._connected:
            self._connected = None
            self._transport.connect(self._trainer, self._engines)
            if self._check is not None:
                self._doubtful = {url for url, info in self._engines.server_info().items() if not info.is_ours}
            self._connected = receivers

    def _update(self, version: int) -> None:
        if not self._transport.staged:
            self._transport.publish(version)
            return
        try:
            self._engines.begin_weight_update()
            self._transport.publish(version)
        except BaseException:
            with contextlib.suppress(BufferRLError):  # an engine that got everything takes it, any other refuses
                self._engines.end_weight_update()
            raise
        self._engines.end_weight_update()

    def _confirmed(self, version: int) -> list[str]:
        """The engines that serve the whole version; those that do not are dropped, where the last attempt drops."""
        reported = self._engines.versions()
        if not reported:
            raise EngineError(f"no engine reports the weights of version {version}", where="publish")
        wrong = {url: found for url, found in reported.items() if found != str(version)}
        if wrong and (len(wrong) == len(reported) or not self._engines.drop(wrong)):
            raise EngineError(f"engines report other weights than version {version}: {wrong}", where="publish")
        if self._compare and len(set((found := self._engines.checksums()).values())) > 1:
            raise EngineError(f"engines serve different weights as version {version}: {found}", where="publish")
        return [url for url in reported if url not in wrong]

    def _sampled(self, version: int, urls: list[str]) -> list[str]:
        """Of the engines at ``urls`` those that sample from the version, after ``check``; the others as in
        ``_confirmed``, and paused."""
        doubtful = self._doubtful.intersection(urls)
        if self._check is None or not doubtful:
            return urls
        try:
            wrong = self._check.differing(self._engines, doubtful, version)
        except BaseException:
            self._halt(doubtful)
            raise
        if wrong:
            self._halt(doubtful)
            if len(wrong) == len(urls) or not self._engines.drop(wrong):
                raise EngineError(
                    f"engines do not sample from the weights of version {version}: {wrong}", where="publish"
                )
        return [url for url in urls if url not in wrong]

    def _halt(self, urls: Collection[str]) -> None:
        with contextlib.suppress(BufferRLError):  # one that is gone samples nothing
            self._engines.halt(urls)

    def _abandon(self, version: int, failure: BaseException) -> None:
        if isinstance(failure, EngineError):
            failure.add_note(f"engines that did not confirm version {version} stay paused until a publication succeeds")
        try:
            self.close()
        except BufferRLError as error:
            failure.add_note(f"and what was prepared for them could not be freed: {error}")
