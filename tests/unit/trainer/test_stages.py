"""A stage reads every group once, writes what it computed, and ends with the rollout."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from buffer_rl.buffer.columns import assemble
from buffer_rl.buffer.pool import ReadRequest, RowsMeta
from buffer_rl.buffer.readers import ALL_ROWS
from buffer_rl.errors import BufferRestartedError, BufferRLError, TrainError
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.plan.roles import SAMPLED_FIELDS
from buffer_rl.records.groups import Column, GroupUid, RowId, TrainBatch
from buffer_rl.rollout.user_rollout import GRACE_S
from buffer_rl.trainer.stream import Stage, advantage_stage, gradient_stage, longest_wait, reading
from harness.losses import loss_args, objective_of
from harness.streams import REF, Answer, Store, deals_of, doubled, run_stage


def test_a_stage_works_on_groups_as_they_finish_and_ends_with_the_rollout() -> None:
    store = Store()
    uids = [store.add(1)]
    store.later = [
        lambda: uids.append(store.add(2)),
        lambda: uids.append(store.add(3)),
        lambda: store.pool.select(uids),
    ]
    report = run_stage(REF, store, 8)
    assert [(span.name, span.num_rows) for span in report.spans] == [("ref", 2)] * 3
    assert report.num_rows == 6
    batch = assemble(store.pool.share(ALL_ROWS))
    assert [row.tolist() for row in batch.columns["ref_log_probs"]] == [
        [2.0, 2.0], [-2.0, -2.0], [4.0, 4.0], [-4.0, -4.0], [6.0, 6.0], [-6.0, -6.0],
    ]  # fmt: skip


def test_a_lone_group_is_worked_on_at_once_and_those_that_piled_up_meanwhile_go_together() -> None:
    store = Store()
    uids = [store.add(1)]
    store.later = [
        lambda: uids.extend(store.add(row) for row in range(2, 8)),
        lambda: uids.append(store.add(8)),
        lambda: store.pool.select(uids),
    ]
    report = run_stage(REF, store, 8)
    assert [span.num_rows for span in report.spans] == [2, 8, 4, 2]
    # One request a batch, one more for each time that nothing was ready, and one for the end.
    assert store.asked == 4 + 3 + 1


@pytest.mark.parametrize(
    ("num_replicas", "ahead", "spans"),
    [
        (1, [4, 4, 0, 0, 0], [4, 4, 4, 2, 2]),  # 7 groups of 2 rows: 4 rows ahead while 4 are ready; then one by one
        (2, [4, 0, 0, 0, 0], [4, 4, 4, 2, 2]),  # only while there is a full one for the other replica too
    ],
)
def test_the_next_batch_is_fetched_while_one_is_worked_on_where_enough_is_ready(
    num_replicas: int, ahead: list[int], spans: list[int]
) -> None:
    store = Store()
    uids = [store.add(row) for row in range(7)]
    store.later = [lambda: uids.append(store.add(7)), lambda: store.pool.select(uids)]
    report = run_stage(REF, store, 4, 0, num_replicas)
    assert [span.num_rows for span in report.spans] == spans
    assert store.ahead == ahead
    assert Answer.open == []
    assert all(part.cells["ref_log_probs"].inline is not None for part in store.pool.share(ALL_ROWS).slices)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_fetched_ahead_leaves_a_batch_for_each_other_process(closed: bool, rows: int) -> None:
    store = Store()
    uids = [store.add(row) for row in range(3 if rows == 1 else 6)]  # three batches
    if closed:
        store.pool.select(uids)
    first, other = deals = [deals_of(store, replica, rows) for replica in (0, 1)]
    assert len(next(first)) == max(rows, 2)
    assert len(next(other)) == max(rows, 2)
    assert store.ahead == [max(rows, 2), 0]  # the first left one, and there was none to leave by then
    assert len(next(first)) == max(rows, 2)
    for batches in deals:
        batches.close()
    assert Answer.open == []


def test_the_end_is_learnt_while_the_last_batch_is_worked_on() -> None:
    store = Store()
    uids = [store.add(row) for row in range(3)]
    store.pool.select(uids)
    report = run_stage(REF, store, 4)
    assert [span.num_rows for span in report.spans] == [4, 2]
    assert (store.asked, store.ahead) == (1, [2, 0])


@pytest.mark.parametrize("fails", ["compute", "write"])
def test_a_stage_that_fails_leaves_no_call_open_and_its_rows_come_again_for_its_successor(fails: str) -> None:
    store = Store()
    uids = [store.add(row) for row in range(5)]
    store.pool.select(uids)
    calls: list[int] = []

    def failing(batch: TrainBatch) -> dict[str, Column]:
        calls.append(len(batch))
        if len(calls) == 2:
            if fails == "compute":
                raise TrainError("lost")
            for answer in Answer.open:
                answer.error = TrainError("lost")
        return doubled(batch)

    with pytest.raises(TrainError, match="lost"):
        run_stage(replace(REF, compute=failing), store, 4)
    assert Answer.open == []
    assert store.pool.requeue_for_readers("ref") == 3
    run_stage(REF, store, 4)
    assert all(part.cells["ref_log_probs"].inline is not None for part in store.pool.share(ALL_ROWS).slices)


def test_a_stage_that_needs_a_field_of_another_waits_for_it() -> None:
    store = Store()
    uid = store.add(1)
    seen: list[int] = []

    def count(batch: TrainBatch) -> dict[str, Column]:
        seen.append(len(batch.columns["ref_log_probs"]))
        return {}

    train = Stage(reading("train", ["ref_log_probs"], (), is_final=True), count)
    store.later = [lambda: store.pool.select([uid]), lambda: run_stage(REF, store, 8)]
    run_stage(train, store, 8)
    assert seen == [2]


def test_ranks_of_a_replica_read_the_same_batches_however_far_one_is_ahead() -> None:
    store = Store()
    uids = [store.add(row) for row in range(5)]
    store.pool.select(uids)
    ranks = [deals_of(store, 0, 4) for _ in (0, 1)]
    ahead = [batch.row_ids for batch in ranks[0]]
    assert [len(rows) for rows in ahead] == [4, 4, 2]
    assert [batch.row_ids for batch in ranks[1]] == ahead
    assert list(deals_of(store, 1, 4)) == []


@pytest.mark.parametrize("together", [False, True])
def test_a_deal_without_rows_is_worked_on_only_by_replicas_in_step_and_not_written(together: bool) -> None:
    store = Store()
    uid = store.add(1)
    seen: list[tuple[int, list[str]]] = []

    def compute(batch: TrainBatch) -> dict[str, Column]:
        seen.append((len(batch), sorted(batch.columns)))
        if batch.row_ids and not together:  # the step is closed without what the next deal has
            surplus = store.add(2)
            ahead = ReadRequest(**{**asked, "deal": 1})
            assert store.pool.get_meta(ahead).row_ids
            store.pool.select([uid])
            store.plane.drop([surplus])
        return doubled(batch) if batch.row_ids else {"ref_log_probs": []}

    asked: dict[str, Any] = {
        "reader": "ref", "fields": SAMPLED_FIELDS, "produces": REF.reads.produces, "num_rows": 2, "num_replicas": 2,
        "together": together,
    }  # fmt: skip
    if together:
        store.pool.select([uid])
    reports = [
        run_stage(
            replace(REF, compute=compute), store, 2, replica, 2, together=together, in_step=together
        )
        for replica in (0, 1)
    ]  # fmt: skip
    columns = sorted({"tokens", "response_length", "loss_mask", "reward", "sample_total_tokens", "sample_parts"})
    assert seen == [(2, columns), *([(0, [])] if together else [])]
    assert [[span.num_rows for span in report.spans] for report in reports] == [[2], [0] if together else []]
    assert store.puts == 1
    assert store.pool.share(ALL_ROWS).slices[0].cells["ref_log_probs"].inline is not None


def test_what_was_computed_of_a_group_that_left_meanwhile_is_passed_over() -> None:
    store = Store()
    kept, surplus = store.add(1), store.add(2)

    def closing(batch: TrainBatch) -> dict[str, Column]:
        """Closes the step without the second group while that is worked on."""
        if batch.row_ids[0].uid == surplus:
            store.pool.select([kept])
            store.plane.drop([surplus])
        return doubled(batch)

    report = run_stage(replace(REF, compute=closing), store, 2)
    assert [span.num_rows for span in report.spans] == [2, 2]
    assert store.pool.share(ALL_ROWS).slices[0].cells["ref_log_probs"].inline is not None
    assert len(store.pool.share(ALL_ROWS).slices) == 1


class Lost(Store):
    """A Buffer that dies before deal ``at`` is answered, or while what came before it is written."""

    def __init__(self, at: int, while_writing: bool) -> None:
        super().__init__()
        self._at, self._while_writing = at, while_writing

    def take(self, task: str, request: ReadRequest, timeout_s: float) -> Any:
        if not self._while_writing and request.deal == self._at:
            raise BufferRestartedError(f"{task} was lost")
        return super().take(task, request, timeout_s)

    def start_take(self, task: str, request: ReadRequest) -> Answer:
        return Answer(
            (RowsMeta(row_ids=[], dealt=False, ended=False), None)
        )  # as where too little is ready to prefetch

    def start_put_fields(self, *args: Any) -> Any:
        if self._while_writing:
            raise BufferRestartedError("the pool was lost")
        return super().start_put_fields(*args)


@pytest.mark.parametrize("while_writing", [False, True])
def test_peers_hear_of_a_rank_that_cannot_go_on_before_the_next_pass(while_writing: bool) -> None:
    store, met = Lost(1, while_writing), list[type | None]()
    store.pool.select([store.add(row) for row in range(3)])

    def meet(error: BufferRLError | None) -> None:
        met.append(None if error is None else type(error))
        if error is not None:
            raise error

    with pytest.raises(BufferRestartedError):
        run_stage(REF, store, 2, meet=meet)
    assert met == [None, BufferRestartedError]


def test_a_rank_whose_peer_cannot_go_on_computes_no_further() -> None:
    store, seen = Store(), list[int]()
    store.pool.select([store.add(row) for row in range(3)])

    def compute(batch: TrainBatch) -> dict[str, Column]:
        seen.append(len(batch))
        return doubled(batch)

    def meet(error: BufferRLError | None) -> None:
        if seen:
            raise TrainError("another rank cannot go on")

    with pytest.raises(TrainError):
        run_stage(replace(REF, compute=compute), store, 2, meet=meet)
    assert seen == [2]


class Accumulating:
    """A trainer that notes the advantages that it sums gradients with."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def accumulate(self, batch: TrainBatch) -> Sums:
        self.used += [float(row[0]) for row in batch.columns["advantages"]]
        return Sums(divisor=1.0)


