"""What one group costs in the Buffer, in microseconds by operation, where many groups were or are in it. No Ray.

Times are the processor's, which other processes on the machine disturb little; waits for the disk are not counted.

Only the operations of ``BufferState`` and ``Ledger`` are called, so that the same measurement runs on another commit.
"""

from __future__ import annotations

import gc
import sqlite3
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.pool import ReadRequest
from buffer_rl.buffer.readers import ALL_ROWS, Share
from buffer_rl.buffer.state import BufferState
from buffer_rl.records.groups import Column, GroupUid, RowId, Sample, SampleGroup

STEP = 64
"""Groups of a step, and of one call where a pool has more."""
ROWS = 2
SOURCE_ROWS = 50_000
MEASURED = 40
"""Times of which the median is taken: the last ones."""
LONG_CALLS = 10
"""The same for calls that may cost as much as there are groups."""
RUN = "benchmark"
TOKENS = [np.arange(16, dtype=np.int32)] * ROWS
ONES = np.ones(16, dtype=np.float32)
COLUMNS: dict[str, Column] = {"tokens": TOKENS, "loss_mask": [ONES] * ROWS, "reward": np.ones(ROWS, dtype=np.float32)}
READ = ReadRequest(reader="ref_log_probs", fields=frozenset({"tokens"}), num_rows=STEP * ROWS)
READ_AHEAD = ReadRequest(
    reader="values", fields=frozenset({"tokens"}), num_rows=STEP * ROWS // 8, num_replicas=2, prefetch_reserve=1
)
TRAIN = ReadRequest(reader="train", fields=frozenset({"tokens", "ref_log_probs"}), num_rows=STEP * ROWS, is_final=True)


class Clock:
    """Microseconds of processor time of one group, by operation."""

    def __init__(self) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, operation: str, groups: int = STEP) -> Iterator[None]:
        """The block is ``operation`` for that many groups."""
        started = time.process_time()
        yield
        self._times[operation].append((time.process_time() - started) / groups * 1e6)

    def medians(self) -> dict[str, float]:
        """Of the last ``MEASURED`` times of each operation."""
        return {operation: statistics.median(times[-MEASURED:]) for operation, times in self._times.items()}


class Rows:
    """A data source whose groups take no time worth mentioning: the n-th one has the uid ``uid_of(n)``."""

    source_hashes = frozenset({"rows"})
    pool_weights = None

    def __init__(self, first: int) -> None:
        self._next = first

    def draw(self, num_groups: int) -> list[SampleGroup]:
        first, self._next = self._next, self._next + num_groups
        return [self.group_of(uid_of(number), number) for number in range(first, self._next)]

    def group_of(self, uid: GroupUid, number: int) -> SampleGroup:
        samples = [Sample(uid=uid, sample_index=i, group_index=number, prompt="p") for i in range(ROWS)]
        return SampleGroup(uid=uid, samples=samples)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]

    mark, back_to = state_dict, load_state_dict

    def __len__(self) -> int:
        return SOURCE_ROWS


