"""Work on a rollout that is still being generated: the deals of a reading task, and the stages of roles.

Who waits for whom: the reader waits for rows whose fields are there, in slices with a deadline for the whole wait; rows
become ready when the rollout finishes a group or another role writes a field. It ends when the rollout is closed and
the reader has got every row.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from buffer_rl.buffer.pool import ReadRequest, RowsMeta, Writer
from buffer_rl.errors import BufferRLError
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.kinds.trainer import Trainer
from buffer_rl.observe.timeline import WorkReport, WorkSpan
from buffer_rl.plan.roles import ADVANTAGE_FIELDS, CRITIC, FIELD_OF_MODEL, MODEL_FIELDS, SAMPLED_FIELDS
from buffer_rl.plan.schedule import Schedule
from buffer_rl.records.groups import Column, TrainBatch

if TYPE_CHECKING:
    from buffer_rl.args import Args
    from buffer_rl.buffer.calling import StartedCall
    from buffer_rl.buffer.client import BufferClient
    from buffer_rl.train.objective import Objective

STREAMED_GROUPS = 4
"""Groups that a process works on at a time, at most and where that many are ready: larger passes are cheaper, but the
last one starts only when the one before has ended."""

ROLLOUT_GRACE_S = 120.0
"""A rollout ends within ``--rollout-timeout-s`` and twice the grace that a user's rollout function has (30 s)."""

LogProbs = Callable[[str, TrainBatch], list[np.ndarray] | None]
"""``(model, batch) -> rows`` with a model of ``FIELD_OF_MODEL``; see ``Trainer.log_probs``."""


def read_deals(
    store: BufferClient, task: str, request: ReadRequest, timeout_s: float
) -> Generator[tuple[RowsMeta, TrainBatch], None, None]:
    """Read the deals of one replica from 0 to the end of ``task`` (see ``buffer_rl.buffer.pool.ReadRequest``). A deal's
    batch may have no rows.

    The next deal is requested while one is worked on; close the generator to wait until no request is under way.
    timeout_s: longest wait for one deal. Raises what ``BufferClient.take`` raises.
    """
    asked: StartedCall[tuple[RowsMeta, TrainBatch | None]] | None = None
    try:
        for number in itertools.count():
            answer = None if asked is None else asked.result()
            if answer is None or not (answer[0].dealt or answer[0].ended):
                answer = store.take(task, replace(request, deal=number), timeout_s)
            meta, batch = answer
            if batch is None:
                return
            ahead = replace(request, deal=number + 1, prefetch_reserve=request.num_replicas - 1)
            asked = store.start_take(task, ahead)
            yield meta, batch
    finally:
        if asked is not None:
            asked.drain()


def _alone(error: BufferRLError | None) -> None:
    if error is not None:
        raise error