def of_converter(store: Store, row: int, **more: list[np.ndarray]) -> GroupUid:
    """A group that came with advantages of 5 and 7."""
    uid = GroupUid("data", row, 0)
    columns: dict[str, Any] = {
        "tokens": [np.arange(4, dtype=np.int32)] * 2,
        "response_length": np.array([2, 2], dtype=np.int32),
        "loss_mask": [np.ones(2, dtype=np.float32)] * 2,
        "reward": np.array([1, -1], dtype=np.float32),
        "advantages": [np.full(2, value, dtype=np.float32) for value in (5, 7)],
        **more,
    }
    store.plane.put(uid, [RowId(uid, 0), RowId(uid, 1)], columns)
    store.pool.join(uid)
    return uid


def keep(found: list[Sums], sums: Sums, batch: TrainBatch) -> None:
    found.append(sums)


def test_streamed_gradients_take_the_advantages_that_came_with_a_group_and_compute_the_others() -> None:
    for given, expected in ((True, [5.0, 7.0]), (False, [1.0, -1.0])):
        store, trainer = Store(), Accumulating()
        uid = of_converter(store, 1) if given else store.add(1)
        store.pool.select([uid])
        sums: list[Sums] = []
        accumulated = partial(keep, sums)
        stage = gradient_stage("train", cast("Any", trainer), objective_of(), {}, frozenset(), accumulated)
        run_stage(stage, store, 8)
        assert trainer.used == expected
        assert sums == [Sums(divisor=1.0)]


