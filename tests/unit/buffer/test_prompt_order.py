"""The Buffer's order of rows by difficulty: what it knows when, that a run goes on from its ledger with equal orders,
and that the ledger adds up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferStateError, CheckpointError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, RowId, SampleGroup, Ticket
from harness.ledger_contents import copied, go_back
from harness.tickets import schedule_of

ROWS, PER_STEP, STEPS, KILLED_STEPS = 12, 3, 9, 6
Trained = dict[int, list[tuple[int, int]]]


class Killed(Exception):
    """The Buffer's process died."""


class Run:
    """A Buffer of an order by difficulty, whose rows have rewards by row and epoch: a third is never solved, a third
    always, and the others change. A filter rejects what all samples solve, and a part of what none does."""

    def __init__(self, folder: Path, staleness: int = 0, weights: str = "0:0,mid:2,1:1", sources: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        self.file, self.staleness = folder / "ledger.sqlite", staleness
        paths = []
        for number in range(sources):
            paths.append(str(folder / f"rows{number}.jsonl"))
            Path(paths[-1]).write_text("".join(json.dumps({"prompt": f"{number} {row}"}) + "\n" for row in range(ROWS)))
        self.args: Any = compose(CORE_SECTIONS)(
            prompt_data=paths,
            prompt_data_weights=[1, 2.7] if sources == 2 else None,
            n_samples_per_prompt=2,
            rollout_batch_size=PER_STEP,
            prompt_order="difficulty",
            difficulty_weights=weights,
        )
        self.calls, self.kill_at = 0, -1
        self.state = self.open(restarted=False)

    def open(self, restarted: bool) -> BufferState:
        source = PromptDataSource(self.args)
        ledger = Ledger(self.file, run="r", keep_selected=True)
        for dataset in source.datasets:
            ledger.set_num_rows(dataset.source_hash, len(dataset))
        return BufferState(
            source,
            ledger=ledger,
            groups_per_step=PER_STEP,
            schedule=schedule_of(self.staleness),
            restarted=restarted,
        )

    def call(self, method: str, *args: Any) -> Any:
        """A call of the Buffer; before one of them it dies, and another one begins with its ledger."""
        if self.calls == self.kill_at:
            self.calls += 1
            self.state.ledger.close()
            self.state = self.open(restarted=True)
            raise Killed
        self.calls += 1
        return getattr(self.state, method)(*args)

    def reward(self, uid: GroupUid) -> float:
        return [0.0, 1.0, 0.5, [0.0, 0.5, 1.0][(uid.row + uid.epoch) % 3]][uid.row % 4]

    def report(self, ticket: Ticket, group: SampleGroup) -> bool:
        """Whether the group is kept."""
        uid, reward = group.uid, self.reward(group.uid)
        if reward == 1 or (reward == 0 and uid.row % 8 == 0):
            self.call("reject", ticket, uid, group.attempt, "dull", reward)
            return False
        columns = {"tokens": [np.zeros(2, np.int32)] * 2, "loss_mask": [np.ones(1, np.float32)] * 2}
        self.call("finish", ticket, uid, group.attempt, [RowId(uid, 0), RowId(uid, 1)], columns, None, reward)
        return True

    def produce(self, number: int, random: Random) -> Iterator[None]:
        """A ticket, whose groups end in a random order."""
        ticket = self.call("generate", number)
        yield
        held: list[SampleGroup] = list(self.call("get_samples", ticket, ticket.num_groups))
        while held:
            yield
            group = held.pop(random.randrange(len(held)))
            if not self.report(ticket, group):
                held += self.call("get_samples", ticket, 1)
        self.call("end_ticket", ticket)

    def train(self, step: int, trained: Trained) -> Iterator[None]:
        report, _ = self.call("close_selection", step)
        assert report is not None
        yield
        trained[step] = [(row.uid.row, row.uid.epoch) for row in self.state.get_data(step).row_ids]
        self.call("commit", step, step + 1)
        yield
        self.call("release", step + 1)

    def version(self) -> int:
        return int(self.state.get_progress()["version"])

    def play(self, steps: int = STEPS, seed: int = 0, kill_at: int = -1) -> Trained:
        """Tickets one after another, up to S ahead of the steps; which moves next is random. Returns each step's
        groups."""
        self.kill_at = kill_at
        random, trained = Random(seed), Trained()
        ticket = self.version()
        work: dict[str, Iterator[None]] = {}
        while self.version() < steps:
            step = self.version()
            if "produce" not in work and ticket < steps and ticket - self.staleness <= step:
                work["produce"] = self.produce(ticket, random)
                ticket += 1
            ended = ticket - ("produce" in work)
            if "train" not in work and step < ended:
                work["train"] = self.train(step, trained)
            name = random.choice(sorted(work))
            try:
                if next(work[name], "ended") == "ended":
                    del work[name]
            except Killed:
                work.clear()
                if step in self.state.ledger.commits():
                    self.state.release(step + 1)
                    step += 1
                self.state.abandon(step)
                ticket = step
        return trained

    def entries(self) -> list[tuple[GroupUid, GroupState]]:
        audit = LedgerAudit(self.file)
        try:
            assert audit.faults() == []
            assert all(sum(epoch.counts.values()) == ROWS for epoch in audit.epochs())
            return audit.states()
        finally:
            audit.close()

    def close(self) -> None:
        self.state.ledger.close()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("sources", [1, 2, 3])
def test_the_order_does_not_depend_on_the_order_in_which_groups_finish(
    tmp_path: Path, staleness: int, sources: int
) -> None:
    results = []
    for seed in range(4):
        run = Run(tmp_path / str(seed), staleness, sources=sources)
        results.append((run.play(seed=seed), run.entries()))
        run.close()
    assert len(results[0][0]) == STEPS
    assert all(result == results[0] for result in results[1:])
    states = [state for _, state in results[0][1]]
    assert states.count(GroupState.TRAINED) == STEPS * PER_STEP


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_buffer_that_died_at_any_call_goes_on_with_the_same_order(tmp_path: Path, staleness: int) -> None:
    undisturbed = Run(tmp_path / "whole", staleness)
    wanted = undisturbed.play(KILLED_STEPS)
    entries = undisturbed.entries()
    undisturbed.close()
    assert {reason_of(undisturbed, uid) for uid, _ in entries} >= {"curriculum", "dull"}
    for kill_at in range(undisturbed.calls):
        run = Run(tmp_path / f"killed{kill_at}", staleness)
        assert run.play(KILLED_STEPS, kill_at=kill_at) == wanted, kill_at
        assert run.calls > kill_at
        assert run.entries() == entries, kill_at
        run.close()


def reason_of(run: Run, uid: GroupUid) -> str:
    audit = LedgerAudit(run.file)
    entry = audit.entry(uid)
    audit.close()
    return "" if entry is None else entry.reason


@pytest.mark.parametrize(("staleness", "sources"), [(0, 1), (1, 1), (0, 2), (0, 3)])
def test_a_resumed_run_goes_on_with_the_same_order(tmp_path: Path, staleness: int, sources: int) -> None:
    whole = Run(tmp_path / "whole", staleness, sources=sources)
    whole.play(4)
    saved, copy = json.loads(json.dumps(whole.state.state_dict())), copied(whole.state.ledger)
    wanted = whole.play(STEPS)
    assert min(wanted) == 4
    resumed = Run(tmp_path / "resumed", staleness, sources=sources)
    resumed.play(2)  # and then goes to another moment
    resumed.state.load_state_dict(saved, lambda: go_back(resumed.state.ledger, copy))
    assert resumed.play(STEPS) == wanted
    assert resumed.entries() == whole.entries()
    whole.close(), resumed.close()


def test_a_reward_counts_from_the_ticket_on_that_knows_its_step(tmp_path: Path) -> None:
    """At a staleness of 1 ticket r knows the steps and tickets before r - 1, whatever has ended by then."""
    for staleness in (0, 1):
        run = Run(tmp_path / str(staleness), staleness)
        known = []
        for number in range(4):
            for _ in run.produce(number, Random(0)):
                pass
            report, _ = run.state.close_selection(number)
            assert report is not None
            known.append(ROWS - report.metrics["rollout/pool_unseen"])
            assert sum(report.metrics[f"rollout/pool_{pool}"] for pool in ("low", "mid", "high", "unseen")) == ROWS
            run.state.commit(number, number + 1)
            run.state.release(number + 1)
        run.close()
        assert known[: 1 + staleness] == [0] * (1 + staleness)
        assert known[1 + staleness] >= PER_STEP


def test_rows_of_weight_0_are_rejected_once_an_epoch_and_their_epoch_ends(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.play()
    audit = LedgerAudit(run.file)
    epochs = audit.epochs()
    assert len(epochs) >= 3
    for epoch in epochs[:-1]:
        assert epoch.counts[GroupState.PENDING] == 0
        assert sum(epoch.counts.values()) == ROWS
    assert audit.faults() == []
    drops = [row for row in audit.tickets() if row.rejected]
    assert drops  # of the filter: a row that was passed over was no lease of a ticket
    audit.close()
    run.close()


def test_a_refused_write_leaves_the_order_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(tmp_path / name) for name in ("whole", "refused")]
    for run in runs:
        run.play(5)
    ledger = runs[1].state.ledger
    ticket = runs[1].state.generate(5)

    def refuse(key: str, value: str) -> None:
        raise BufferStateError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "remember", refuse)
        with pytest.raises(BufferStateError, match="full"):
            runs[1].state.get_samples(ticket, 7)
    wanted = runs[0].state.get_samples(runs[0].state.generate(5), 7)
    assert [group.uid for group in runs[1].state.get_samples(ticket, 7)] == [group.uid for group in wanted]
    for run in runs:
        run.close()


