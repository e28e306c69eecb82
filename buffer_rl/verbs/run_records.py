"""What a run's folder has recorded of its groups: the ledger, the metrics, the timeline, samples, and rows of steps.

Nothing is written, so that the run may be at work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.buffer.ledger_audit import LedgerAudit, ledger_writer
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.errors import ConfigError
from buffer_rl.files.row_file import read_rollout, rollout_path
from buffer_rl.observe.metrics import METRICS_FILE, read_metrics
from buffer_rl.observe.run_folder import QUARANTINE_FILE, SAMPLES_FILE, RunFacts, read_facts, read_jsonl
from buffer_rl.observe.timeline import read_trace
from buffer_rl.observe.timeline_stats import Spans
from buffer_rl.records.groups import GroupUid, TrainBatch

FLEET_LOG = Path("logs") / "fleet.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What was recorded of the samples of one group in one rollout. origin: the file, relative to the run's folder.
    rewards: one for each row, numbers if they are numbers; versions: those that sampled its tokens, ascending."""

    origin: str
    rollout_id: int
    rewards: Sequence[Any]
    versions: Sequence[int]


@dataclass(eq=False)
class RunRecords:
    """The files of one run. Each is read when it is first asked for; one that is missing is empty."""

    folder: Path
    audit: LedgerAudit
    facts: RunFacts = field(default_factory=RunFacts)

    @classmethod
    def opened(cls, run_dir: str) -> RunRecords:
        """The caller closes ``audit``. Raises ConfigError for a folder without a ledger, CheckpointError for a ledger
        that is damaged."""
        folder = Path(run_dir)
        if not (folder / FILE_NAME).is_file():
            raise ConfigError(
                "there is no ledger here", where=str(run_dir), expected=f"a run's folder, which holds {FILE_NAME}"
            )
        return cls(folder=folder, audit=LedgerAudit(folder / FILE_NAME), facts=read_facts(folder))

    @property
    def changed(self) -> Mapping[str, Any]:
        """The run's options that are not at their defaults, by flag."""
        return self.facts.changed

    @cached_property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``samples.jsonl``. Raises DataError."""
        return self._lines(SAMPLES_FILE)

    @cached_property
    def quarantined(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``quarantine.jsonl``. Raises DataError."""
        return self._lines(QUARANTINE_FILE)

    @cached_property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``metrics.jsonl``. Raises DataError."""
        return read_metrics(self.folder) if (self.folder / METRICS_FILE).is_file() else []

    @cached_property
    def spans(self) -> Spans:
        """The timeline. Raises DataError."""
        return read_trace(self.folder)

    @cached_property
    def writer(self) -> int | None:
        """The process of this machine that writes the ledger; None if it has ended, or is elsewhere."""
        return ledger_writer(self.folder / FILE_NAME)

    @cached_property
    def fleet_log(self) -> Sequence[str]:
        """The lines on engines."""
        path = self.folder / FLEET_LOG
        return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []

    def dump_path(self, rollout_id: int) -> Path | None:
        """Where ``--save-debug-rollout-data`` put the rows of a step; None without such a file."""
        template = self.changed.get("--save-debug-rollout-data")
        path = rollout_path(str(template), rollout_id) if template else None
        return path if path is not None and path.is_file() else None

    def dumped(self, rollout_id: int) -> TrainBatch | None:
        """The rows that a step trained on, where the run wrote them. Raises DataError for a damaged file."""
        path = self.dump_path(rollout_id)
        return None if path is None else read_rollout(path)

    def group_record(self, uid: GroupUid, ticket: int | None, selection: int | None) -> GroupRecord | None:
        """What was recorded of a training group that ``ticket`` finished and ``selection`` has; rows of the step are
        better than a sample's line."""
        batch = None if selection is None else self.dumped(selection)
        if batch is not None and selection is not None and (record := _of_rows(batch, uid, selection)):
            return record
        lines = [line for line in self.samples if _is_of(line, uid, "train") and line.get("rollout_id") == ticket]
        return _of_lines(lines, ticket) if lines and ticket is not None else None

    def eval_records(self, uid: GroupUid) -> list[GroupRecord]:
        """What was recorded of an evaluation's prompt, by version."""
        by_version: dict[int, list[Mapping[str, Any]]] = {}
        for line in self.samples:
            if _is_of(line, uid, "eval"):
                by_version.setdefault(int(line["rollout_id"]), []).append(line)
        return [_of_lines(lines, version) for version, lines in sorted(by_version.items())]

    def _lines(self, name: str) -> Sequence[Mapping[str, Any]]:
        path = self.folder / name
        return read_jsonl(path) if path.is_file() else []


def _is_of(line: Mapping[str, Any], uid: GroupUid, kind: str) -> bool:
    return line.get("uid") == str(uid) and line.get("kind") == kind


def _of_lines(lines: Sequence[Mapping[str, Any]], rollout_id: int) -> GroupRecord:
    versions = {int(span[0]) for line in lines for span in line.get("versions") or ()}
    return GroupRecord(
        origin=SAMPLES_FILE,
        rollout_id=rollout_id,
        rewards=[line.get("reward") for line in lines],
        versions=sorted(versions),
    )


def _of_rows(batch: TrainBatch, uid: GroupUid, rollout_id: int) -> GroupRecord | None:
    places = [place for place, row in enumerate(batch.row_ids) if row.uid == uid]
    if not places or "raw_reward" not in batch.columns:
        return None
    rewards = np.asarray(batch.columns["raw_reward"])[places]
    versions = {
        int(version)
        for name in ("weight_version", "newest_weight_version")
        if name in batch.columns
        for version in np.asarray(batch.columns[name])[places]
        if version >= 0
    }
    return GroupRecord(
        origin="--save-debug-rollout-data",
        rollout_id=rollout_id,
        rewards=rewards.tolist(),
        versions=sorted(versions),
    )
