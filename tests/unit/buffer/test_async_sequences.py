"""Any sequence of events of an asynchronous run, with deaths: no group is too old, and none is trained twice."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import BufferStateError
from harness.async_run import AsyncRun


class Chance:
    """Random events of a run; ``go`` takes ``num_steps`` steps, whose staleness the Buffer checks at each close."""

    def __init__(self, run: AsyncRun, draw: Random) -> None:
        self.run, self.draw = run, draw
        self.trained = self.opened = 0
        self.closed = False
        self.leased: dict[int, list[int]] = {}
        self.versions: dict[int, int] = {}
        self.steps: list[list[int]] = []
        self.events = [self.open, self.lease, self.finish, self.finish, self.close, self.commit, self.release]
        self.weights = [4, *(draw.choice([1, 4]) for _ in self.events[1:])]
        rare = [self.reject, self.give_back, self.end, self.pass_on, self.lose_payloads, self.lose_buffer]
        self.weights += [draw.choice([0.0, 0.3]) for _ in rare]
        self.events += rare

    def go(self, num_steps: int) -> None:
        for _ in range(4000):
            self.draw.choices(self.events, self.weights)[0]()
            if self.trained >= num_steps:
                return
        raise AssertionError("the run does not go on")

    def ticket(self, leased: bool = False) -> int | None:
        found = [number for number in self.run.tickets if self.leased[number] or not leased]
        return self.draw.choice(found) if found else None

    def take(self) -> tuple[int, int] | None:
        if (number := self.ticket(leased=True)) is None:
            return None
        return number, self.leased[number].pop(self.draw.randrange(len(self.leased[number])))

    def open(self) -> None:
        if self.opened <= self.run.version + self.run.schedule.target:
            assert self.run.generate(self.opened) > 0
            self.leased[self.opened] = []
            self.opened += 1

    def lease(self) -> None:
        if (number := self.ticket()) is None:
            return
        try:
            rows = self.run.lease(number, self.draw.randint(1, 3))
        except BufferStateError:  # it has all of its groups
            return
        self.leased[number] += rows
        self.versions |= dict.fromkeys(rows, self.run.version)

    def finish(self) -> None:
        if found := self.take():
            self.run.finish(*found, version=self.versions[found[1]])

    def reject(self) -> None:
        if found := self.take():
            self.run.reject(*found)

    def give_back(self) -> None:
        if found := self.take():
            self.run.give_back(*found)

    def end(self) -> None:
        number = self.ticket()
        if number is not None and (not self.leased[number] or self.draw.random() < 0.2):
            self.run.end(number)

    def close(self) -> None:
        if self.closed:
            return
        for number in [number for number in self.run.tickets if not self.leased[number]]:
            if self.draw.random() < 0.3:
                self.run.end(number)
        rows = self.run.close(self.trained)
        if rows == []:  # nothing was finished: the driver's run ends, this one begins the step again
            self.start_again()
        elif rows is not None:
            assert len(rows) == self.run.per_step or not self.run.tickets
            self.steps.append(rows)
            self.closed = True

    def commit(self) -> None:
        if self.closed:
            self.run.state.commit(self.trained, self.trained + 1)
            self.trained, self.closed = self.trained + 1, False

    def release(self) -> None:
        if self.run.version < self.trained:
            self.run.state.release(self.draw.randint(self.run.version + 1, self.trained))

    def pass_on(self) -> None:
        if (number := self.ticket()) is not None:
            self.run.tickets[number] = self.run.state.pass_on(self.run.tickets[number])
            self.leased[number].clear()

    def lose_payloads(self) -> None:
        if not self.closed:
            self.start_again()

    def lose_buffer(self) -> None:
        self.run.restart()
        self.start_again()

    def start_again(self) -> None:
        """What the trainer has stays."""
        first = self.trained + self.closed
        self.run.state.abandon(first)
        self.run.tickets.clear()
        self.opened = first


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_group_is_too_old_and_each_is_trained_at_most_once(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    target = draw.randint(1, 3)
    bound = target + draw.randint(0, 2)
    run = AsyncRun(tmp_path, per_step=draw.randint(1, 3), target=target, bound=bound, num_rows=400)
    chance = Chance(run, draw)
    chance.go(12)
    trained = [row for rows in chance.steps for row in rows]
    assert len(set(trained)) == len(trained)
    if chance.closed:
        run.state.commit(chance.trained, chance.trained + 1)
    assert sorted(trained) == [row for row in range(400) if run.state_of(row) is GroupState.TRAINED]
    audit = LedgerAudit(tmp_path / "ledger.sqlite")
    assert audit.faults() == []
    audit.close()