def _next_deal(
    deals: Iterator[tuple[RowsMeta, TrainBatch]],
    error: BufferRLError | None,
    meet: Callable[[BufferRLError | None], None],
) -> tuple[RowsMeta, TrainBatch] | None:
    """The next deal, None at the end, once the peers have met. error: what writing the deal before raised."""
    dealt = None
    try:
        dealt = next(deals, None) if error is None else None
    except BufferRLError as caught:
        error = caught
    meet(error)
    return dealt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of work on each ready group of a rollout that still runs: read, compute, write back. The same loop
    serves the reference, the actor's forward pass, the advantages and the trainer, in a process of their own or in the
    idle trainer.

    name: of its reading task. needs: fields of the rows that it waits for. produces: fields that it adds, none where
    its effect stays in its process. compute: maps a batch to these fields. is_final: as in ``ReadRequest``.
    """

    name: str
    needs: frozenset[str]
    produces: frozenset[str]
    compute: Callable[[TrainBatch], Mapping[str, Column]]
    is_final: bool = False


def run_stage(
    stage: Stage,
    store: BufferClient,
    rollout_id: int,
    *,
    rows_per_batch: int,
    replica: int = 0,
    num_replicas: int = 1,
    together: bool = False,
    in_step: bool = False,
    meet: Callable[[BufferRLError | None], None] = _alone,
    timeout_s: float,
) -> WorkReport:
    """Work on the deals of one replica in rollout ``rollout_id`` until it is closed and read to its end.

    While a batch is computed, the next one is fetched and the fields of the one before are written. No call is under
    way when this returns or raises.

    rows_per_batch: whole groups of about so many rows at a time. replica, num_replicas, together: as in
    ``ReadRequest``; a replica fetches ahead only where a batch is left for each of the others. A batch without rows is
    computed only where the replicas work ``in_step``, and what that returns is not written. meet: called
    before each deal is computed, and at the end, with what reading or writing raised; see ``Peers.meet``. timeout_s:
    longest wait for one deal.
    """
    request = ReadRequest(
        reader=stage.name,
        fields=stage.needs,
        produces=stage.produces,
        num_rows=rows_per_batch,
        replica=replica,
        num_replicas=num_replicas,
        together=together,
        is_final=stage.is_final,
    )
    report, written, error = WorkReport(), None, None
    try:
        with closing(read_deals(store, f"train_{rollout_id}", request, timeout_s)) as deals:
            while (dealt := _next_deal(deals, error, meet)) is not None:
                meta, batch = dealt
                if not (batch.row_ids or in_step):
                    continue
                started = time.monotonic()
                columns = stage.compute(batch)
                ended = time.monotonic()
                writer = Writer(reader=stage.name, generation=meta.generation)
                try:
                    if written is not None:
                        written.result()
                    writes = columns and batch.row_ids
                    written = store.start_put_fields(batch.task, batch.row_ids, columns, writer) if writes else None
                except BufferRLError as caught:
                    error = caught
                span = WorkSpan(name=stage.name, rollout_id=rollout_id, start=started, end=ended, num_rows=len(batch))
                report.add(span)
        if written is not None:
            written.result()
    finally:
        if written is not None:
            written.drain()
    return report


def longest_wait(args: Args) -> float:
    """Seconds that a role waits for a group: longer than any ticket may take, whose own error is more precise. Each
    worker that goes on where another died has the whole time again."""
    ticket_s = Schedule.of(args).ticket_limit_s(args.rollout_timeout_s)
    return (int(args.role_max_restarts) + 1) * (ticket_s + ROLLOUT_GRACE_S)


def rows_per_batch(args: Args, num_readers: int) -> int:
    """Rows that each of a role's ``num_readers`` processes requests at a time: no more groups than its part of a step,
    so that each process gets some; under ``--deterministic`` one group."""
    if args.deterministic:
        return 1
    part = math.ceil(int(args.rollout_batch_size) / num_readers)
    return min(part, STREAMED_GROUPS) * int(args.n_samples_per_prompt)


def log_prob_stage(
    name: str, models: Sequence[str], log_probs: LogProbs, *, writes: bool = True, is_final: bool = False
) -> Stage:
    """Log-probabilities under each of ``models``. writes: whether this process is the one of its replica that writes
    them. is_final: as in ``ReadRequest``."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        found = {FIELD_OF_MODEL[model]: log_probs(model, batch) for model in models}
        return {field: rows for field, rows in found.items() if rows is not None and writes}

    produces = frozenset(FIELD_OF_MODEL[model] for model in models)
    return Stage(name=name, needs=SAMPLED_FIELDS, produces=produces, compute=compute, is_final=is_final)


def advantage_stage(objective: Objective, added: Iterable[str] = ()) -> Stage:
    """Advantages and returns of each group, and the columns that the estimator adds, once the log-probabilities that it
    needs are there, and those of the fields ``added`` by the user's roles."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        before = set(batch.columns)
        objective.compute_advantages(batch)
        return {name: batch.columns[name] for name in sorted(batch.columns.keys() - before)}

    needs = SAMPLED_FIELDS | objective.needs.intersection({*MODEL_FIELDS, *added})
    return Stage(name="advantages", needs=needs, produces=ADVANTAGE_FIELDS, compute=compute)


def gradient_stage(
    role: str,
    trainer: Trainer,
    objective: Objective,
    models: Mapping[str, Callable[[TrainBatch], list[np.ndarray] | None]],
    external_fields: frozenset[str],
    accumulated: Callable[[Sums], None],
    *,
    writes: bool = True,
) -> Stage:
    """Forward and backward of each group, after the fields that no other role computes.

    role: the trained role; a critic gives its values, and the advantages that it computes of them, to the actor.
    models: what the trainer computes itself. external_fields: fields that other roles add, waited for. accumulated:
    receives the sums of each batch. writes: as in ``log_prob_stage``."""
    produces = ADVANTAGE_FIELDS | {FIELD_OF_MODEL[CRITIC]} if objective.critic else frozenset()

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        before = set(batch.columns)
        computed = {FIELD_OF_MODEL[model]: outputs(batch) for model, outputs in models.items()}
        if None not in computed.values():  # else the rank does not call the objective
            batch.columns.update(cast(dict[str, Column], computed))
            objective.compute_advantages(batch)
        accumulated(trainer.accumulate(batch))
        added = sorted(batch.columns.keys() - before) if produces and writes else []
        return {name: batch.columns[name] for name in added}

    return Stage(name=role, needs=SAMPLED_FIELDS | external_fields, produces=produces, compute=compute, is_final=True)
