"""Which devices and bundles the members of each role get, and what is said where a cluster has too few."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.devices import DeviceKind, Node
from buffer_rl.cluster.placement import Placement
from buffer_rl.cluster.requirements import plan_devices
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose
from buffer_rl.plan.counts import with_counts

PPO = {"advantage_estimator": "ppo"}
SGLANG = {"rollout_engine": "sglang"}
JOINED = {"ray_address": "10.0.0.2:6379"}
JUDGED = {"rm_model": "/models/judge"}  # a run without a reward model has no role "reward"

Place = tuple[int, tuple[int, ...]]


def options(**given: Any) -> Any:
    return with_counts(compose(CORE_SECTIONS)(**given))


def nodes(*gpus: int, cpus: int = 8) -> list[Node]:
    return [Node(node_id=f"{i:056x}", address=f"10.0.0.{i + 2}", cpus=cpus, gpus=count) for i, count in enumerate(gpus)]


def places(where: list[Node], kind: DeviceKind = DeviceKind.GPU, **given: Any) -> dict[str, list[Place]]:
    """Node and slots of each member of each role."""
    found: dict[str, list[Place]] = {}
    members, _ = plan_devices(options(**given), where, engines=True)
    for member in (each for each in members if each.kind is kind):
        found.setdefault(member.role, []).append(
            (member.devices[0].node, tuple(device.slot for device in member.devices))
        )
    return found


def bundles(where: list[Node], **given: Any) -> dict[str, list[int]]:
    """Devices of each bundle, by the address of the node."""
    return {group.node.address: group.bundles for group in Placement(options(**given), where).groups.values()}


def singles(node: int, *slots: int) -> list[Place]:
    return [(node, (slot,)) for slot in slots]


# ------------------------------------------------------------------ a pool of devices divided among roles


def test_a_pool_of_two_nodes_is_divided_in_half() -> None:
    found = places(nodes(4, 4), num_train_ranks=4, rollout_num_gpus=4)
    assert found == {"train": singles(0, 0, 1, 2, 3), "engine": singles(1, 0, 1, 2, 3)}
    assert bundles(nodes(4, 4), num_train_ranks=4, rollout_num_gpus=4) == {"10.0.0.2": [1] * 4, "10.0.0.3": [1] * 4}


def test_a_pool_of_four_nodes_is_divided_by_sizes() -> None:
    found = places(nodes(2, 2, 2, 2), num_train_ranks=2, rollout_num_gpus=6)
    assert found["train"] == singles(0, 0, 1)
    assert found["engine"] == [*singles(1, 0, 1), *singles(2, 0, 1), *singles(3, 0, 1)]


def test_a_part_of_a_pool_crosses_nodes() -> None:
    found = places(nodes(4, 4), num_train_ranks=2, rollout_num_gpus=6)
    assert Counter(node for node, _ in found["engine"]) == {0: 2, 1: 4}
    assert found["engine"][:2] == singles(0, 2, 3)


def test_a_part_of_a_pool_is_divided_again() -> None:
    resource = {"actor": [1, 2], **{f"judge{i}": [1, 1] for i in range(4)}, "rollout": [1, 2]}
    found = places(nodes(2, 2, 2, 2), resource=resource)
    assert [len(found[role]) for role in ("train", "judge0", "judge1", "judge2", "judge3", "engine")] == [
        2, 1, 1, 1, 1, 2,
    ]  # fmt: skip
    assert len({place for members in found.values() for place in members}) == 8


def test_four_roles_of_one_pool_have_a_quarter_of_every_device() -> None:
    resource = {"actor": [1, 8], "rollout": [1, 8], "genrm": [8, 1], "reference": [1, 8]}
    args = options(**JUDGED, colocate=True, resource=resource)
    chosen, _ = plan_devices(args, nodes(8), engines=True)
    assert {(member.role, member.devices[0].slot) for member in chosen} == {
        (role, slot) for role in ("train", "engine", "reward", "ref") for slot in range(8)
    }
    assert {member.share for member in chosen} == {0.25}


def test_roles_of_half_a_shared_pool_sit_side_by_side() -> None:
    resource = {"actor": [1, 8], "critic": [1, 8], "genrm": [4, 1], "reference": [1, 4]}
    found = places(nodes(8), **PPO, **JUDGED, colocate=True, resource=resource, engine_device="cpu")
    assert found["train"] == found["critic"] == singles(0, *range(8))
    assert sorted([found["reward"], found["ref"]]) == [singles(0, 0, 1, 2, 3), singles(0, 4, 5, 6, 7)]


# ------------------------------------------------------------------ nodes and engines


def test_ranks_of_one_node_stay_on_one_node() -> None:
    asked = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 3, "engine_device": "cpu"}
    assert places(nodes(2, 4, 4), **asked)["train"] == [*singles(1, 0, 1, 2), *singles(2, 0, 1, 2)]
    assert places(nodes(8), **asked)["train"] == singles(0, 0, 1, 2, 3, 4, 5)
    asked |= {"actor_num_gpus_per_node": 2, "num_train_ranks": 4}
    assert places(nodes(8, 8), **asked)["train"] == [*singles(0, 0, 1), *singles(1, 0, 1)]


def test_the_devices_of_an_engine_are_one_bundle_of_one_node() -> None:
    asked = {**SGLANG, "num_train_ranks": 3, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 4}
    assert places(nodes(8, 4), **asked)["engine"] == [(0, (3, 4, 5, 6)), (1, (0, 1, 2, 3))]
    assert bundles(nodes(8, 4), **asked) == {"10.0.0.2": [1, 1, 1, 4], "10.0.0.3": [4]}


def test_large_pieces_come_first_where_small_ones_would_leave_no_node_for_them() -> None:
    asked = {**SGLANG, "num_train_ranks": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}
    found = places(nodes(4, 2), **asked)
    assert found == {"engine": [(0, (0, 1, 2, 3))], "train": singles(1, 0, 1)}


def test_a_run_takes_no_more_of_a_node_than_it_may() -> None:
    found = places(nodes(8, 8), num_train_ranks=4, num_gpus_per_node=3, engine_device="cpu")
    assert found["train"] == [*singles(0, 0, 1, 2), *singles(1, 0)]


def test_on_several_nodes_without_gpus_ranks_and_engines_have_a_cpu_each_on_different_nodes() -> None:
    found = places(nodes(0, 0, 0, cpus=1), DeviceKind.CPU, **JOINED, rollout_num_engines=2)
    assert found == {"train": singles(0, 0), "engine": [*singles(1, 0), *singles(2, 0)]}
    roomy = places(nodes(0, 0, 0, cpus=8), DeviceKind.CPU, **JOINED, num_train_ranks=2, rollout_num_engines=3)
    assert roomy["train"] == singles(0, 0, 1)
    assert [node for node, _ in roomy["engine"]] == [1, 2, 1]


def test_one_machine_without_gpus_reserves_nothing() -> None:
    placement = Placement(options(actor_num_gpus_per_node=2, rollout_num_gpus=2), nodes(0))
    assert placement.groups == {}
    assert placement.options("engine", 0) == placement.options("rollout", 0) == {"num_cpus": 0, "num_gpus": 0}
    assert placement.options("train", 0) == placement.options("rollout", 0)  # no environment: Ray has processes ready


# ------------------------------------------------------------------ who shares, and who has a device at all


def gpus_of(found: int, **given: Any) -> dict[str, float]:
    """GPUs of the first member of each role; those without are left out."""
    placement = Placement(options(engine_device="cpu", **given), nodes(found))
    counts = {role: placement.options(role, 0)["num_gpus"] for role in ("train", "critic", "ref", "reward")}
    return {role: count for role, count in counts.items() if count}


def test_a_critics_ranks_have_gpus_of_their_own_or_share_the_only_one() -> None:
    assert gpus_of(2, **PPO) == {"train": 1.0, "critic": 1.0}
    assert gpus_of(1, **PPO) == {"train": 0.5, "critic": 0.5}
    assert gpus_of(3, **PPO, num_train_ranks=2) == {}
    assert gpus_of(0, **PPO) == {}
    assert gpus_of(1) == {"train": 1.0}
    assert gpus_of(1, train_device="cpu") == {}


def test_an_evaluation_has_no_critic_to_give_a_gpu_to() -> None:
    assert gpus_of(1, **PPO, num_rollout=0) == {"train": 1.0}
    assert gpus_of(1, resource={"judge": [1, 1]}, num_rollout=0) == {"train": 1.0}


def test_pairs_of_roles_share_where_their_flag_says_so() -> None:
    assert gpus_of(2, num_train_ranks=2, colocate_actor_ref=True, num_ref_workers=1) == {"train": 0.5, "ref": 0.5}
    asked = {**PPO, **JUDGED, "resource": {"reward": [1, 1]}}
    assert gpus_of(2, **asked, colocate_critic_reward=True) == {"train": 1.0, "critic": 0.5, "reward": 0.5}
    assert gpus_of(3, **asked) == {"train": 1.0, "critic": 1.0, "reward": 1.0}
    assert gpus_of(1, resource={"reference": [2, 0]}) == {"train": 1.0}  # the workers compute on the CPU


def test_engines_have_gpus_that_are_left_and_are_refused_none_that_are_counted() -> None:
    assert places(nodes(2))["engine"] == singles(0, 1)
    assert "engine" not in places(nodes(1))
    with pytest.raises(ConfigError, match=r"1 trainer rank and 1 engine need 2 GPUs; this machine has 1 GPU\n"):
        places(nodes(1), rollout_num_gpus=1)
    assert "engine" not in places(nodes(2), engine_urls=["http://10.0.0.9:30000"], router_url="http://10.0.0.9:8000")


def test_a_fall_back_to_the_cpu_is_said() -> None:
    def notices(found: int, **given: Any) -> list[str]:
        return plan_devices(options(**given), nodes(found), engines=True)[1]

    assert notices(3, num_train_ranks=4) == [
        "there are 3 GPUs for 4 trainer ranks: they compute on the CPU (--train-device auto)"
    ]
    assert notices(0, actor_num_gpus_per_node=8) == [
        "there is no GPU for 8 trainer ranks (1 node x 8 GPUs): they compute on the CPU (--train-device auto)"
    ]
    assert notices(0, num_train_ranks=4) == notices(4, num_train_ranks=4) == notices(1, train_device="cpu") == []


def test_what_has_no_gpu_sees_none() -> None:
    def visible(found: int, role: str, **given: Any) -> str | None:
        placed = Placement(options(**given), nodes(found)).options(role, 0)
        seen: str | None = placed.get("runtime_env", {"env_vars": {}})["env_vars"].get("CUDA_VISIBLE_DEVICES")
        return seen

    assert visible(3, "train", num_train_ranks=4) == visible(1, "train", train_device="cpu") == ""
    assert visible(1, "ref", resource={"reference": [2, 0]}) == ""
    assert visible(1, "train") is visible(0, "train") is visible(1, "rollout") is visible(1, "engine") is None
    assert visible(1, "train", train_device="cpu", train_env_vars={"CUDA_VISIBLE_DEVICES": "7"}) == "7"


def test_the_environment_of_ranks_and_roles_is_the_one_asked_for() -> None:
    args = options(train_env_vars={"NCCL_DEBUG": "INFO"}, resource={"judge": [1, 0]})
    placement = Placement(args, nodes(0))
    wanted = {"env_vars": {"NCCL_DEBUG": "INFO"}}
    assert all(placement.options(role, 0)["runtime_env"] == wanted for role in ("train", "critic", "ref", "judge"))
    assert "runtime_env" not in placement.options("rollout", 0) | placement.options("engine", 0)


def test_a_rollout_worker_is_near_the_rank_whose_group_it_is_in() -> None:
    args = options(**JOINED, num_train_ranks=3, num_rollout_workers=7, engine_device="cpu")
    placement = Placement(args, nodes(2, 1))  # ranks 0 and 1 on the first node
    near = [int(placement.options("rollout", index)["scheduling_strategy"].node_id, 16) for index in range(7)]
    assert near == [0, 0, 0, 0, 1, 1, 0]


def test_rollout_workers_are_dealt_out_to_the_nodes_that_are_named() -> None:
    named = ["10.0.0.4", "10.0.0.3"]
    args = options(**JOINED, num_rollout_workers=3, engine_device="cpu", rollout_worker_nodes=named)
    placement = Placement(args, nodes(2, 1, 1))
    chosen = [placement.options("rollout", index)["scheduling_strategy"] for index in range(3)]
    assert [int(strategy.node_id, 16) for strategy in chosen] == [2, 1, 2]
    assert all(strategy.soft for strategy in chosen)  # a worker whose node died is started on another one
    fewer = Placement(args, nodes(2, 1))  # as when the run is started again after a node died
    assert [int(fewer.options("rollout", index)["scheduling_strategy"].node_id, 16) for index in range(3)] == [1, 1, 1]
    assert fewer.notices == ["--rollout-worker-nodes: there is no node 10.0.0.4 (any more)"]
    with pytest.raises(ConfigError, match=r"no node of the cluster has the address '10\.0\.0\.4'") as caught:
        Placement(args, nodes(2))
    assert caught.value.expected == "some of 10.0.0.2"


def test_the_table_has_a_line_for_each_role_and_node() -> None:
    asked = {**SGLANG, "actor_num_gpus_per_node": 4, "rollout_num_gpus_per_engine": 2}
    assert Placement(options(**asked, rollout_num_gpus=6), nodes(8, 8)).describe().splitlines() == [
        "role    members  devices each  node",
        "train   4        1 GPU         10.0.0.2",
        "engine  2        2 GPU         10.0.0.2",
        "engine  1        2 GPU         10.0.0.3",
    ]
    assert "train   4        1 GPU x 0.5   10.0.0.2" in Placement(options(**asked, colocate=True), nodes(4)).describe()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("where", "given", "text"),
    [
        (
            nodes(4, 4),
            {**SGLANG, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 4},
            "--actor-num-gpus-per-node, --rollout-num-gpus: 8 trainer ranks (1 node x 8 GPUs) and 2 engines x 4 GPUs "
            "need 16 GPUs; the cluster has 2 nodes with 4 GPUs each = 8\n"
            "  hint: lower them, share with --colocate, or compute on the CPU with --train-device cpu",
        ),
        (
            nodes(8, 0, 4),
            {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "engine_device": "cpu"},
            "--actor-num-nodes, --actor-num-gpus-per-node: 16 trainer ranks (2 nodes x 8 GPUs) need 16 GPUs; "
            "the cluster has 2 nodes with 8 + 4 = 12 GPUs\n"
            "  hint: lower them, share with --colocate, or compute on the CPU with --train-device cpu",
        ),
        (
            nodes(3, 3),
            {**SGLANG, "resource": {"actor": [1, 2], "rollout": [1, 4]}, "rollout_num_gpus_per_engine": 4},
            "--resource: 2 trainer ranks and 1 engine x 4 GPUs need 6 GPUs; the cluster has 2 nodes with 3 GPUs each "
            "= 6, of which 1 engine x 4 GPUs needs 4 on one node, and at most 3 are left on one\n"
            "  hint: lower them, share with --colocate, or compute on the CPU with --train-device cpu",
        ),
        (
            nodes(3),
            {**PPO, "num_train_ranks": 2, "train_device": "cuda"},
            "--num-train-ranks: 2 trainer ranks and 2 critic ranks need 4 GPUs; the cluster has 1 node with 3 GPUs\n"
            "  hint: lower them, share with --colocate, or compute on the CPU with --train-device cpu",
        ),
        (
            nodes(8),
            {"num_train_ranks": 4, "num_gpus_per_node": 2, "train_device": "cuda", "engine_device": "cpu"},
            "--num-train-ranks: 4 trainer ranks need 4 GPUs; the cluster has 1 node with 2 GPUs "
            "(--num-gpus-per-node 2)\n"
            "  hint: lower them, share with --colocate, or compute on the CPU with --train-device cpu",
        ),
        (
            nodes(0, 0, cpus=1),
            {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1},
            "--actor-num-gpus-per-node, --rollout-num-gpus: 2 trainer ranks (1 node x 2 CPUs) and 1 engine need "
            "3 CPUs; the cluster has 2 nodes with 1 CPU each = 2\n  hint: lower them, or share with --colocate",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(where: list[Node], given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Placement(options(**JOINED, **given), where)
    assert str(caught.value) == text


def test_a_worker_of_a_role_that_would_wait_for_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        gpus_of(1, num_ref_workers=1, train_device="cuda")
    assert str(caught.value) == (
        "--num-train-ranks, --num-ref-workers: 1 trainer rank and 1 process of ref need 2 GPUs; this machine has "
        "1 GPU\n  hint: lower them (without processes of its own, a role's work is the trainer's), share with "
        "--colocate, or compute on the CPU with --train-device cpu"
    )
    with pytest.raises(ConfigError, match="need 2 GPUs") as caught:
        gpus_of(1, rm_model="rm", train_device="cuda")
    assert caught.value.hint.startswith("lower them, share with")  # no trainer does a reward model's work


def test_fused_roles_have_the_devices_of_the_one_that_needs_most() -> None:
    fused = {"fuse_roles": ["ref+judge"], "num_ref_workers": 2, "num_actor_fwd_workers": 1, "engine_device": "cpu"}
    found = places(nodes(4), **fused)
    assert (found["ref"], found["actor_fwd"]) == (singles(0, 1, 2), singles(0, 3))
    found = places(nodes(8), **fused, resource={"judge": [2, 2]})
    assert "ref" not in found
    assert found["judge"] == [(0, (2, 3)), (0, (4, 5))]
    assert found["actor_fwd"] == singles(0, 1)


def test_the_embedded_engine_is_refused_a_second_gpu() -> None:
    with pytest.raises(ConfigError, match="--rollout-num-gpus-per-engine: the embedded engine computes on one GPU"):
        places(nodes(8), rollout_num_gpus_per_engine=2)
    assert places(nodes(0, 0), DeviceKind.CPU, **JOINED, rollout_num_gpus_per_engine=2)["engine"] == singles(1, 0)


def test_cpus_that_nobody_counted_are_left_to_ray() -> None:
    members, notices = plan_devices(options(**JOINED, rollout_num_engines=2), nodes(0, 0, cpus=1), engines=True)
    assert members == []
    assert notices == [
        "1 trainer rank and 2 engines need 3 CPUs; the cluster has 2 nodes with 1 CPU each = 2: "
        "Ray chooses the nodes of the processes"
    ]


# ------------------------------------------------------------------ what holds for every layout


@settings(max_examples=150)
@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    actor=st.tuples(st.integers(1, 2), st.integers(1, 6)),
    engines=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    refs=st.integers(0, 3),
    judges=st.none() | st.tuples(st.integers(1, 3), st.integers(1, 2)),
    flags=st.sets(st.sampled_from(["colocate", "colocate_actor_ref", "use_critic", "colocate_critic_reward"])),
)
def test_every_layout_gives_each_member_devices_once_and_no_device_away_twice(
    gpus: list[int],
    actor: tuple[int, int],
    engines: tuple[int, int],
    refs: int,
    judges: tuple[int, int] | None,
    flags: set[str],
) -> None:
    args = options(
        **SGLANG, **JOINED, **dict.fromkeys(flags, True), actor_num_nodes=actor[0], actor_num_gpus_per_node=actor[1],
        rollout_num_gpus=engines[0] * engines[1], rollout_num_gpus_per_engine=engines[1], num_ref_workers=refs,
        resource=None if judges is None else {"judge": list(judges)},
    )  # fmt: skip
    try:
        placement = Placement(args, nodes(*gpus))
    except ConfigError:
        return
    kind = DeviceKind.GPU if sum(gpus) else DeviceKind.CPU
    members = [member for member in plan_devices(args, nodes(*gpus), engines=True)[0] if member.kind is kind]
    if not members:
        assert len(gpus) == 1 or kind is DeviceKind.CPU
        return
    counts = {"train": actor[0] * actor[1], "engine": engines[0], "ref": refs, "judge": (judges or (0, 0))[0]}
    counts["critic"] = counts["train"] * ("use_critic" in flags)
    assert Counter(member.role for member in members) == Counter({role: n for role, n in counts.items() if n})
    assert len({(member.role, member.index) for member in members}) == len(members)
    held: Counter[Any] = Counter()
    for member in members:
        assert len({device.node for device in member.devices}) == 1
        assert len(set(member.devices)) == len(member.devices)
        held.update(dict.fromkeys(member.devices, member.share))
    assert max(held.values()) <= 1
    ranks = [member.devices[0].node for member in members if member.role == "train"]
    if kind is DeviceKind.GPU:
        assert all(len(set(ranks[at : at + actor[1]])) == 1 for at in range(0, len(ranks), actor[1]))
    assert sum(sum(group.bundles) for group in placement.groups.values()) == len(held)
