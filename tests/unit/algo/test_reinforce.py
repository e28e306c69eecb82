from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffer_rl.algo.gae import gae
from buffer_rl.algo.reinforce import gpg, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from buffer_rl.algo.returns import whitened, whitened_tokens
from buffer_rl.algo.rewards import group_normalize
from buffer_rl.errors import DataError
from buffer_rl.kinds.marks import Scope, needs_of, scope_of

TWO = [(0, 0, 0), (1, 0, 0)]
UNEVEN = ([1.0, 2.0, 3.0, 4.0], [10.0, 12.0], [5.0, 6.0, 7.0])
UNEVEN_IDS = [(prompt, sample, 0) for prompt, rewards in enumerate(UNEVEN) for sample in range(len(rewards))]
UNEVEN_CENTRED = [value for rewards in UNEVEN for value in group_normalize(rewards, std=False)]


def lists(rows: Any) -> list[list[float]]:
    return [row.tolist() for row in rows]


def test_reinforce_plus_plus_puts_the_reward_on_the_last_unmasked_token(make_rows: Any, make_algo_args: Any) -> None:
    # gamma 0.5: the reward 8 is on the third token, the second is skipped: returns 4, 0, 8, 0; of the other row 2, 4.
    batch = make_rows(TWO, [8.0, 4.0], [[1, 0, 1, 0], [1, 1]])
    reinforce_plus_plus(make_algo_args(gamma=0.5), batch)
    assert lists(batch.columns["returns"]) == [[4, 0, 8, 0], [2, 4]]
    # The unmasked returns are 4, 8, 2, 4: mean 4.5, sum of squares 0.25 + 12.25 + 6.25 + 0.25 = 19, variance 19 / 3.
    expected = [(np.array([4, 4.5, 8, 4.5]) - 4.5) / np.sqrt(19 / 3), (np.array([2, 4]) - 4.5) / np.sqrt(19 / 3)]
    for found, wanted in zip(batch.columns["advantages"], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_reinforce_plus_plus_subtracts_the_kl_to_come(make_rows: Any, make_algo_args: Any) -> None:
    # log pi - log ref = 1, (7, masked), -2; coefficient 0.5: rewards -0.5 and 3 + 1; returns 3.5 and 4.
    log_probs = {
        "rollout_log_probs": [np.array([-1.0, 0.0, -4.0])],
        "ref_log_probs": [np.array([-2.0, -7.0, -2.0])],
    }
    batch = make_rows([(0, 0, 0)], [3.0], [[1, 0, 1]], **log_probs)
    reinforce_plus_plus(make_algo_args(kl_coef=0.5, use_rollout_logprobs=True), batch)
    assert lists(batch.columns["returns"]) == [[3.5, 0, 4]]


def test_reinforce_plus_plus_without_the_reference_says_so(make_rows: Any, make_algo_args: Any) -> None:
    batch = make_rows([(0, 0, 0)], [3.0], [[1]], old_log_probs=[np.zeros(1)])
    with pytest.raises(DataError, match="ref_log_probs"):
        reinforce_plus_plus(make_algo_args(kl_coef=0.5), batch)


def test_the_baseline_variant_counts_tokens_and_keeps_groups_at_mean_0(make_rows: Any) -> None:
    batch = make_rows(UNEVEN_IDS, UNEVEN_CENTRED, [[1]] * 9)
    reinforce_plus_plus_baseline(None, batch)
    # Sum of squares 2 * (2.25 + 0.25) + 2 * 1 + 2 * 1 = 9 of nine numbers with mean 0: variance 9 / 8.
    found = np.concatenate(batch.columns["advantages"])
    np.testing.assert_allclose(found, np.array(UNEVEN_CENTRED) / np.sqrt(9 / 8), rtol=1e-6)
    for group in (found[:4], found[4:6], found[6:]):
        assert group.mean() == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(np.concatenate(batch.columns["returns"]), UNEVEN_CENTRED)


def test_masked_and_removed_rows_do_not_count_in_the_statistics(make_rows: Any) -> None:
    # Unmasked: 1, -1, -1. Mean -1/3, squares (16 + 4 + 4) / 9, variance 24 / 9 / 2 = 4/3: 4/3 and -2/3 over sqrt(4/3).
    batch = make_rows([(0, i, 0) for i in range(3)], [1.0, -1.0, 50.0], [[1, 0], [1, 1], [0, 0, 0]])
    reinforce_plus_plus_baseline(None, batch)
    up, down = 4 / 3 / np.sqrt(4 / 3), -2 / 3 / np.sqrt(4 / 3)
    for found, wanted in zip(batch.columns["advantages"], [[up, 0], [down, down], [0, 0, 0]], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_rollout_of_equal_returns_or_of_masked_rows_gives_exactly_0(make_rows: Any, make_algo_args: Any) -> None:
    batch = make_rows(TWO, [0.1, 0.1], [[1, 1, 1], [1, 1]])
    reinforce_plus_plus(make_algo_args(), batch)
    assert lists(batch.columns["advantages"]) == [[0, 0, 0], [0, 0]]
    masked = make_rows(TWO, [3.0, 1.0], [[0, 0], []])
    reinforce_plus_plus(make_algo_args(), masked)
    assert lists(masked.columns["advantages"]) == [[0, 0], []]
    single = make_rows([(0, 0, 0)], [3.0], [[1]])
    reinforce_plus_plus(make_algo_args(), single)
    assert lists(single.columns["advantages"]) == [[0]]


def test_whitened_tokens_have_mean_0_and_deviation_1() -> None:
    rng = np.random.default_rng(0)
    rows, masks = [rng.normal(3, 5, n) for n in (40, 30)], [rng.random(n) < 0.5 for n in (40, 30)]
    found = whitened_tokens(rows, masks)
    kept = np.concatenate([row[mask] for row, mask in zip(found, masks, strict=True)])
    assert kept.mean() == pytest.approx(0, abs=1e-6)
    assert kept.std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert all((row[~mask] == 0).all() for row, mask in zip(found, masks, strict=True))


def test_equal_numbers_are_whitened_to_exactly_0() -> None:
    assert lists(whitened([np.array([0.1, 0.1]), np.array([0.1])])) == [[0, 0], [0]], "the mean of three 0.1 is not 0.1"


def test_remax_subtracts_the_reward_of_the_greedy_response(make_rows: Any, make_algo_args: Any) -> None:
    batch = make_rows(TWO, [1.0, 0.0], [[1, 0, 1], [1]], baseline_reward=np.array([0.25, 0.25], dtype=np.float32))
    remax(make_algo_args(), batch)
    assert lists(batch.columns["advantages"]) == [[0.75, 0, 0.75], [-0.25]]
    assert lists(batch.columns["returns"]) == [[1, 0, 1], [0]]


def test_remax_without_greedy_rewards_names_the_column(make_rows: Any, make_algo_args: Any) -> None:
    with pytest.raises(DataError, match="baseline_reward"):
        remax(make_algo_args(), make_rows(TWO, [1.0, 0.0], [[1], [1]]))


def test_gpg_takes_prompts_without_a_gradient_out_of_the_mean(make_rows: Any) -> None:
    # 4 samples of two prompts, one of them with equal rewards: 4 / (4 - 2) = 2.
    ids = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    batch = make_rows(ids, [0.5, -0.5, 0.0, 0.0], [[1, 1], [1], [1], [1]])
    gpg(None, batch)
    assert lists(batch.columns["advantages"]) == [[1, 1], [-1], [0], [0]]
    assert lists(batch.columns["returns"]) == [[1, 1], [-1], [0], [0]]


def test_gpg_takes_prompts_out_whose_rewards_differ_by_rounding_alone(make_rows: Any) -> None:
    # What a user's function leaves of three times 0.1 minus their mean: 4 / (4 - 2) = 2, as for zeros.
    ids = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    batch = make_rows(ids, [0.5, -0.5, -1.4e-17, -1.4e-17], [[1], [1], [1], [1]])
    gpg(None, batch)
    assert lists(batch.columns["advantages"])[:2] == [[1], [-1]]


def test_gpg_counts_samples_and_neither_parts_nor_removed_ones(make_rows: Any) -> None:
    # Prompt 0 has samples 0 (two parts), 1 and 2 (middle reward, a gradient of 0 by chance): 3. Prompt 1 has one that
    # counts and one that is removed. 4 / 3.
    ids = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0)]
    batch = make_rows(ids, [3.0, 3.0, -3.0, 0.0, 0.0, 0.0], [[1], [1], [1], [1], [1], [0]])
    gpg(None, batch)
    assert lists(batch.columns["advantages"]) == [[4], [4], [-4], [0], [0], [0]]


