"""What an advantage estimator must see together, it sees, on any number of ranks and under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_rl.algo.advantages import grpo
from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.pool import DataPool
from buffer_rl.buffer.readers import ALL_ROWS, Share, Splitting
from buffer_rl.errors import BufferStateError, PluginError
from buffer_rl.kinds.marks import Scope, Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss
from buffer_rl.options.section import Options
from buffer_rl.plan.algorithm import estimator_needs
from buffer_rl.plan.roles import SAMPLED_FIELDS
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Column, GroupUid, RowId, Topology, TrainBatch
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.rank import TrainRank, splitting
from buffer_rl.trainer.role_worker import RoleWorker

MINE = """
import numpy as np
from buffer_rl.kinds.marks import scoped


@scoped("group")
def leave_one_out(args, batch):
    rewards, uids = batch.columns["reward"], [row.uid for row in batch.row_ids]
    rows = []
    for i, uid in enumerate(uids):
        others = [rewards[j] for j, other in enumerate(uids) if other == uid and j != i]
        rows.append(np.full(batch.columns["response_length"][i], rewards[i] - np.mean(others), dtype=np.float32))
    batch.columns["advantages"] = batch.columns["returns"] = rows


def whitened(args, batch):
    # over all rows of the rollout; writes a column for the loss as well
    values = (batch.columns["reward"] - batch.columns["reward"].mean()) / batch.columns["reward"].std()
    batch.columns["advantages"] = [np.full(1, value, dtype=np.float32) for value in values]
    batch.columns["returns"] = batch.columns["advantages"]
    batch.columns["num_rows"] = [np.full(1, len(batch), dtype=np.float32)] * len(batch)


def undeclared(args, batch):
    batch.columns["seen"] = sorted(batch.columns)
    batch.columns["advantages"] = batch.columns["returns"] = [np.zeros(n) for n in batch.columns["response_length"]]


@scoped("row")
def by_row(args, batch):
    undeclared(args, batch)


@scoped("group", needs=("ref_log_probs",))
def by_group_with_reference(args, batch):
    undeclared(args, batch)


@scoped("group", needs=("ref_log_probs", "difficulty"))
def by_difficulty(args, batch):
    undeclared(args, batch)


@scoped("row")
def reads_without_saying_so(args, batch):
    batch.columns["old_log_probs"]


@scoped("rollout")
def whitens_without_saying_so(args, batch):
    batch.columns["old_log_probs"]

"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


def objective_of(args: Options) -> Objective:
    return Objective(args, PluginRegistry.from_flags([]))


class Rows:
    """A closed pool with two groups of four; one response token a row. more: further columns of each group."""

    def __init__(self, **more: Column) -> None:
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
                **more,
            }
            plane.put(uid, [RowId(uid, i) for i in range(4)], columns)
            self._pool.join(uid)
        self._pool.select(uids)

    def get_data(self, rollout_id: int, share: Share = ALL_ROWS) -> TrainBatch:
        return assemble(self._pool.share(share))

    def put_fields(self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        self._pool.put_fields(row_ids, columns)


def ranks_of(args: Options, count: int, rows: Rows) -> list[Any]:
    """Trainer ranks without their logs, which would take the place of this process's output, and without models."""
    ranks: list[Any] = []
    for index in range(count):
        rank: Any = object.__new__(TrainRank)
        rank._args, rank._buffer, rank._rank = args, rows, index
        rank._objective, rank._cost = objective_of(args), None
        rank._built = SimpleNamespace(topology=Topology(dp_rank=index, dp_size=count))
        ranks.append(rank)
    return ranks


def advantages(args: Options, count: int) -> list[float]:
    """What the ranks find after the driver's calls ``estimate`` and ``fetch``, in the order of the rows."""
    ranks = ranks_of(args, count, Rows())
    for rank in ranks:
        rank.estimate(0)
    found: dict[tuple[int, int], float] = {}
    for rank in ranks:
        rank.fetch(0)
        for batch in rank._fetched():
            for row, value in zip(batch.row_ids, batch.columns["advantages"], strict=True):
                found[row.uid.row, row.sample_index] = float(value[0])
            assert {float(value[0]) for value in batch.columns.get("num_rows", [])} <= {8.0}
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("leave_one_out", [-2 / 3, -2 / 3, 2 / 3, 2 / 3, 1 / 3, -1, 1 / 3, 1 / 3]),
        ("whitened", np.array([-5, -5, 3, 3, 3, -5, 3, 3]) / 15**0.5),  # mean 5/8, variance 15/64
    ],
)
def test_an_estimator_gets_what_it_reads_together_on_any_number_of_ranks_and_steps(
    name: str, expected: Any, ranks: int, steps: int, mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    args = make_args(custom_advantage_function_path=mine(name), num_steps_per_rollout=steps)
    assert advantages(args, ranks) == pytest.approx(list(expected), rel=1e-6)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (3, 1), (2, 2)])
def test_advantages_are_normalised_over_the_rollout_on_any_number_of_ranks_and_steps(
    ranks: int, steps: int, make_args: Callable[..., Options]
) -> None:
    # Five of eight rewards are 1: mean 5/8, sum of squares 8 * 15/64, divisor 7.
    args = make_args(normalize_advantages=True, num_steps_per_rollout=steps)
    expected = np.array([-5, -5, 3, 3, 3, -5, 3, 3]) / 8 / (8 * 15 / 64 / 7) ** 0.5
    assert advantages(args, ranks) == pytest.approx(list(expected), rel=1e-6)


