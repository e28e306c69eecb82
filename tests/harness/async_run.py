"""A Buffer of an asynchronous run, whose groups are named by the rows of their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.pool import ReadRequest
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.records.groups import GroupUid, RolloutReport, RowId, Ticket


class AsyncRun:
    """A Buffer with its ledger in a file. Groups are of one sample and are named by their rows, in the order of the
    data."""

    def __init__(self, folder: Path, per_step: int = 2, target: int = 1, bound: int = 2, num_rows: int = 40) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.per_step = folder, per_step
        self.schedule = Schedule(mode=Mode.ASYNC, target=target, max_staleness=bound)
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"p{row}"}) + "\n" for row in range(num_rows)))
        self.args: Any = compose(CORE_SECTIONS)(prompt_data=str(data), n_samples_per_prompt=1, rollout_shuffle=False)
        self.source = PromptDataSource(self.args).source_hashes[0]
        self.state = self.open_buffer(restarted=False)
        self.tickets: dict[int, Ticket] = {}

    def open_buffer(self, restarted: bool) -> BufferState:
        evaluated = PromptDataSource(self.args).get_samples(4)  # with the uids of training groups
        return BufferState(
            PromptDataSource(self.args),
            ledger=Ledger(self.folder / "ledger.sqlite", run="r", keep_selected=True),
            groups_per_step=self.per_step,
            eval_groups=lambda: evaluated,
            schedule=self.schedule,
            restarted=restarted,
        )

    def restart(self) -> None:
        """Another Buffer begins with the ledger."""
        self.state.ledger.close()
        self.state = self.open_buffer(restarted=True)

    def generate(self, number: int) -> int:
        """Open a ticket. Returns how many groups it has."""
        self.tickets[number] = self.state.generate(number)
        return self.tickets[number].num_groups

    def lease(self, number: int, num_groups: int, chosen: list[GroupUid] | None = None) -> list[int]:
        return [group.uid.row for group in self.state.get_samples(self.tickets[number], num_groups, chosen)]

    def finish(self, number: int, *rows: int, version: int | None = None) -> None:
        """version: of the tokens, by default the published one."""
        version = self.version if version is None else version
        for row in rows:
            uid = self.uid(row)
            columns: dict[str, Any] = {
                "tokens": [np.full(2, row, np.int32)],
                "loss_mask": [np.ones(1, np.float32)],
                "weight_version": np.asarray([version], np.int32),
            }
            self.state.finish(self.tickets[number], uid, self.attempt(row), [RowId(uid, 0)], columns)

    def reject(self, number: int, row: int) -> None:
        self.state.reject(self.tickets[number], self.uid(row), self.attempt(row), "dull")

    def give_back(self, number: int, row: int) -> None:
        self.state.add_samples(self.tickets[number], [(self.uid(row), self.attempt(row))])

    def end(self, number: int) -> RolloutReport:
        return self.state.end_ticket(self.tickets.pop(number))

    def close(self, step: int, last_ticket: int | None = None) -> list[int] | None:
        """The rows of the step; None if it must wait."""
        report, revision = self.state.close_selection(step, last_ticket)
        assert revision == self.state.revision
        if report is None:
            return None
        rows = [row_id.uid.row for row_id in self.state.get_data(step).row_ids] if report.num_groups else []
        assert report.num_groups == report.num_rows == len(rows)
        return rows

    def publish(self, version: int) -> None:
        """Commit and release the steps before it."""
        for step in range(self.version, version):
            self.state.commit(step, step + 1)
        self.state.release(version)

    def read(self, step: int) -> list[int]:
        """What the next deals of the final reader have."""
        rows: list[int] = []
        deal = 0
        while (meta := self.state.take(f"train_{step}", _deal(deal))[0]).dealt:
            rows += [row_id.uid.row for row_id in meta.row_ids]
            deal += 1
        return rows

    @property
    def version(self) -> int:
        return int(self.state.get_progress()["version"])

    def uid(self, row: int) -> GroupUid:
        return GroupUid(self.source, row, 0)

    def attempt(self, row: int) -> int:
        return self.state.ledger.entry(self.uid(row)).attempt

    def state_of_foreign(self, row: int) -> GroupState:
        """Of a group of the source ``theirs``."""
        return self.state.ledger.entry(GroupUid("theirs", row, 0)).state

    def state_of(self, row: int) -> GroupState:
        return self.state.ledger.entry(self.uid(row)).state


def _deal(number: int) -> ReadRequest:
    return ReadRequest(reader="train", fields=frozenset({"tokens"}), num_rows=1, is_final=True, deal=number)
