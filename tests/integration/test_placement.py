"""A placement on Ray: two nodes of one machine, with GPUs that Ray counts and that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

FRESH = """
import json, os, sys, time
import ray
from ray.cluster_utils import Cluster
from buffer_rl.plan.counts import with_counts
from buffer_rl.cluster.placement import cluster_nodes, placed
from buffer_rl.options.section import compose
from buffer_rl.errors import DeadlineError
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.worker_group import ClassWithArgs, ResourcePool, WorkerGroup, register

class Member:
    def seen(self):
        context, env = ray.get_runtime_context(), os.environ
        return context.get_node_id(), env.get("CUDA_VISIBLE_DEVICES"), env.get("PLACED")

class Worker(Member):
    @register()
    def seen(self):
        return super().seen()

def seen(placement, *members):
    actors = [ray.remote(Member).options(**placement.options(*member)).remote() for member in members]
    answers = ray.get([actor.seen.remote() for actor in actors], timeout=60)
    for actor in actors:
        ray.kill(actor)
    return {f"{role} {index}": answer for (role, index), answer in zip(members, answers, strict=True)}

def options(**given):
    return with_counts(compose(CORE_SECTIONS)(ray_address="joined", rollout_engine="sglang", **given))

node = {"num_cpus": 1, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**node, "num_gpus": 2})
cluster.add_node(**node, num_gpus=4)
ray.init(address=cluster.address, log_to_driver=False)
position = {found.node_id: at for at, found in enumerate(cluster_nodes())}
result = {}
apart = options(num_train_ranks=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, train_env_vars={"PLACED": "yes"})
with placed(apart, True, print) as placement:
    result["apart"] = seen(placement, ("train", 0), ("train", 1), ("engine", 0), ("engine", 1))
    try:
        with placed(options(num_train_ranks=1, placement_timeout_s=2.0), True, print):
            pass
    except DeadlineError as error:
        result["refused"] = str(error).splitlines()[0].replace(cluster_nodes()[0].address, "HEAD")
shared = options(actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=2, colocate=True)
with placed(shared, True, print) as placement:
    result["shared"] = seen(placement, *(("train", rank) for rank in range(4)), ("engine", 0), ("engine", 1))
with WorkerGroup(ClassWithArgs(Worker), ResourcePool([1, 2, 3], gpus=1, timeout_s=20)) as group:
    result["pool"] = {rank: answer for rank, answer in enumerate(group.seen())}
deadline = time.monotonic() + 30
while ray.available_resources().get("GPU") != 6 and time.monotonic() < deadline:
    time.sleep(0.1)
result["free"] = ray.available_resources().get("GPU")
for answers in (result["apart"], result["shared"], result["pool"]):
    for member, (node_id, *others) in answers.items():
        answers[member] = [position[node_id], *others]
ray.shutdown()
cluster.shutdown()
print(json.dumps({**result}))
"""


def test_members_run_on_their_nodes_and_see_their_devices_which_are_free_afterwards() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CUDA_"))}
    with tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp") as folder:  # short: sockets are in it
        environment = {**own, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
        command = [sys.executable, "-c", FRESH]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    apart, shared = found["apart"], found["shared"]  # Ray chooses which GPU of a node is whose
    assert {member: (node, variable) for member, (node, _, variable) in apart.items()} == {
        "train 0": (0, "yes"),
        "train 1": (0, "yes"),
        "engine 0": (1, None),
        "engine 1": (1, None),
    }
    assert sorted([apart["train 0"][1], apart["train 1"][1]]) == ["0", "1"]
    assert sorted(",".join([apart["engine 0"][1], apart["engine 1"][1]]).split(",")) == ["0", "1", "2", "3"]
    assert len(apart["engine 0"][1]) == len("0,1")
    assert found["refused"] == "the placement of the run: 2 GPUs of the node HEAD are not free after 2 s"
    gpus = [shared[f"train {rank}"][1] for rank in range(4)]
    assert sorted(gpus) == ["0", "1", "2", "3"]
    assert [shared[f"engine {index}"][:2] for index in range(2)] == [[1, ",".join(gpus[:2])], [1, ",".join(gpus[2:])]]
    pool = [found["pool"][str(rank)] for rank in range(6)]
    assert [node for node, *_ in pool] == [1, 0, 0, 1, 1, 1]  # the one before the two would leave no room for the three
    assert sorted(gpu for node, gpu, _ in pool if node == 0) == ["0", "1"]
    assert sorted(gpu for node, gpu, _ in pool if node == 1) == ["0", "1", "2", "3"]
    assert found["free"] == 6