def test_normalised_advantages_have_the_scope_of_the_rollout(make_args: Callable[..., Options]) -> None:
    assert objective_of(make_args()).scope is Scope.ROW
    assert objective_of(make_args(normalize_advantages=True)).scope is Scope.ROLLOUT


def test_a_kl_penalty_in_the_reward_needs_the_log_probabilities_that_it_compares(
    make_args: Callable[..., Options],
) -> None:
    for options, needs in (
        ({"advantage_estimator": "gae", "kl_coef": 0.1}, {"ref_log_probs", "old_log_probs"}),
        (
            {"advantage_estimator": "gae", "kl_coef": 0.1, "use_rollout_logprobs": True},
            {"ref_log_probs", "rollout_log_probs"},
        ),
        ({"advantage_estimator": "gae"}, set()),
        ({"advantage_estimator": "grpo", "kl_coef": 0.1}, set()),
    ):
        assert estimator_needs(make_args(**options), grpo) == needs


def test_an_estimator_is_not_called_for_advantages_that_the_converter_set(
    mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    rows = Rows(advantages=[np.full(1, 7, dtype=np.float32)] * 4)
    (rank,) = ranks_of(make_args(custom_advantage_function_path=mine("whitened")), 1, rows)
    rank.estimate(0)
    batch = rows.get_data(0)
    assert "num_rows" not in batch.columns
    assert np.concatenate(batch.columns["advantages"]).tolist() == [7] * 8


def test_fewer_groups_than_replicas_are_refused_where_the_loss_compares_the_rows_of_a_prompt(
    make_args: Callable[..., Options],
) -> None:
    rows, args = Rows(), make_args()
    with pytest.raises(BufferStateError) as caught:
        rows.get_data(0, Share(0, 4, splitting=splitting(args, Unit.GROUP)))
    assert "2 whole groups cannot be shared among 4 ranks" in str(caught.value)
    assert "the loss compares the rows of a prompt" in caught.value.expected
    shares = [rows.get_data(0, Share(rank, 4, splitting=splitting(args, Unit.ROW))) for rank in range(4)]
    assert sum(map(len, shares)) == 8
    assert all(len(share) for share in shares)


def test_rows_are_shared_out_one_by_one_only_where_no_loss_reads_them_together(
    make_args: Callable[..., Options],
) -> None:
    for unit, deterministic, expected in (
        (Unit.TOKEN, False, Splitting.ROWS),
        (Unit.ROW, False, Splitting.ROWS),
        (Unit.ROW, True, Splitting.GROUPS_OR_ROWS),
        (Unit.GROUP, False, Splitting.GROUPS),
        (Unit.GROUP, True, Splitting.GROUPS),
    ):
        assert splitting(make_args(deterministic=deterministic), unit) is expected, unit


@loss_unit("group")
def compares(args: Any, inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.log_probs)


def test_a_rank_fetches_whole_groups_for_a_loss_that_compares_their_rows(make_args: Callable[..., Options]) -> None:
    for loss, num_groups in ((compares, {1}), (None, {2})):
        ranks = ranks_of(make_args(custom_loss_function_path=loss), 2, Rows())
        for rank in ranks:
            rank.fetch(0)
        assert {len({row.uid for row in rank._fetched()[0].row_ids}) for rank in ranks} == num_groups


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
    batch = Rows().get_data(0)
    log_probs = [np.zeros(1, dtype=np.float32)] * len(batch)
    batch.columns |= {"ref_log_probs": log_probs, "old_log_probs": log_probs}
    objective_of(make_args(custom_advantage_function_path=mine(name))).compute_advantages(batch)
    fields = {"ref_log_probs", "old_log_probs"}
    assert fields & set(batch.columns["seen"]) == seen
    assert fields <= batch.columns.keys()


@pytest.mark.parametrize("name", ["reads_without_saying_so", "whitens_without_saying_so"])
def test_who_reads_log_probabilities_without_saying_so_is_told_how_to_say_it(
    name: str, mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    batch = Rows().get_data(0)
    with pytest.raises(PluginError) as caught:
        objective_of(make_args(custom_advantage_function_path=mine(name))).compute_advantages(batch)
    assert "needs=('old_log_probs',)" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "waits_for"),
    [
        ("by_row", set()),
        ("by_group_with_reference", {"ref_log_probs"}),
        ("by_difficulty", {"ref_log_probs"}),
        ("leave_one_out", set()),
    ],
)
def test_the_role_waits_for_the_log_probabilities_that_its_estimator_needs(
    name: str, waits_for: set[str], mine: Callable[[str], str], make_args: Callable[..., Options]
) -> None:
    for num_ref_workers in (0, 1):
        worker: Any = object.__new__(RoleWorker)  # without its log, which takes the place of this process's output
        worker._args = make_args(
            use_kl_loss=True, num_ref_workers=num_ref_workers, custom_advantage_function_path=mine(name)
        )
        worker._role, worker._registry = "advantages", PluginRegistry.from_flags([])
        assert worker._make_stage().reads.fields == SAMPLED_FIELDS | waits_for