def test_a_critic_that_streams_gives_its_values_and_the_advantages_that_it_makes_of_them() -> None:
    """GAE with lambda 0: the reward 1 on the last token, values 0.25: 0.25 - 0.25, 1 - 0.25."""
    store, trainer = Store(), Accumulating()
    uid = store.add(1)
    store.pool.select([uid])
    objective = objective_of("critic", advantage_estimator="gae", use_critic=True, lambd=0.0)
    models = {"critic": lambda batch: [np.full(len(row), 0.25, dtype=np.float32) for row in batch.columns["loss_mask"]]}
    stage = gradient_stage("critic", cast("Any", trainer), objective, models, frozenset(), lambda *_: None)
    run_stage(stage, store, 8)
    batch = assemble(store.pool.share(ALL_ROWS))
    assert batch.columns["values"][0].tolist() == [0.25, 0.25]
    assert batch.columns["advantages"][0].tolist() == [0.0, 0.75]
    assert batch.columns["returns"][0].tolist() == [0.25, 1.0]


@pytest.mark.parametrize("returns", [None, [np.full(2, 9, dtype=np.float32)] * 2])
def test_the_role_keeps_advantages_that_came_with_a_group(returns: list[np.ndarray] | None) -> None:
    store = Store()
    uid = of_converter(store, 1, **({} if returns is None else {"returns": returns}))
    store.pool.select([uid])
    stage = advantage_stage(objective_of(), ())
    run_stage(stage, store, 8)
    batch = assemble(store.pool.share(ALL_ROWS))
    assert [row[0] for row in batch.columns["advantages"]] == [5.0, 7.0]
    assert [row[0] for row in batch.columns["returns"]] == ([5.0, 7.0] if returns is None else [9.0, 9.0])


def test_a_stage_holds_no_batch_that_it_has_worked_on() -> None:
    store, alive = Store(), []
    uids = [store.add(row) for row in range(6)]
    store.pool.select(uids)

    def compute(batch: TrainBatch) -> dict[str, Column]:
        alive.append(weakref.ref(batch.columns["reward"]))
        assert sum(ref() is not None for ref in alive) <= 2  # this one, and the one that the loop's name still has
        return doubled(batch)

    assert run_stage(replace(REF, compute=compute), store, 1).num_rows == 12


def test_a_role_waits_for_a_group_as_long_as_all_rollout_workers_that_may_replace_each_other() -> None:
    args: Any = loss_args(rollout_timeout_s=100.0, role_max_restarts=2)
    assert 3 * (100.0 + 2 * GRACE_S) < longest_wait(args) < 3 * (200.0 + 2 * GRACE_S)
    ahead = args.model_copy(update={"schedule": "async", "max_staleness": 4, "target_staleness": 2})
    assert longest_wait(ahead) > 3 * (300.0 + 2 * GRACE_S)
