"""6 x 4 = 24 samples a rollout."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose, dump_args, load_args
from buffer_rl.plan.batch_sizes import optimizer_steps, with_steps


def options(**given: Any) -> Any:
    return compose(CORE_SECTIONS)(**{"rollout_batch_size": 6, "n_samples_per_prompt": 4, **given})


@pytest.mark.parametrize(("size", "steps"), [(24, 1), (12, 2), (8, 3), (4, 6), (None, 1)])
def test_the_number_of_steps_follows_from_the_samples_of_one(size: int | None, steps: int) -> None:
    args = with_steps(options(global_batch_size=size))
    assert args.num_steps_per_rollout == optimizer_steps(args) == steps
    assert args.global_batch_size == size


def test_what_follows_stays_where_it_is_derived_again_and_in_another_process() -> None:
    args: Any = with_steps(load_args(dump_args(with_steps(options(global_batch_size=8)))))
    assert (args.num_steps_per_rollout, args.global_batch_size) == (3, 8)


def test_both_may_be_given_where_they_agree_and_steps_alone_need_not_divide_the_groups() -> None:
    assert optimizer_steps(with_steps(options(global_batch_size=8, num_steps_per_rollout=3))) == 3
    assert optimizer_steps(with_steps(options(num_steps_per_rollout=4))) == 4


def test_passes_multiply_the_steps_and_not_the_samples_of_one() -> None:
    args = with_steps(options(global_batch_size=8, num_passes_per_rollout=4))
    assert (args.num_steps_per_rollout, optimizer_steps(args)) == (3, 12)


@pytest.mark.parametrize("size", [6, 16, 48, 1, 20])  # 6 divides 24, but is no number of whole groups
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        with_steps(options(global_batch_size=size))
    assert caught.value.where == "--global-batch-size"
    assert caught.value.expected == "one of 4, 8, 12, 24"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, "--global-batch-size 24, or --num-steps-per-rollout 3"),
        (2, "--global-batch-size 12, or --num-steps-per-rollout 3"),
        (4, "--num-steps-per-rollout 3"),  # six groups are not four equal mini-batches
    ],
)
def test_two_numbers_that_contradict_each_other_are_refused_with_those_that_would_do(steps: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_steps(options(global_batch_size=8, num_steps_per_rollout=steps))
    assert caught.value.expected == expected
