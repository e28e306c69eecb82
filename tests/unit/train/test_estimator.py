"""What an advantage estimator must see together, it sees, on any number of ranks and under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.pool import DataPool
from buffer_rl.buffer.readers import Splitting
from buffer_rl.config import Options
from buffer_rl.errors import BufferStateError, PluginError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.train.group import TrainRank, mini_batches, splitting
from buffer_rl.train.objective import Objective
from buffer_rl.train.roles import SAMPLED_FIELDS
from buffer_rl.train.worker import RoleWorker
from buffer_rl.types import GroupUid, RowId, TrainBatch

MINE = """
import numpy as np
from buffer_rl.scope import scoped


@scoped("group")
def leave_one_out(args, batch):
    rewards, uids = batch.columns["reward"], [row.uid for row in batch.row_ids]
    rows = []
    for i, uid in enumerate(uids):
        others = [rewards[j] for j, other in enumerate(uids) if other == uid and j != i]
        rows.append(np.full(batch.columns["response_length"][i], rewards[i] - np.mean(others), dtype=np.float32))
    batch.columns["advantages"] = batch.columns["returns"] = rows


def undeclared(args, batch):
    batch.columns["seen"] = sorted(batch.columns)
    batch.columns["advantages"] = batch.columns["returns"] = [np.zeros(n) for n in batch.columns["response_length"]]


@scoped("row")
def by_row(args, batch):
    undeclared(args, batch)


@scoped("group", needs=("ref_log_probs",))
def by_group_with_reference(args, batch):
    undeclared(args, batch)


@scoped("row")
def reads_without_saying_so(args, batch):
    batch.columns["old_log_probs"]


class Idle:
    def __init__(self, args, rank, world_size): ...


for name in (
    "log_probs compute_advantages forward_backward optimizer_step export_buckets save_hf save load sleep wake_up"
).split():
    setattr(Idle, name, lambda self, *given: None)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


def objective_of(args: Options) -> Objective:
    return Objective(args, PluginRegistry.from_flags([]))


