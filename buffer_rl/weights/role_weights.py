"""The newest weights for the role ``actor_fwd``: a folder of its own, whatever way the engines take theirs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Protocol

from buffer_rl.weights.disk import WeightSource


class WeightReader(Protocol):
    """Takes weights from a folder; ``buffer_rl.train.worker.RoleGroup`` is one."""

    def update_weights_from_disk(self, path: str, version: int) -> None: ...


class EnginePublisher(Protocol):
    """Publishes to the engines; ``buffer_rl.weights.publish.Publisher`` is one."""

    def publish(self, version: int) -> dict[str, float]: ...


class RolePublisher:
    """Publishes a version to the engines, where there are any, and to a role that computes with the actor's weights.

    folder: where versions are written. The newest stays there: a role that is restarted reads it again.
    """

    def __init__(
        self, engines: EnginePublisher | None, source: WeightSource, reader: WeightReader, folder: Path
    ) -> None:
        self._engines = engines
        self._source = source
        self._reader = reader
        self._folder = folder.absolute()

    def publish(self, version: int) -> dict[str, float]:
        """Have everybody take ``version``. Returns the seconds of each part."""
        times = {} if self._engines is None else self._engines.publish(version)
        started = time.monotonic()
        target = self._folder / f"v{version:06d}"
        shutil.rmtree(target, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._source.save_hf(str(target))
        self._reader.update_weights_from_disk(str(target), version)
        for older in self._folder.glob("v*"):
            if older != target:
                shutil.rmtree(older, ignore_errors=True)
        return times | {"role_time": time.monotonic() - started}
