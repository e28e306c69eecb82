"""The publication of one version: write → pause → flush → update → check → continue.

Who waits for whom: the publisher waits for the trainer (to write) and for every engine (each call with a
deadline). Whatever fails, the engines continue, so that none stays paused. A failed attempt is repeated from ``pause``
on with what was prepared once; every step may be repeated. After the last attempt the transport frees what it prepared.

The role ``actor_fwd`` reads each version from a folder of its own, whatever way the engines take theirs. So does the
reference model the versions that ``--ref-update-interval`` gives it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_rl.contracts import WeightTransport
from buffer_rl.errors import BufferRLError, EngineError
from buffer_rl.weights.disk import WeightSource

if TYPE_CHECKING:
    from buffer_rl.cluster.actor_group import ActorGroup
    from buffer_rl.engine.control import EngineControlClient

ATTEMPTS = 3
FIRST_PAUSE_S = 0.5  # doubled after each attempt; engines generate meanwhile
TIMEOUT_S = 600.0
MAX_REASON_CHARS = 500


class Publisher:
    """Publishes versions through one transport.

    compare: after each, compare the weights that the engines serve. timeout_s: of one publication; no attempt begins
    later. first_pause_s: between the first attempt and the second. notice: called with a line on a failed attempt.
    """

    def __init__(
        self,
        transport: WeightTransport,
        source: WeightSource,
        engines: EngineControlClient,
        *,
        compare: bool = False,
        timeout_s: float = TIMEOUT_S,
        first_pause_s: float = FIRST_PAUSE_S,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._compare = compare
        self._transport = transport
        self._source = source
        self._engines = engines
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._notice = notice

    def publish(self, version: int) -> dict[str, float]:
        """Have every engine sample from ``version``. Returns the seconds of each part.

        Raises EngineError if, in the last of ``ATTEMPTS``, an engine refuses the weights or reports another version
        afterwards.
        """
        started = time.monotonic()
        prepared = self._transport.prepare(self._source, version)
        paused = time.monotonic()
        try:
            self._load_with_retries(prepared, version, deadline=started + self._timeout_s)
        except BaseException as error:
            self._discard(prepared, error)
            raise
        self._transport.cleanup(prepared)
        return {"write_time": paused - started, "pause_time": time.monotonic() - paused}

    def _load_with_retries(self, prepared: Any, version: int, *, deadline: float) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            pause_s = self._first_pause_s * 2 ** (attempt - 1)
            try:
                if attempt == ATTEMPTS:
                    self._engines.drop_failed_engines()
                self._load(prepared, version)
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
        reported = self._engines.versions()
        if not reported:
            raise EngineError(f"no engine reports the weights of version {version}", where="publish")
        wrong = {url: found for url, found in reported.items() if found != str(version)}
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


class RolePublisher:
    """Publishes a version to the engines, where there are any, and to a role that computes with the actor's weights.

    folder: where versions are written. The newest stays there: a role that is restarted reads it again.
    """

    def __init__(self, engines: Publisher | None, source: WeightSource, reader: ActorGroup, folder: Path) -> None:
        self._engines = engines
        self._source = source
        self._reader = reader
        self._folder = folder.absolute()

    def publish(self, version: int) -> dict[str, float]:
        """Have the engines and the role take ``version``. Returns the seconds of each part."""
        times = {} if self._engines is None else self._engines.publish(version)
        started = time.monotonic()
        load = partial(self._reader.call_and_keep, "update_weights_from_disk")
        _pass_on(self._source.save_hf, version, self._folder, load)
        return times | {"role_time": time.monotonic() - started}


class ReferenceUpdates:
    """Has the reference model take the actor's weights, and keeps what it has for checkpoints.

    load: has every process with the reference model take a folder's weights, of a version. folder: where versions are
    written; the newest stays there.
    """

    def __init__(self, source: WeightSource, load: Callable[[str, int], object], folder: Path) -> None:
        self._source = source
        self._load = load
        self._folder = folder.absolute()
        self._newest: Path | None = None

    def update(self, version: int) -> None:
        """The reference is the actor of ``version``, the newest, from now on."""
        self._newest = _pass_on(self._source.save_hf, version, self._folder, self._load)

    def save(self, folder: Path) -> None:
        """Copy the reference to ``folder``; nothing while it is the initial one."""
        if self._newest is not None:
            shutil.copytree(self._newest, folder)

    def restore(self, folder: Path, version: int) -> None:
        """The inverse of ``save``. The weights are copied: the checkpoint may be removed while the run needs them."""
        if folder.is_dir():
            self._newest = _pass_on(partial(shutil.copytree, folder), version, self._folder, self._load)


def _pass_on(write: Callable[[str], object], version: int, folder: Path, load: Callable[[str, int], object]) -> Path:
    """Write a version into a folder of its own in ``folder``, load it, and remove older ones. Returns its folder."""
    target = folder / f"v{version:06d}"
    shutil.rmtree(target, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write(str(target))
    load(str(target), version)
    for older in folder.glob("v*"):
        if older != target:
            shutil.rmtree(older, ignore_errors=True)
    return target
