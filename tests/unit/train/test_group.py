"""What the ranks of a group answer, as one answer."""

from __future__ import annotations

import pytest

from buffer_rl.errors import BufferRestartedError, BufferStateError
from buffer_rl.train.group import combine_metrics, streamed_rows
from buffer_rl.types import TrainBatch

ONE = {"sum/loss": 1.0, "sum/kl": 0.5, "grad_norm": 2.0, "lr": 1e-3}
OTHER = {"sum/loss": 3.0, "sum/kl": 0.25, "grad_norm": 2.0, "lr": 1e-3}
NO_ROWS = {"grad_norm": 2.0, "lr": 1e-3}


def test_shares_add_up_over_ranks_and_the_rest_is_that_of_the_first() -> None:
    expected = {"train/loss": 4.0, "train/kl": 0.75, "train/grad_norm": 2.0, "train/lr": 1e-3}
    assert combine_metrics("train", [ONE, OTHER]) == expected


@pytest.mark.parametrize("answers", [[ONE, NO_ROWS], [NO_ROWS, ONE]], ids=["the second", "the first"])
def test_a_rank_that_was_handed_no_rows_has_no_shares(answers: list[dict[str, float]]) -> None:
    expected = {"train/loss": 1.0, "train/kl": 0.5, "train/grad_norm": 2.0, "train/lr": 1e-3}
    assert combine_metrics("finish_stream", answers) == expected


def test_a_rollout_that_was_lost_is_no_rank_without_rows() -> None:
    """Else a Buffer that dies before the first step would leave engine and trainer uncompared for the whole run."""

    def refuses(error: BufferStateError) -> TrainBatch:
        raise error

    assert streamed_rows(lambda: refuses(BufferStateError("2 rows for 3 ranks"))) is None
    with pytest.raises(BufferRestartedError):
        streamed_rows(lambda: refuses(BufferRestartedError("train_0 was lost")))
