from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffer_rl.algo.gae import gae
from buffer_rl.errors import DataError

ONE = [(0, 0, 0)]


def test_advantages_match_hand_computed_numbers(make_rows: Any, make_algo_args: Any) -> None:
    # r = 0, 0, 1 and V = 0.5: delta = 0, 0, 0.5. A_3 = 0.5, A_2 = 0.95 * 0.5 = 0.475, A_1 = 0.95 * 0.475 = 0.45125
    batch = make_rows(ONE, [1.0], [[1, 1, 1]], values=[np.full(3, 0.5, dtype=np.float32)])
    gae(make_algo_args(lambd=0.95), batch)
    np.testing.assert_allclose(batch.columns["advantages"][0], [0.45125, 0.475, 0.5], rtol=1e-6)
    np.testing.assert_allclose(batch.columns["returns"][0], [0.95125, 0.975, 1.0], rtol=1e-6)


def test_gamma_discounts_the_next_value_and_the_next_advantage(make_rows: Any, make_algo_args: Any) -> None:
    # gamma 0.5, lambda 0.5, V = 1, 2: delta_2 = 4 - 2 = 2, delta_1 = 0.5 * 2 - 1 = 0; A_1 = 0 + 0.25 * 2 = 0.5
    batch = make_rows(ONE, [4.0], [[1, 1]], values=[np.array([1.0, 2.0])])
    gae(make_algo_args(gamma=0.5, lambd=0.5), batch)
    assert batch.columns["advantages"][0].tolist() == [0.5, 2.0]
    assert batch.columns["returns"][0].tolist() == [1.5, 4.0]


def test_masked_tokens_are_skipped_over_as_if_absent(make_rows: Any, make_algo_args: Any) -> None:
    values = [np.array([0.5, 9.0, 0.5, -9.0, 0.5, 9.0]), np.array([3.0, 3.0])]
    batch = make_rows([(0, 0, 0), (0, 1, 0)], [1.0, 5.0], [[1, 0, 1, 0, 1, 0], [0, 0]], values=values)
    gae(make_algo_args(lambd=0.95), batch)
    np.testing.assert_allclose(batch.columns["advantages"][0], [0.45125, 0, 0.475, 0, 0.5, 0], rtol=1e-6)
    assert batch.columns["advantages"][1].tolist() == [0, 0]
    assert batch.columns["returns"][1].tolist() == [0, 0]


def test_the_kl_penalty_is_in_the_token_rewards(make_rows: Any, make_algo_args: Any) -> None:
    # lambda 1, V = 0: the sum of rewards to come. k1 = 0.5 and -1, coefficient 0.1: r = -0.05 and 2 + 0.1
    columns = {"values": [np.zeros(2)], "old_log_probs": [np.array([-1.0, -3.0])]}
    batch = make_rows(ONE, [2.0], [[1, 1]], ref_log_probs=[np.array([-1.5, -2.0])], **columns)
    gae(make_algo_args(kl_coef=0.1), batch)
    np.testing.assert_allclose(batch.columns["advantages"][0], [2.05, 2.1], rtol=1e-6)


def test_rows_do_not_depend_on_each_other_or_their_order(make_rows: Any, make_algo_args: Any) -> None:
    rng = np.random.default_rng(0)
    masks = [(rng.random(n) < 0.7).astype(int).tolist() for n in (5, 1, 8, 0)]
    values = [rng.normal(size=len(mask)) for mask in masks]
    ids, rewards, args = [(0, i, 0) for i in range(4)], [1.0, 2.0, 3.0, 4.0], make_algo_args(gamma=0.9, lambd=0.8)
    batch = make_rows(ids, rewards, masks, values=values)
    turned = batch.select([3, 1, 0, 2])
    gae(args, batch)
    gae(args, turned)
    for place, row in enumerate([3, 1, 0, 2]):
        for column in ("advantages", "returns"):
            np.testing.assert_array_equal(turned.columns[column][place], batch.columns[column][row])


def test_values_of_another_length_name_their_row(make_rows: Any, make_algo_args: Any) -> None:
    batch = make_rows(ONE, [1.0], [[1, 1]], values=[np.zeros(3)])
    with pytest.raises(DataError, match="data:0:0/0"):
        gae(make_algo_args(), batch)
