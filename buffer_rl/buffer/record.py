"""What the Buffer knows of the run beside its groups: the published version, the commits, failures, the user's notes.

All of it is in the ledger as well, so that a Buffer that begins with the ledger of one that died knows the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid
from buffer_rl.records.utf8 import encodable

VERSION, METADATA, FAILURES = "version", "metadata", "failures"
RUN = "run"
"""Stands for all groups of the run among the counts of failures."""


class RunRecord:
    """Read from ``ledger`` when it is made, and written to it with every change.

    version: the newest published weights. committed: the step of each rollout that was trained on.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.version = int(ledger.recall(VERSION) or 0)
        self.committed = ledger.commits()
        self._metadata: dict[str, Any] = orjson.loads(ledger.recall(METADATA) or "{}")
        self._failures: dict[str, dict[str, int]] = orjson.loads(ledger.recall(FAILURES) or "{}")

    @property
    def metadata(self) -> dict[str, Any]:
        """The user's notes."""
        return dict(self._metadata)

    def commit(self, rollout_id: int, step: int) -> None:
        """Note what the ledger has committed."""
        self.committed[rollout_id] = step

    def set_version(self, version: int) -> None:
        """Another version is published."""
        self._ledger.remember(VERSION, str(version))
        self.version = version

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes; lone surrogates become escapes. Raises BufferStateError for what is
        not JSON."""
        try:
            merged = self._metadata | orjson.loads(orjson.dumps(encodable(dict(metadata))))
        except (TypeError, RecursionError) as error:
            raise BufferStateError(f"metadata is not JSON: {error}") from error
        self._ledger.remember(METADATA, orjson.dumps(merged).decode())
        self._metadata = merged

    def count_failure(self, uid: GroupUid, kind: str) -> tuple[int, int]:
        """Count a failed attempt. Returns how many of this ``kind`` the run had, and how many of them the group."""
        failures = {known: dict(counts) for known, counts in self._failures.items()}
        counts = failures.setdefault(kind, {})
        for counted in (RUN, str(uid)):
            counts[counted] = counts.get(counted, 0) + 1
        self._ledger.remember(FAILURES, orjson.dumps(failures).decode())
        self._failures = failures
        return counts[RUN], counts[str(uid)]

    def restore(self, version: int, metadata: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, whose ledger was restored. The run has its full budget of failures again."""
        self.set_version(version)
        self._metadata = {}
        self.update_metadata(metadata)
        self.committed = self._ledger.commits()
        failures = orjson.loads(self._ledger.recall(FAILURES) or "{}")
        self._failures = {
            kind: {name: count for name, count in counts.items() if name != RUN} for kind, counts in failures.items()
        }
        self._ledger.remember(FAILURES, orjson.dumps(self._failures).decode())
