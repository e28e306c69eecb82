"""What the ranks of a group answer, as one answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.readers import Share
from buffer_rl.errors import (
    BufferRestartedError,
    BufferRLError,
    BufferStateError,
    ConfigError,
    PayloadLostError,
    TrainError,
)
from buffer_rl.kinds.marks import Unit
from buffer_rl.kinds.token_loss import Reduction, Sums, Total
from buffer_rl.kinds.trainer import Memory
from buffer_rl.options.section import compose
from buffer_rl.plan.flops import RowCost, TrainWork
from buffer_rl.records.groups import GroupUid, RowId, Topology, TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.peers import check_topologies
from buffer_rl.trainer.rank import TrainRank, check_groups, named_metrics, no_rows, streamed_rows
from buffer_rl.trainer.steps import StepReport, loss_size, row_cost, train_work


def report(*sums: Sums) -> StepReport:
    """Of a rank that took as many steps, with the learning rates 0.1, 0.2, ..."""
    same = [{"grad_norm": 2.0 * number, "lr": 0.1 * number} for number in range(1, len(sums) + 1)]
    return StepReport(sums=list(sums), metrics=same)


def sums(loss: float, divisor: float, **metrics: Total) -> Sums:
    return Sums(loss=loss, divisor=divisor, metrics=metrics)


def test_a_steps_metrics_are_those_of_all_ranks_rows_and_a_rollouts_the_means_over_its_steps() -> None:
    ratio, largest = Total(Reduction.MEAN, 6.0, 3.0), Total(Reduction.MAX, 9.0, 3.0)
    first = report(sums(4.0, 2.0, ratio=ratio, largest=largest), sums(1.0, 1.0))
    second = report(
        sums(8.0, 2.0, ratio=Total(Reduction.MEAN, 2.0, 1.0), largest=Total(Reduction.MAX, 4.0, 1.0)), Sums()
    )
    expected = {
        "loss": (12 / 4 + 1 / 1) / 2,
        "ratio": 8 / 4,
        "largest": 9.0,
        "grad_norm": 3.0,
        "lr": 0.2,
        "divisor": 5.0,
    }
    assert named_metrics("train", [first, second]) == {f"train/{name}": value for name, value in expected.items()}
    assert named_metrics("critic", [second, first])["critic/loss"] == 2.0


def test_what_the_loss_was_divided_by_stands_beside_a_count_of_the_rows() -> None:
    """Tokens of 0.5 + 1 and 1, of one sample in two parts and one in a row of its own."""
    masks = [np.array([1.0, 0.0, 0.5]), np.array([1.0]), np.array([0.0, 0.0])]
    columns: dict[str, Any] = {"loss_mask": masks, "sample_parts": np.array([2, 2, 1], dtype=np.float32)}
    rows = [RowId(GroupUid("data", 0, 0), 0, part) for part in range(3)]
    assert loss_size(TrainBatch(rollout_id=0, task="train_0", row_ids=rows, columns=columns)) == (2.5, 2.0)
    ranks = [report(sums(4.0, 2.0), sums(1.0, 1.0)) for _ in range(2)]
    ranks[0].sizes, ranks[1].sizes = [(2.0, 1.0), (1.0, 1.0)], [(2.0, 1.0), (0.5, 1.0)]
    metrics = named_metrics("train", ranks)
    found = [metrics[f"train/{name}"] for name in ("divisor", "loss_tokens", "loss_samples")]
    assert found == [2 * (2.0 + 1.0), 5.5, 4.0]


def test_steps_that_were_left_out_are_counted() -> None:
    assert named_metrics("train", [StepReport(non_finite=2)] * 2) == {"train/non_finite_steps": 2.0}


def test_the_peak_memory_of_a_role_is_that_of_its_largest_rank() -> None:
    reports = [StepReport(peak={"host": 1.5, "device": 8.0}), StepReport(peak={"host": 2.5, "device": 7.0})]
    assert named_metrics("critic", reports) == {
        "perf/peak_memory/critic_gb": 2.5,
        "perf/peak_memory/critic_device_gb": 8.0,
    }


def test_a_rollout_that_was_lost_is_no_rank_without_rows() -> None:
    """Else a Buffer that dies before the first step would leave engine and trainer uncompared for the whole run."""

    def refuses(error: BufferStateError) -> TrainBatch:
        raise error

    assert streamed_rows(lambda: refuses(BufferStateError("2 rows for 3 ranks"))) is None
    with pytest.raises(BufferRestartedError):
        streamed_rows(lambda: refuses(BufferRestartedError("train_0 was lost")))


def test_a_loss_that_compares_a_prompts_rows_needs_a_group_for_each_replica_and_step() -> None:
    args: Any = compose(CORE_SECTIONS)(
        rollout_batch_size=7, num_steps_per_rollout=2, custom_loss_function_path="my:dpo"
    )
    check_groups(args, Unit.GROUP, 3)
    check_groups(args, Unit.ROW, 4)
    with pytest.raises(ConfigError, match=r"'my:dpo' needs whole groups, and 4 replicas have 3 (.|\n)*loss_unit"):
        check_groups(args, Unit.GROUP, 4)


def test_ranks_form_replicas_with_one_head_each() -> None:
    check_topologies([Topology(dp_rank=rank // 2, dp_size=2, is_head=rank % 2 == 1) for rank in range(4)])
    for wrong in (
        [Topology(dp_rank=0, dp_size=2)],
        [Topology(dp_rank=0, dp_size=2), Topology(dp_rank=0, dp_size=2)],
        [Topology(dp_rank=0, dp_size=1), Topology(dp_rank=1, dp_size=2)],
        [Topology(dp_rank=0, dp_size=2), Topology(dp_rank=1, dp_size=2, in_step=True)],
        [Topology(dp_rank=0, dp_size=1, is_head=False)],
    ):
        with pytest.raises(TrainError, match="one head in each replica"):
            check_topologies(wrong)


@pytest.mark.parametrize("in_step", [False, True])
def test_replicas_get_shares_of_equal_cost_unless_they_work_in_step(in_step: bool) -> None:
    """Passes of such ranks are limited by tokens, and one with more of them would have the others wait."""
    cost = RowCost(per_token=1, output_layer=1, width=1, num_full=1)
    asked: list[RowCost | None] = []

    def get_data(rollout_id: int, share: Share) -> TrainBatch:
        asked.append(share.cost)
        return no_rows(0)

    rank: Any = object.__new__(TrainRank)
    rank._args, rank._cost, rank._buffer = compose(CORE_SECTIONS)(), cost, SimpleNamespace(get_data=get_data)
    rank._objective = SimpleNamespace(unit=Unit.ROW)
    rank._built = SimpleNamespace(topology=Topology(dp_rank=0, dp_size=2, in_step=in_step))
    rank.fetch(0)
    assert asked == [None if in_step else cost]


def rank_of(columns: dict[str, Any], lost: bool = False) -> Any:
    """A rank whose share of rollout 3 is one row, or lost. ``met`` and ``written`` are what it did."""
    rows = [RowId(GroupUid("data", 0, 0), 0)]

    def get_data(rollout_id: int, share: Share) -> TrainBatch:
        if lost:
            raise PayloadLostError("gone")
        return TrainBatch(rollout_id=3, task="train_3", row_ids=rows, columns=columns)

    rank: Any = object.__new__(TrainRank)
    rank._args, rank._cost, rank.written, rank.met = compose(CORE_SECTIONS)(), None, [], []
    rank._buffer = SimpleNamespace(get_data=get_data, put_fields=lambda *fields: rank.written.append(fields))
    rank._objective = SimpleNamespace(unit=Unit.ROW)
    rank._built = SimpleNamespace(
        topology=Topology(dp_rank=0, dp_size=1), log_probs=lambda model, batch: [np.full(2, -1.0)]
    )
    rank._batches = []

    def meet(error: BufferRLError | None) -> None:
        rank.met.append(error)
        if error is not None:
            raise error

    rank._peers = SimpleNamespace(meet=meet)
    return rank


def test_a_pass_fetches_the_rows_that_it_is_asked_for_and_writes_what_others_read() -> None:
    rank = rank_of({})
    rank.log_probs("ref", 3, False)
    rank.log_probs("actor", None, True)
    assert rank.met == [None]
    assert [(task, sorted(columns)) for task, _, columns in rank.written] == [("train_3", ["old_log_probs"])]
    (batch,) = rank._batches
    assert {name: rows[0].tolist() for name, rows in batch.columns.items()} == {
        "ref_log_probs": [-1.0, -1.0],
        "old_log_probs": [-1.0, -1.0],
    }


def test_peers_hear_of_a_rank_whose_rows_are_lost_before_its_pass() -> None:
    rank = rank_of({}, lost=True)
    with pytest.raises(PayloadLostError):
        rank.log_probs("ref", 3, False)
    assert [type(error) for error in rank.met] == [PayloadLostError]


class Sleeper:
    """A backend that notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sleep(self, tags: Any) -> None:
        self.calls.append(("sleep", *sorted(tags)))

    def wake_up(self, tags: Any) -> None:
        self.calls.append(("wake up", *sorted(tags)))

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")