def uid_of(number: int) -> GroupUid:
    """Rows in an order that looks shuffled, epoch after epoch."""
    return GroupUid("rows", number * 7919 % SOURCE_ROWS, number // SOURCE_ROWS)


def measure(part: str, size: int, path: Path) -> dict[str, float]:
    """Microseconds a group of each operation in ``part`` with about ``size`` groups. A ledger that it needs is in
    ``path``; another call goes on with it."""
    gc.disable()  # its passes over a growing heap would be timed with whatever triggers them
    clock = Clock()
    PARTS[part](clock, max(size // STEP, 1), path)
    gc.enable()
    return clock.medians()


def ledger_after(clock: Clock, steps: int, path: Path) -> None:
    """The ledger alone, after as many steps."""
    _fill(path, steps, _train)
    with closing(Ledger(path, run=RUN)) as ledger:
        first = ledger.num_admitted
        for number in range(max(ledger.commits()) + 1, max(ledger.commits()) + 1 + MEASURED):
            uids = [uid_of(first + i) for i in range(STEP)]
            first += STEP
            with clock("lease"), ledger.transaction():
                attempts = [ledger.lease(uid, number) for uid in uids]
            with clock("requeue"), ledger.transaction():
                for uid, attempt in zip(uids, attempts, strict=True):
                    ledger.requeue(uid, attempt)
            with ledger.transaction():
                attempts = [ledger.lease(uid, number) for uid in uids]
            with clock("finish"):
                for uid, attempt in zip(uids, attempts, strict=True):
                    ledger.finish(uid, attempt)
            with clock("select"):
                ledger.select(uids, number)
            with clock("commit"):
                ledger.commit(uids, number, number)


def steps_after(clock: Clock, steps: int, path: Path) -> None:
    """Steps of a Buffer that begins with the ledger of as many steps."""
    _fill(path, steps, _train)
    with closing(Ledger(path, run=RUN)) as ledger:
        with clock("restart", steps * STEP):
            state = _state(ledger, STEP)
        begin = max(ledger.commits()) + 1
        state.release(begin)
        for number in range(begin, begin + MEASURED):
            one_step(state, clock, number, STEP)


def steps_of_one_process(clock: Clock, steps: int, path: Path) -> None:
    """The last steps of a Buffer that made them all itself."""
    ledger = Ledger.in_memory()
    state = _state(ledger, STEP)
    for number in range(steps + MEASURED):
        one_step(state, clock, number, STEP)


def one_pool(clock: Clock, steps: int, path: Path) -> None:
    """One step of all groups, 64 at a time."""
    one_step(_state(Ledger.in_memory(), STEP), Clock(), 0, STEP)
    one_step(_state(Ledger.in_memory(), steps * STEP), clock, 0, steps * STEP)


def long_queue(clock: Clock, steps: int, path: Path) -> None:
    """Groups go out and come back while many are pending, and others pass the queue by."""
    groups = steps * STEP
    _fill(path, steps, _give_back)
    with closing(Ledger(path, run=RUN)) as ledger:
        with clock("restart", groups):
            state = _state(ledger, STEP)
        begin = max(ledger.commits(), default=-1) + 1
        state.release(begin)
        for number in range(begin, begin + LONG_CALLS):
            apart = [uid_of(i * steps) for i in range(STEP)]
            with clock("generate"):
                ticket = state.generate(number)
            for operation, chosen in (("lease", None), ("lease chosen", apart)):
                with clock(operation):
                    leased = state.get_samples(ticket, STEP, chosen)
                assert len(leased) == STEP
                with clock("requeue" if chosen is None else "requeue chosen"):
                    state.add_samples(ticket, [(group.uid, group.attempt) for group in leased])
            foreign = [GroupUid("foreign", row, number) for row in range(8)]
            with clock("finish foreign", len(foreign)):
                for uid in foreign:
                    state.finish(ticket, uid, 1, _rows(uid), COLUMNS)
            with clock("close"):
                state.end_ticket(ticket)
                state.close_selection(number)
            with clock("commit"):
                state.commit(number, number)
            with clock("release"):
                state.release(number + 1)


def evaluation(clock: Clock, steps: int, path: Path) -> None:
    """The first groups of a large evaluation."""
    state = _state(Ledger.in_memory(), STEP, steps * STEP)
    with clock("generate", steps * STEP):
        ticket = state.generate(0, evaluation=True)
    for _ in range(min(steps, LONG_CALLS)):
        with clock("lease"):
            leased = state.get_samples(ticket, STEP)
        with clock("finish"):
            for group in leased:
                state.finish(ticket, group.uid, group.attempt, _rows(group.uid), COLUMNS)


PARTS: dict[str, Callable[[Clock, int, Path], None]] = {
    "ledger": ledger_after,
    "steps": steps_after,
    "process": steps_of_one_process,
    "pool": one_pool,
    "queue": long_queue,
    "evaluation": evaluation,
}


def one_step(state: BufferState, clock: Clock, number: int, groups: int) -> None:
    """Rollout ``number``, from ``generate`` to ``release``, of all operations of a training step."""
    with clock("generate", groups):
        ticket = state.generate(number)
        state.open_selection(number)
    for _ in range(groups // STEP):
        with clock("lease"):
            leased = state.get_samples(ticket, STEP)
        reports = [(group, _rows(group.uid)) for group in leased]
        with clock("finish"):
            for group, rows in reports:
                state.finish(ticket, group.uid, group.attempt, rows, COLUMNS)
    for deal in range(min(groups // STEP * 4, LONG_CALLS)):
        with clock("take ahead", STEP // 8):
            assert state.take(ticket.task, replace(READ_AHEAD, deal=deal))[0].dealt
    for deal in range(groups // STEP):
        with clock("take"):
            found = state.take(ticket.task, replace(READ, deal=deal))[0].row_ids
        with clock("put_fields"):
            state.put_fields(ticket.task, found, {"ref_log_probs": [ONES] * len(found)})
    for deal in range(groups // STEP):
        with clock("take final"):
            assert state.take(ticket.task, replace(TRAIN, deal=deal))[0].dealt
    with clock("close", groups):
        state.end_ticket(ticket)
        state.close_selection(number)
    with clock("plan", groups):
        state.plan_data(number, ALL_ROWS)
    for mini_batch in range(min(groups // STEP, LONG_CALLS)):
        with clock("plan mini-batch"):
            state.plan_data(number, Share(num_steps=groups // STEP, step=mini_batch))
    with clock("commit", groups):
        state.commit(number, number)
    with clock("release", groups):
        state.release(number + 1)


def _state(ledger: Ledger, groups_per_step: int, eval_groups: int = 0) -> BufferState:
    source: Any = Rows(ledger.num_admitted)
    sets = [source.group_of(uid_of(number), number) for number in range(eval_groups)]
    return BufferState(source, ledger=ledger, groups_per_step=groups_per_step, eval_groups=lambda: sets)


def _rows(uid: GroupUid) -> list[RowId]:
    return [RowId(uid, index) for index in range(ROWS)]


def _train(ledger: Ledger, uids: list[GroupUid]) -> None:
    attempts = [ledger.lease(uid, 0) for uid in uids]
    for uid, attempt in zip(uids, attempts, strict=True):
        ledger.finish(uid, attempt)
    ledger.select(uids, 0)
    ledger.commit(uids, 0, 0)


def _give_back(ledger: Ledger, uids: list[GroupUid]) -> None:
    for uid in uids:
        ledger.requeue(uid, ledger.lease(uid, 0))


def _fill(path: Path, steps: int, one: Callable[[Ledger, list[GroupUid]], None]) -> None:
    """A ledger of as many steps, where there is none: the first one is made by ``one``, and the others are its lines
    in the tables with their own numbers, a hundred times as fast."""
    if path.exists():
        return
    with closing(Ledger(path, run=RUN)) as ledger:
        one(ledger, [uid_of(number) for number in range(STEP)])
    with closing(sqlite3.connect(path)) as db:
        lines = db.execute("SELECT count(*) FROM history").fetchone()[0]
        number = f"(admitted + n * {STEP})"
        changes = {
            "groups": {
                "admitted": number,
                "row": f"{number} * 7919 % {SOURCE_ROWS}",
                "epoch": f"{number} / {SOURCE_ROWS}",
            },
            "history": {"id": f"id + n * {lines}", "admitted": number},
            "commits": {},
        }
        later = {"rollout_id": "rollout_id + n", "step": "step + n"}
        for table, own in changes.items():
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            values = ", ".join((own | later).get(name, name) for name in names)
            db.execute(
                f"INSERT INTO {table} ({', '.join(names)}) WITH RECURSIVE k(n) AS"
                f" (SELECT 1 WHERE {steps} > 1 UNION ALL SELECT n + 1 FROM k WHERE n + 1 < {steps})"
                f" SELECT {values} FROM k CROSS JOIN {table} ORDER BY n, {table}.rowid"
            )
        db.commit()
