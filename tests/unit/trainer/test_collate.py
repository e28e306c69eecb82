from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from buffer_rl.errors import DataError
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.trainer.collate import collate, padded_column, response_mask, sample_sizes, split_rows

CPU = torch.device("cpu")


@pytest.fixture
def batch() -> TrainBatch:
    return TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("data", 0, 0), i) for i in range(2)],
        columns={
            "tokens": [np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([3, 4], dtype=np.int32)],
            "response_length": np.array([2, 1], dtype=np.int32),
            "loss_mask": [np.array([1, 0], dtype=np.float32), np.array([1], dtype=np.float32)],
            "advantages": [np.array([0.5, 0.6], dtype=np.float32), np.array([0.7], dtype=np.float32)],
        },
    )


def test_rows_are_padded_on_the_right_and_responses_are_predicted_from_the_token_before(batch: TrainBatch) -> None:
    micro = collate(batch, CPU)
    assert micro.tokens_bl.tolist() == [[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]]
    assert micro.response_bt.tolist() == [[True, True], [True, False]]
    assert micro.target_n.tolist() == [8, 9, 4]
    assert micro.tokens_bl.reshape(-1)[micro.predictor_n].tolist() == [7, 8, 3]


def test_columns_are_padded_with_0_to_the_width_of_the_log_probabilities(batch: TrainBatch) -> None:
    like = torch.zeros(2, 3)
    assert response_mask(batch, like).tolist() == [[1, 0, 0], [1, 0, 0]]
    torch.testing.assert_close(padded_column(batch, "advantages", like), torch.tensor([[0.5, 0.6, 0], [0.7, 0, 0]]))
    batch.columns["difficulty"] = np.array([3, 4], dtype=np.int64)
    torch.testing.assert_close(padded_column(batch, "difficulty", like), torch.tensor([3.0, 4.0]))
    assert padded_column(batch, "ref_log_probs", like) is None


def test_without_a_loss_mask_all_response_tokens_count(batch: TrainBatch) -> None:
    del batch.columns["loss_mask"]
    assert response_mask(batch, torch.zeros(2, 3)).tolist() == [[1, 1, 0], [1, 0, 0]]


def test_the_size_of_a_sample_is_that_of_its_row_or_what_the_buffer_wrote(batch: TrainBatch) -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert [sizes.tolist() for sizes in sample_sizes(batch, mask)] == [[1, 1], [1, 1]]
    batch.columns["sample_total_tokens"] = np.array([4, 9], dtype=np.float32)
    batch.columns["sample_parts"] = np.array([2, 5], dtype=np.float32)
    assert [sizes.tolist() for sizes in sample_sizes(batch, mask)] == [[4, 9], [2, 5]]


@pytest.mark.parametrize("given", [(), ("sample_parts",), ("sample_total_tokens",)])
def test_a_part_whose_other_parts_may_be_elsewhere_needs_the_size_of_its_sample(
    given: tuple[str, ...], batch: TrainBatch
) -> None:
    uid = GroupUid("data", 0, 0)
    parts = replace(batch, row_ids=[RowId(uid, 0, 0), RowId(uid, 0, 1)])
    parts.columns |= {name: np.ones(2, dtype=np.float32) for name in given}
    with pytest.raises(
        DataError,
        match=r"(?s)data:0:0/0\.1: a part of a sample cannot be weighed.*sample_total_tokens and sample_parts",
    ):
        sample_sizes(parts, torch.zeros(2, 2))


def test_splitting_undoes_padding(batch: TrainBatch) -> None:
    rows = split_rows(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), [2, 1])
    assert [row.tolist() for row in rows] == [[1.0, 2.0], [3.0]]
    assert all(row.dtype == np.float32 for row in rows)


@pytest.mark.parametrize("response_length", [2, 3])
def test_a_response_without_a_token_before_it_is_an_error_that_names_the_row(
    batch: TrainBatch, response_length: int
) -> None:
    batch.columns["response_length"] = np.array([2, response_length], dtype=np.int32)
    with pytest.raises(DataError, match="data:0:0/1"):
        collate(batch, CPU)


def test_a_column_of_another_length_is_an_error_that_names_the_row(batch: TrainBatch) -> None:
    wrong = replace(batch, columns={**batch.columns, "advantages": [np.zeros(2), np.zeros(2)]})
    with pytest.raises(DataError, match=r"data:0:0/1\.0: advantages has the shape \(2,\)"):
        padded_column(wrong, "advantages", torch.zeros(2, 2))


@pytest.mark.parametrize("name", ["advantages", "ref_log_probs"])
@pytest.mark.parametrize("rows", [np.array([3.0, 4.0]), [np.float32(3), np.float32(4)]])
def test_a_number_a_row_is_no_number_for_each_token(batch: TrainBatch, name: str, rows: object) -> None:
    """[num_rows] would be broadcast over the tokens where there are as many: token 0 would get row 0's number."""
    wrong = replace(batch, columns={**batch.columns, name: rows})
    with pytest.raises(DataError, match=rf"{name} has the shape \(\) for a response of \d tokens"):
        padded_column(wrong, name, torch.zeros(2, 2))


def test_rows_without_any_response_collate(make_batch: Callable[..., TrainBatch]) -> None:
    micro = collate(make_batch().select([0]), CPU)
    assert micro.response_bt.shape == (1, 0)
    assert micro.target_n.numel() == 0