class Whole(Sleeper):
    """Its methods take no tags."""

    def sleep(self) -> None:  # type: ignore[override]
        self.calls.append("sleep")

    def wake_up(self) -> None:  # type: ignore[override]
        self.calls.append("wake up")


def asked(backend: Sleeper) -> list[Any]:
    """What a backend is asked on the way from a step to a rollout and back."""
    rank: Any = object.__new__(TrainRank)
    rank._built, rank._awake = backend, frozenset(Memory)
    rank.discard()
    rank.sleep({Memory.OPTIMIZER, Memory.FROZEN})
    rank.sleep({Memory.WEIGHTS})
    rank.discard()
    rank.wake_up({Memory.WEIGHTS, Memory.FROZEN})
    rank.sleep({Memory.FROZEN})
    rank.wake_up({Memory.OPTIMIZER})
    rank.discard()
    return backend.calls


def test_a_backend_moves_the_parts_that_are_named_and_one_without_tags_all_of_them_once_none_is_needed() -> None:
    parts = [("sleep", "frozen", "optimizer"), ("sleep", "weights"), ("wake up", "frozen", "weights")]
    parts += [("sleep", "frozen"), ("wake up", "optimizer")]
    assert asked(Sleeper()) == ["zero_grad", *parts, "zero_grad"]
    assert asked(Whole()) == ["zero_grad", "sleep", "wake up", "zero_grad"]


