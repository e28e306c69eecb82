"""The publication of one version: connect → prepare → pause → flush → begin → publish → end → confirm → continue.

Who waits for whom: the publisher waits for the trainer (to send) and for every engine (each call with a deadline).
An engine continues only after it confirmed the version: an attempt that fails leaves all of them paused for the next
one, which connects again and sends what was prepared once. Engines of the run's own fleet that fail the last attempt,
or that leave a call open which others answer, are dropped and replaced, and the others continue; any other failure ends
the run, with the engines paused.

The role ``actor_fwd`` reads each version from a folder of its own, whatever way the engines take theirs. So does the
reference model the versions that ``--ref-update-interval`` gives it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from buffer_rl.contracts import WeightTransport
from buffer_rl.errors import BufferRLError, EngineError
from buffer_rl.weights.disk import VERSION_GLOB
from buffer_rl.weights.sender import Senders

if TYPE_CHECKING:
    from buffer_rl.cluster.actor_group import ActorGroup
    from buffer_rl.engine.control import EngineControlClient

ATTEMPTS = 3
FIRST_PAUSE_S = 0.5  # doubled after each attempt; the engines stay paused
TIMEOUT_S = 600.0
MAX_REASON_CHARS = 500


class Publisher:
    """Publishes versions through one transport.

    compare: after each, compare the weights that the engines serve. timeout_s: of one publication; no attempt begins
    later, and none is longer than a call to an engine and one to the trainer may be. first_pause_s: between the
    first attempt and the second. notice: called with a line on a failed attempt.
    """

    def __init__(
        self,
        transport: WeightTransport,
        trainer: Senders,
        engines: EngineControlClient,
        *,
        compare: bool = False,
        timeout_s: float = TIMEOUT_S,
        first_pause_s: float = FIRST_PAUSE_S,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._compare = compare
        self._transport = transport
        self._trainer = trainer
        self._engines = engines
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._notice = notice
        self._connected: tuple[str, ...] | None = None
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
        if self._prepared is None:
            self._connect()
            self._transport.prepare(version)
            self._prepared, self._paused_at = version, time.monotonic()
        # Retract rather than abort: a request that is still running is computed again, on the new weights.
        self._engines.pause("retract")
        self._connect()  # after the pause: it has found engines that hang, and has those that waited for weights
        self._engines.flush()
        self._update(version)
        self._engines.resume(self._confirmed(version))

    def _connect(self) -> None:
        receivers = tuple(self._engines.targets())
        if receivers != self._connected:
            self._connected = None
            self._transport.connect(self._trainer, self._engines)
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

    def _abandon(self, version: int, failure: BaseException) -> None:
        if isinstance(failure, EngineError):
            failure.add_note(f"engines that did not confirm version {version} stay paused until a publication succeeds")
        try:
            self.close()
        except BufferRLError as error:
            failure.add_note(f"and what was prepared for them could not be freed: {error}")


class RolePublisher:
    """Publishes a version to the engines, where there are any, and to a role that computes with the actor's weights.

    save_hf: writes the newest weights as a Hugging Face folder. folder: where versions are written. The newest stays
    there: a role that is restarted reads it again. notice: called with a line where the role is down.
    """

    def __init__(
        self,
        engines: Publisher | None,
        save_hf: Callable[[str], object],
        reader: ActorGroup,
        folder: Path,
        notice: Callable[[str], None],
    ) -> None:
        self._engines = engines
        self._save_hf = save_hf
        self._reader = reader
        self._folder = folder.absolute()
        self._notice = notice

    def publish(self, version: int) -> dict[str, float]:
        """Have the engines and the role take ``version``. Returns the seconds of each part."""
        times = {} if self._engines is None else self._engines.publish(version)
        started = time.monotonic()
        _pass_on(self._save_hf, version, self._folder, self._load)
        return times | {"role_time": time.monotonic() - started}

    def _load(self, path: str, version: int) -> None:
        if not self._reader.call_and_keep("update_weights_from_disk", path, version):
            role = self._reader.role
            self._notice(f"{role} is down and passed over: its replacement takes version {version} before it works")

    def close(self) -> None:
        """Free what the transport to the engines has."""
        if self._engines is not None:
            self._engines.close()


class ReferenceUpdates:
    """Has the reference model take the actor's weights, and keeps what it has for checkpoints.

    save_hf: as of ``RolePublisher``. load: has every process with the reference model take a folder's weights, of a
    version. folder: where versions are written; the newest stays there.
    """

    def __init__(self, save_hf: Callable[[str], object], load: Callable[[str, int], object], folder: Path) -> None:
        self._save_hf = save_hf
        self._load = load
        self._folder = folder.absolute()
        self._newest: Path | None = None

    def update(self, version: int) -> None:
        """The reference is the actor of ``version``, the newest, from now on."""
        self._newest = _pass_on(self._save_hf, version, self._folder, self._load)

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
    for older in folder.glob(VERSION_GLOB):
        if older != target:
            shutil.rmtree(older, ignore_errors=True)
    return target