class Rows:
    """A closed pool with two groups of four; one response token a row."""

    def __init__(self) -> None:
        plane = ColumnStore()
        self._pool = DataPool(0, "train_0", plane, 2)
        uids = [GroupUid("data", row, 0) for row in range(2)]
        contents = (([0, 0, 1, 1], (3, 9, 17, 5)), ([1, 0, 1, 1], (4, 12, 6, 30)))
        for uid, (rewards, lengths) in zip(uids, contents, strict=True):
            columns: dict[str, Any] = {
                "tokens": [np.zeros(length, dtype=np.int32) for length in lengths],
                "response_length": np.ones(4, dtype=np.int32),
                "loss_mask": [np.ones(1, dtype=np.float32)] * 4,
                "reward": np.array(rewards, dtype=np.float32),
            }
            plane.put(uid, [RowId(uid, i) for i in range(4)], columns)
            self._pool.add(uid)
        self._pool.select(uids)

    def get_data(
        self, rollout_id: int, dp_rank: int, dp_size: int, num_steps: int, step: int, splitting: Splitting
    ) -> TrainBatch:
        return assemble(self._pool.share(dp_rank, dp_size, num_steps, step, splitting))


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 1), (1, 2)])
def test_leave_one_out_is_the_same_on_any_number_of_ranks(
    ranks: int, steps: int, mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    args = make_args(custom_advantage_function_path=mine("leave_one_out"))
    objective, unit = objective_of(args), splitting(args, PluginRegistry.from_flags([]))
    found: dict[tuple[int, int], float] = {}
    for rank in range(ranks):
        for batch in mini_batches(Rows(), 0, rank, ranks, num_steps=steps, splitting=unit):
            objective.compute_advantages(batch)
            for row, advantage in zip(batch.row_ids, batch.columns["advantages"], strict=True):
                found[row.uid.row, row.sample_index] = float(advantage[0])
    expected = [-2 / 3, -2 / 3, 2 / 3, 2 / 3, 1 / 3, -1, 1 / 3, 1 / 3]
    assert [found[key] for key in sorted(found)] == pytest.approx(expected)


def test_fewer_groups_than_ranks_are_refused_where_groups_must_be_whole(
    mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    registry = PluginRegistry.from_flags([])
    whole = splitting(make_args(custom_advantage_function_path=mine("leave_one_out")), registry)
    with pytest.raises(BufferStateError) as caught:
        mini_batches(Rows(), 0, 0, 4, num_steps=1, splitting=whole)
    assert "2 whole groups cannot be shared among 4 ranks" in str(caught.value)
    assert "the advantage estimator has the scope 'group'" in caught.value.expected
    by_row = splitting(make_args(), registry)
    shares = [mini_batches(Rows(), 0, rank, 4, num_steps=1, splitting=by_row)[0] for rank in range(4)]
    assert sum(map(len, shares)) == 8
    assert all(len(share) for share in shares)


def test_rows_are_shared_out_one_by_one_only_where_nobody_reads_them_together(
    mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    group = {"custom_advantage_function_path": mine("leave_one_out")}
    for options, expected in (
        ({}, Splitting.ROWS),
        ({"deterministic": True}, Splitting.GROUPS_OR_ROWS),
        (group, Splitting.GROUPS),
        ({**group, "deterministic": True}, Splitting.GROUPS),
        ({"custom_advantage_function_path": mine("undeclared")}, Splitting.GROUPS),
        ({**group, "num_advantage_workers": 1}, Splitting.ROWS),
        ({**group, "loss_type": "sft_loss"}, Splitting.ROWS),
    ):
        assert splitting(make_args(**options), PluginRegistry.from_flags([])) is expected, options


def test_a_rank_fetches_whole_groups_for_an_estimator_that_reads_them_together(
    mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    estimator = {"custom_advantage_function_path": mine("leave_one_out")}
    for options, num_groups in ((estimator, {1}), ({}, {2})):
        found = set()
        for index in range(2):
            rank: Any = object.__new__(TrainRank)  # without its log, which takes the place of this process's output
            rank._args, rank._buffer = make_args(**options, train_backend=mine("Idle")), Rows()
            rank._rank, rank._world_size = index, 1
            rank.setup("", 0)
            rank._world_size = 2
            rank.fetch(0)
            found.add(len({row.uid for row in rank._fetched()[0].row_ids}))
        assert found == num_groups


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("undeclared", {"ref_log_probs", "old_log_probs"}),
        ("by_row", set()),
        ("by_group_with_reference", {"ref_log_probs"}),
    ],
)
def test_what_declares_a_scope_sees_the_log_probabilities_that_it_needs_and_no_others(
    name: str, seen: set[str], mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    batch = mini_batches(Rows(), 0, 0, 1, num_steps=1, splitting=Splitting.ROWS)[0]
    log_probs = [np.zeros(1, dtype=np.float32)] * len(batch)
    batch.columns |= {"ref_log_probs": log_probs, "old_log_probs": log_probs}
    objective_of(make_args(custom_advantage_function_path=mine(name))).compute_advantages(batch)
    fields = {"ref_log_probs", "old_log_probs"}
    assert fields & set(batch.columns["seen"]) == seen
    assert fields <= batch.columns.keys()


def test_who_reads_log_probabilities_without_saying_so_is_told_how_to_say_it(
    mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    batch = mini_batches(Rows(), 0, 0, 1, num_steps=1, splitting=Splitting.ROWS)[0]
    with pytest.raises(PluginError) as caught:
        objective_of(make_args(custom_advantage_function_path=mine("reads_without_saying_so"))).compute_advantages(
            batch
        )
    assert "needs=('old_log_probs',)" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "waits_for"), [("by_row", set()), ("by_group_with_reference", {"ref_log_probs"}), ("leave_one_out", set())]
)
def test_the_role_waits_for_what_its_estimator_needs_whoever_computes_it(
    name: str, waits_for: set[str], mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    for num_ref_workers in (0, 1):
        worker: Any = object.__new__(RoleWorker)  # without its log, which takes the place of this process's output
        worker._args = make_args(
            use_kl_loss=True, num_ref_workers=num_ref_workers, custom_advantage_function_path=mine(name)
        )
        worker._role, worker._registry = "advantages", PluginRegistry.from_flags([])
        assert worker._make_stage().needs == SAMPLED_FIELDS | waits_for
