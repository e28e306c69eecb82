"""What a run's folder has recorded of its groups: the ledger, the metrics, samples, and rows of steps.

Nothing is written, so that the run may be at work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.buffer.ledger_audit import LedgerAudit, ledger_writer
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.errors import ConfigError
from buffer_rl.files.row_file import read_rollout, rollout_path
from buffer_rl.observe.run_folder import SAMPLES_FILE, RunFacts, read_facts, records_in
from buffer_rl.records.groups import GroupUid, TrainBatch


def refuse_absent(path: str) -> None:
    """Raises ConfigError if there is neither a file nor a folder at a local path."""
    if "://" not in path and not Path(path).exists():
        raise ConfigError("there is no such folder", where=path, hint=f"the current folder is {Path.cwd()}")


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
    """The files of one run; one that is missing is empty."""

    folder: Path
    audit: LedgerAudit
    facts: RunFacts

    @classmethod
    @contextmanager
    def opened(cls, run_dir: str) -> Iterator[RunRecords]:
        """Raises ConfigError for a folder without a ledger, CheckpointError for a ledger that is damaged."""
        folder, ledger = Path(run_dir), Path(run_dir, FILE_NAME)
        if not ledger.is_file():
            refuse_absent(run_dir)
            expected = f"a run's folder, which holds {FILE_NAME}"
            raise ConfigError("there is no ledger here", where=str(run_dir), expected=expected)
        with closing(LedgerAudit(ledger)) as audit:
            yield cls(folder=folder, audit=audit, facts=read_facts(folder))

    @property
    def at_work(self) -> bool:
        """Whether a process of this machine writes the ledger; not if the run has ended, or is elsewhere."""
        return ledger_writer(self.folder / FILE_NAME) is not None

    @cached_property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``samples.jsonl``. Raises DataError."""
        return records_in(self.folder, SAMPLES_FILE)

    def dumped(self, rollout_id: int) -> TrainBatch | None:
        """The rows that a step trained on, if ``--save-debug-rollout-data`` wrote them. Raises DataError for a damaged
        file."""
        template = self.facts.changed.get("--save-debug-rollout-data")
        path = rollout_path(str(template), rollout_id) if template else None
        return read_rollout(path) if path is not None and path.is_file() else None

    def group_record(self, uid: GroupUid, ticket: int | None, selection: int | None) -> GroupRecord | None:
        """What was recorded of a training group that ``ticket`` finished and ``selection`` has; rows of the step are
        better than a sample's line."""
        batch = None if selection is None else self.dumped(selection)
        if batch is not None and (record := _of_rows(batch, uid)):
            return record
        return None if ticket is None else self.sample_records(uid, "train").get(ticket)

    def sample_records(self, uid: GroupUid, kind: str) -> dict[int, GroupRecord]:
        """What ``samples.jsonl`` has of a group, by rollout or evaluated version, ascending. kind: train or eval."""
        lines: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for line in self.samples:
            if line.get("uid") == str(uid) and line.get("kind") == kind:
                lines[int(line["rollout_id"])].append(line)
        return {rollout: _of_lines(of_rollout, rollout) for rollout, of_rollout in sorted(lines.items())}


def _of_lines(lines: Sequence[Mapping[str, Any]], rollout_id: int) -> GroupRecord:
    rewards = [line.get("reward") for line in lines]
    versions = sorted({int(span[0]) for line in lines for span in line.get("versions") or ()})
    return GroupRecord(origin=SAMPLES_FILE, rollout_id=rollout_id, rewards=rewards, versions=versions)


def _of_rows(batch: TrainBatch, uid: GroupUid) -> GroupRecord | None:
    places = [place for place, row in enumerate(batch.row_ids) if row.uid == uid]
    if not places or "raw_reward" not in batch.columns:
        return None
    rewards = np.asarray(batch.columns["raw_reward"])[places].tolist()
    names = [name for name in ("weight_version", "newest_weight_version") if name in batch.columns]
    found = {int(version) for name in names for version in np.asarray(batch.columns[name])[places]}
    versions = sorted(version for version in found if version >= 0)
    origin = "--save-debug-rollout-data"
    return GroupRecord(origin=origin, rollout_id=batch.rollout_id, rewards=rewards, versions=versions)
