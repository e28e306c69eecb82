"""What the ranks of a group answer, as one answer."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import BufferRestartedError, BufferStateError, ConfigError, TrainError
from buffer_rl.kinds.marks import Unit
from buffer_rl.kinds.token_loss import Reduction, Sums, Total
from buffer_rl.options.section import compose
from buffer_rl.records.groups import Topology, TrainBatch
from buffer_rl.train.peers import check_topologies
from buffer_rl.train.rank import check_groups, named_metrics, streamed_rows
from buffer_rl.train.steps import StepReport


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
    expected = {"loss": (12 / 4 + 1 / 1) / 2, "ratio": 8 / 4, "largest": 9.0, "grad_norm": 3.0, "lr": 0.2}
    assert named_metrics("train", [first, second]) == {f"train/{name}": value for name, value in expected.items()}
    assert named_metrics("critic", [second, first])["critic/loss"] == 2.0


def test_steps_that_were_left_out_are_counted() -> None:
    assert named_metrics("train", [StepReport(non_finite=2)] * 2) == {"train/non_finite_steps": 2.0}


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
