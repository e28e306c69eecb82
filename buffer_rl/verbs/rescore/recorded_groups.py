"""The groups that a run has recorded, as samples that can be scored again.

A step's rows (``--save-debug-rollout-data``) have all of its groups, and their tokens; ``samples.jsonl`` has the texts
of ``--dump-samples`` groups a rollout. Prompt, label and metadata come from the data files if they are unchanged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffer_rl.args import Args
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferRLError, DataError
from buffer_rl.records.groups import GroupUid, RowId, Sample, SampleGroup, Status, TrainBatch
from buffer_rl.rollout.prompts import load_tokenizer
from buffer_rl.verbs.run_records import RunRecords

NO_PROMPT = "no_prompt"
"""Why a group of a step's rows is not scored: neither the data nor samples.jsonl has its prompt."""
FANNED_OUT = "fanned_out"
"""Why a group of a step's rows is not scored: it has further rows, whose texts are not those of whole responses."""


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """The groups of one rollout with the rewards that they had. total: how many it has in the ledger, None if it is not
    known. trained_on: the ``reward`` of each row after normalisation, by row, where it was recorded. skipped: groups
    that cannot be scored, by reason."""

    rollout_id: int
    groups: list[SampleGroup] = field(default_factory=list)
    total: int | None = None
    trained_on: dict[RowId, float] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


class RecordReader:
    """Reads the recorded groups of a run. args: its options. notices: what the samples lack."""

    def __init__(self, records: RunRecords, args: Args) -> None:
        self.notices: list[str] = []
        self._records = records
        self._args = args
        self._source = self._opened_source()
        self._lines: dict[int, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for line in records.samples:
            if line.get("kind") == "train":
                self._lines[int(line["rollout_id"])][str(line.get("uid"))].append(line)
        self._tokenizer: Any = None

    def steps(self) -> list[RecordedStep]:
        """All rollouts, ascending, those of which nothing was recorded too. Raises DataError for damaged files."""
        commits = {rollout: number for rollout, _, number in self._records.audit.commits()}
        finished = {ticket.rollout_id: ticket.finished for ticket in self._records.audit.tickets(-1)}
        found = []
        for rollout in sorted({*commits, *finished, *self._lines}):
            batch = self._records.dumped(rollout)
            if batch is None:
                found.append(self._of_lines(rollout, finished.get(rollout)))
            else:
                found.append(self._of_rows(batch, commits.get(rollout)))
        return found

    def _opened_source(self) -> PromptDataSource | None:
        if self._args.data_source_path is None and self._args.prompt_data:
            try:
                return PromptDataSource(self._args)
            except BufferRLError as error:
                self.notices.append(f"the run's data cannot be read, so samples have no metadata: {error.what}")
        else:
            self.notices.append("the prompts are of a data source of the user's own, so samples have no metadata")
        return None

    def _prompts(self, uid: GroupUid, lines: Sequence[Mapping[str, Any]]) -> Sample:
        """The group's prompt, label and metadata. Raises DataError if neither the data nor ``lines`` have them."""
        try:
            if self._source is not None:
                return self._source.group_of(uid, 0)[0]
        except DataError:
            notice = "some rows are not in the run's data as it is now: their samples have no metadata"
            if notice not in self.notices:
                self.notices.append(notice)
        if not lines:
            raise DataError("neither the data nor samples.jsonl has its prompt", where=f"group {uid}")
        return Sample(uid=uid, prompt=lines[0]["prompt"], label=lines[0].get("label"))

    def _of_lines(self, rollout: int, total: int | None) -> RecordedStep:
        step = RecordedStep(rollout_id=rollout, total=total)
        for text, lines in self._lines.get(rollout, {}).items():
            uid = GroupUid.parse(text)
            prompt, parts, samples = self._prompts(uid, lines), Counter[int](), []
            for line in lines:
                index, length = int(line["sample_index"]), _length(line) or 1
                sample = prompt.as_prompt(index).changed(tokens=[0] * (1 + length), response_length=length)
                sample.response, sample.status, sample.reward = line["response"], Status(line["status"]), line["reward"]
                sample.part = parts[index]
                parts[index] += 1
                samples.append(sample)
            step.groups.append(SampleGroup(uid=uid, samples=samples))
        return step

    def _of_rows(self, batch: TrainBatch, total: int | None) -> RecordedStep:
        step = RecordedStep(rollout_id=batch.rollout_id, total=total)
        places: dict[GroupUid, list[int]] = {}
        for place, row in enumerate(batch.row_ids):
            places.setdefault(row.uid, []).append(place)
        names = ("response_length", "raw_reward", "reward")
        lengths, rewards, trained_on = (np.asarray(batch.columns[name]).tolist() for name in names)
        truncated = np.asarray(batch.columns.get("truncated", [False] * len(batch))).tolist()
        for uid, of_group in places.items():
            rows = [batch.row_ids[place] for place in of_group]
            if any(row.part for row in rows):
                step.skipped[FANNED_OUT] += 1
                continue
            known = [of[str(uid)] for of in self._lines.values() if str(uid) in of]
            try:
                prompt, samples = self._prompts(uid, known[-1] if known else ()), []
            except DataError:
                step.skipped[NO_PROMPT] += 1
                continue
            for place, row in zip(of_group, rows, strict=True):
                length = int(lengths[place])
                tokens = np.asarray(batch.columns["tokens"][place]).tolist()
                text = _text_of(known, row.sample_index, length)
                text = self._decoded(tokens[len(tokens) - length :]) if text is None else text
                sample = prompt.as_prompt(row.sample_index).changed(tokens=tokens, response_length=length)
                mask = np.asarray(batch.columns["loss_mask"][place])
                sample.loss_mask, sample.remove_sample = mask.astype(int).tolist(), not mask.any()
                sample.status = Status.TRUNCATED if truncated[place] else Status.COMPLETED
                sample.response, sample.reward = text, rewards[place]
                step.trained_on[row] = trained_on[place]
                samples.append(sample)
            step.groups.append(SampleGroup(uid=uid, samples=samples))
        return step

    def _decoded(self, tokens: Sequence[int]) -> str:
        """The text of a response as an engine gives it."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._args.hf_checkpoint, trust_remote_code=self._args.trust_remote_code)
        skips = self._args.rollout_skip_special_tokens
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skips))


def _text_of(known: Sequence[Sequence[Mapping[str, Any]]], index: int, length: int) -> str | None:
    """The text of a response in samples.jsonl, which a generate function may have written; None if it is not sure that
    the line is of these tokens."""
    lines = [line for line in known[0] if line["sample_index"] == index] if len(known) == 1 else []
    return str(lines[0]["response"]) if len(lines) == 1 and _length(lines[0]) == length else None


def _length(line: Mapping[str, Any]) -> int:
    """Tokens of the response of a sample's line."""
    return max((int(span[2]) for span in line.get("versions") or ()), default=0)