def test_gpg_of_uneven_groups_has_mean_0_in_each_and_of_equal_rewards_0(make_rows: Any) -> None:
    batch = make_rows(UNEVEN_IDS, UNEVEN_CENTRED, [[1]] * 9)
    gpg(None, batch)
    assert np.concatenate(batch.columns["advantages"]).tolist() == UNEVEN_CENTRED
    equal = make_rows(TWO, [0.0, 0.0], [[1], [1]])
    gpg(None, equal)
    assert lists(equal.columns["advantages"]) == [[0], [0]]


def test_estimators_declare_what_they_read() -> None:
    for estimator in (reinforce_plus_plus, reinforce_plus_plus_baseline, gpg):
        assert (scope_of(estimator), needs_of(estimator)) == (Scope.ROLLOUT, frozenset())
    assert (scope_of(remax), needs_of(remax)) == (Scope.ROW, {"baseline_reward"})
    assert (scope_of(gae), needs_of(gae)) == (Scope.ROW, {"values"})


@pytest.mark.parametrize("estimator", [reinforce_plus_plus, reinforce_plus_plus_baseline, remax, gpg])
def test_the_order_of_rows_changes_nothing(estimator: Any, make_rows: Any, make_algo_args: Any) -> None:
    rng = np.random.default_rng(0)
    masks, order = [(rng.random(5) < 0.7).astype(int).tolist() for _ in range(9)], rng.permutation(9).tolist()
    batch = make_rows(UNEVEN_IDS, UNEVEN_CENTRED, masks, baseline_reward=np.ones(9, dtype=np.float32))
    turned = batch.select(order)
    for each in (batch, turned):
        estimator(make_algo_args(gamma=0.9), each)
    for place, row in enumerate(order):
        np.testing.assert_allclose(turned.columns["advantages"][place], batch.columns["advantages"][row], atol=1e-6)


@pytest.mark.parametrize("estimator", [reinforce_plus_plus, reinforce_plus_plus_baseline, remax, gpg])
def test_a_sample_in_parts_gets_what_it_gets_in_one_row(estimator: Any, make_rows: Any, make_algo_args: Any) -> None:
    """Its reward is on every part, and its tokens are those of all parts."""
    whole = make_rows(
        [(0, 0, 0), (0, 1, 0), (1, 0, 0)],
        [2.0, -2.0, 0.0],
        [[1, 1, 1, 1], [1, 0], [1]],
        baseline_reward=np.ones(3, dtype=np.float32),
    )
    parts = make_rows(
        [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)],
        [2.0, 2.0, -2.0, 0.0],
        [[1, 1, 1], [1], [1, 0], [1]],
        baseline_reward=np.ones(4, dtype=np.float32),
    )
    for batch in (whole, parts):
        estimator(make_algo_args(), batch)
    expected = np.concatenate(whole.columns["advantages"])
    np.testing.assert_allclose(np.concatenate(parts.columns["advantages"]), expected, rtol=1e-6)
