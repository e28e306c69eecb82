"""The numbers of processes that follow from numbers of devices, and of steps that follow from numbers of samples."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose, dump_args, load_args
from buffer_rl.plan.counts import optimizer_steps, with_counts, with_steps


def counted(**options: Any) -> Any:
    return with_counts(compose(CORE_SECTIONS)(**options))


def test_ranks_are_nodes_times_gpus_per_node() -> None:
    assert counted(actor_num_nodes=2, actor_num_gpus_per_node=4).num_train_ranks == 8
    assert counted(actor_num_gpus_per_node=4).num_train_ranks == 4
    assert counted(actor_num_nodes=2, num_train_ranks=6).num_train_ranks == 6
    assert counted().num_train_ranks == 1


def test_engines_are_gpus_over_gpus_per_engine() -> None:
    assert counted(rollout_num_gpus=8, rollout_num_gpus_per_engine=4).rollout_num_engines == 2
    assert counted(rollout_num_gpus=3).rollout_num_engines == 3
    assert counted(rollout_num_gpus_per_engine=4, rollout_num_engines=3).rollout_num_engines == 3


def test_colocated_engines_fill_the_devices_of_the_ranks_unless_they_are_counted() -> None:
    assert counted(colocate=True, actor_num_gpus_per_node=8, rollout_num_gpus_per_engine=2).rollout_num_engines == 4
    assert counted(colocate=True, num_train_ranks=8, rollout_num_engines=3).rollout_num_engines == 3
    assert counted(colocate=True, num_train_ranks=8, rollout_num_gpus=4).rollout_num_engines == 4
    assert counted(colocate=True, resource={"actor": [1, 8], "rollout": [1, 4]}).rollout_num_engines == 4


def test_relax_names_of_roles_count_ranks_engines_and_workers() -> None:
    resource = {"actor": [1, 2], "rollout": [1, 4], "reference": [2, 1], "actor_fwd": [1, 3], "advantages": [1, 0]}
    args = counted(resource=resource, rollout_num_gpus_per_engine=2)
    assert (args.num_train_ranks, args.rollout_num_engines) == (2, 2)
    assert (args.num_ref_workers, args.num_actor_fwd_workers, args.num_advantage_workers) == (2, 3, 1)
    assert counted(resource={"train": [1, 5], "engine": [2, 0], "ref": [1, 1]}).rollout_num_engines == 2


def test_counting_again_changes_nothing() -> None:
    args = counted(actor_num_nodes=2, actor_num_gpus_per_node=4, resource={"rollout": [1, 4]})
    assert with_counts(args) is args
    assert with_counts(load_args(dump_args(args))) == args


def test_engines_have_the_number_format_of_the_trainer_unless_another_is_given() -> None:
    assert counted().engine_dtype == "float32"
    assert counted(bf16=True).engine_dtype == "bfloat16"
    assert counted(bf16=True, engine_dtype="float32").engine_dtype == "float32"
    args = counted(bf16=True)
    assert with_counts(args) is args


def test_equal_numbers_given_twice_are_accepted() -> None:
    assert counted(num_train_ranks=8, actor_num_gpus_per_node=8, resource={"actor": [1, 8]}).num_train_ranks == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"num_train_ranks": 4, "actor_num_gpus_per_node": 8},
            "--num-train-ranks and --actor-num-gpus-per-node: --num-train-ranks is 4, and "
            "--actor-num-gpus-per-node 8 x --actor-num-nodes 1 is 8\n"
            "  hint: without --num-train-ranks it follows from --actor-num-gpus-per-node",
        ),
        (
            {"rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 4},
            "--rollout-num-gpus and --rollout-num-gpus-per-engine: 6 GPUs are not whole engines of 4 GPUs\n"
            "  expected: a multiple of 4, such as 4 or 8",
        ),
        (
            {"rollout_num_gpus": 6, "rollout_num_engines": 3, "rollout_num_gpus_per_engine": 3},
            "--rollout-num-engines and --rollout-num-gpus: --rollout-num-engines is 3, and "
            "--rollout-num-gpus 6 / --rollout-num-gpus-per-engine 3 is 2\n"
            "  hint: without --rollout-num-engines it follows from --rollout-num-gpus",
        ),
        (
            {"num_train_ranks": 5, "actor_num_nodes": 2},
            "--num-train-ranks and --actor-num-nodes: 5 trainer ranks are not the same number on each of 2 nodes\n"
            "  expected: a multiple of 2\n  hint: or --actor-num-gpus-per-node N, in place of --num-train-ranks",
        ),
        (
            {"resource": {"actor": [1, 4]}, "actor_num_gpus_per_node": 8},
            "--actor-num-gpus-per-node and --resource: --actor-num-gpus-per-node 8 x --actor-num-nodes 1 is 8, and "
            "--resource [1, 4] of train is 4\n  hint: leave one of them out",
        ),
        (
            {"resource": {"reference": [1, 2]}, "num_ref_workers": 1},
            "--num-ref-workers and --resource: --num-ref-workers is 1, and --resource [1, 2] of ref is 2\n"
            "  hint: without --num-ref-workers it follows from --resource",
        ),
        (
            {"resource": {"actor": [1, 4], "critic": [1, 2]}},
            '--resource: the critic has 2 ranks, and the actor 4\n  expected: "critic": [1, 4]',
        ),
        (
            {"resource": {"rollout": [1, 3]}, "rollout_num_gpus_per_engine": 2},
            "--resource and --rollout-num-gpus-per-engine: 3 GPUs are not whole engines of 2 GPUs\n"
            "  expected: a multiple of 2, such as 2 or 4",
        ),
        (
            {"resource": {"reward": [2, 0]}},
            "--resource: the role 'reward' is counted, and there is none\n  hint: add --rm-model",
        ),
        (
            {"resource": {"actor": [8]}},
            "--resource: 'actor' has [8]\n"
            "  expected: [replicas, GPUs of each replica], for example [1, 8]; without GPUs [1, 0]",
        ),
        (
            {"resource": {"actor": [1, 8], "train": [1, 8]}},
            "--resource: the role 'train' is there under two names, one of them 'train'\n  hint: take it out",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        counted(**options)
    assert str(caught.value) == text


def of_24_samples(**given: Any) -> Any:
    """6 x 4 = 24 samples a rollout."""
    return compose(CORE_SECTIONS)(**{"rollout_batch_size": 6, "n_samples_per_prompt": 4, **given})


@pytest.mark.parametrize(("size", "steps"), [(24, 1), (12, 2), (8, 3), (4, 6), (None, 1)])
def test_the_number_of_steps_follows_from_the_samples_of_one(size: int | None, steps: int) -> None:
    args = with_steps(of_24_samples(global_batch_size=size))
    assert args.num_steps_per_rollout == optimizer_steps(args) == steps
    assert args.global_batch_size == size


def test_what_follows_stays_where_it_is_derived_again_and_in_another_process() -> None:
    args: Any = with_steps(load_args(dump_args(with_steps(of_24_samples(global_batch_size=8)))))
    assert (args.num_steps_per_rollout, args.global_batch_size) == (3, 8)


def test_both_may_be_given_where_they_agree_and_steps_alone_need_not_divide_the_groups() -> None:
    assert optimizer_steps(with_steps(of_24_samples(global_batch_size=8, num_steps_per_rollout=3))) == 3
    assert optimizer_steps(with_steps(of_24_samples(num_steps_per_rollout=4))) == 4


def test_passes_multiply_the_steps_and_not_the_samples_of_one() -> None:
    args = with_steps(of_24_samples(global_batch_size=8, num_passes_per_rollout=4))
    assert (args.num_steps_per_rollout, optimizer_steps(args)) == (3, 12)


@pytest.mark.parametrize("size", [6, 16, 48, 1, 20])  # 6 divides 24, but is no number of whole groups
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        with_steps(of_24_samples(global_batch_size=size))
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
        with_steps(of_24_samples(global_batch_size=8, num_steps_per_rollout=steps))
    assert caught.value.expected == expected


def test_the_backend_fsdp_is_torch_with_the_model_split_over_all_ranks() -> None:
    for given, size in ({}, -1), ({"fsdp_size": 2}, 2), ({"fsdp_size": 1}, 1):
        args = counted(train_backend="fsdp", num_train_ranks=4, **given)
        assert (args.train_backend, args.fsdp_size) == ("torch", size)