def test_a_run_in_which_no_row_has_a_weight_is_refused_by_name_and_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, weights="0:0,mid:0,1:0")
    ticket = run.state.generate(0)
    for group in run.state.get_samples(ticket, ROWS):
        run.report(ticket, group)
    run.state.end_ticket(ticket)
    run.state.close_selection(0)
    run.state.commit(0, 1)
    run.state.release(1)
    before = run.entries()
    while queued := run.state.get_buffer_length():  # what the first step had too many of
        ticket = run.state.generate(run.version())
        for group in run.state.get_samples(ticket, queued):
            run.report(ticket, group)
        run.state.end_ticket(ticket)
        run.state.close_selection(ticket.rollout_id)
        run.state.commit(ticket.rollout_id, ticket.rollout_id + 1)
        run.state.release(ticket.rollout_id + 1)
    ticket = run.state.generate(run.version())
    with pytest.raises(BufferStateError, match=f"all {ROWS} rows are in pools of weight 0"):
        run.state.get_samples(ticket, 1)
    assert [uid for uid, _ in run.entries()] == [uid for uid, _ in before]
    run.close()


def test_another_order_does_not_go_on_from_the_state(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.play(2)
    saved = run.state.state_dict()
    shuffled = PromptDataSource(run.args.model_copy(update={"prompt_order": "epoch", "difficulty_weights": None}))
    with pytest.raises(CheckpointError, match="order 'difficulty', these None"):
        shuffled.load_state_dict(saved["source"])
    with pytest.raises(CheckpointError, match="order None, these 'difficulty'"):
        PromptDataSource(run.args).load_state_dict(shuffled.state_dict())
    run.close()