def test_a_ranks_work_is_that_of_its_rows_in_each_pass() -> None:
    cost = RowCost(per_token=10, output_layer=100, width=1, num_full=2)
    columns = {"tokens": [np.zeros(length, dtype=np.int32) for length in (3, 5)], "response_length": np.array([1, 4])}
    batch = TrainBatch(
        rollout_id=0, task="train_0", row_ids=[RowId(GroupUid("d", 0, 0), i) for i in (0, 1)], columns=columns
    )
    args: Any = compose(CORE_SECTIONS)(num_passes_per_rollout=2, peak_tflops=7.0)
    layers, output = 2 * 10 * (3 + 5) + 4 * 2 * (9 + 25) // 2, 2 * 100 * (1 + 4)
    work = train_work(args, cost, [batch, batch], 1.5, recomputes=False)
    assert work == TrainWork(flops=4 * 3 * (layers + output), recomputed=0, seconds=1.5, peak_tflops=7.0)
    assert train_work(args, cost, [batch], 1.5, recomputes=True).recomputed == 2 * layers
    assert train_work(args, cost, [], 1.5, recomputes=True) == TrainWork(seconds=1.5, peak_tflops=7.0)
    speed = named_metrics("train", [StepReport(work=work), StepReport(work=TrainWork(seconds=3.0))])
    assert speed["perf/actor_train_tflops"] == work.flops / (2 * 3.0) / 1e12
    assert speed["perf/mfu"] == pytest.approx(speed["perf/actor_train_tflops"] / 7)


def test_a_policy_without_a_known_configuration_has_no_cost(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)()
    assert row_cost(args) is None
    assert row_cost(args.model_copy(update={"hf_checkpoint": str(tmp_path)})) is None
    (tmp_path / "config.json").write_text('{"model_type": "my_own"}')
    assert row_cost(args.model_copy(update={"hf_checkpoint": str(tmp_path)})) is None
    cost = row_cost(args.model_copy(update={"hf_checkpoint": make_tiny_model(tmp_path / "model")}))
    assert cost is not None
    assert cost.forward(1, 1) > 0
