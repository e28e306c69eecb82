"""Options of placement: how many devices the roles have, on which nodes, and which of them are shared."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.options.section import Section, option


class PlacementOptions(Section):
    """Where the processes of a run are placed. A device is a GPU; on a cluster of several nodes without any, a CPU."""

    heading: ClassVar[str] = "Placement"

    actor_num_nodes: int | None = option(
        None, "nodes of the trainer's ranks; --num-train-ranks is this times --actor-num-gpus-per-node", ge=1
    )
    actor_num_gpus_per_node: int | None = option(
        None, "trainer ranks on each of --actor-num-nodes (1 where absent), a GPU each", ge=1
    )
    rollout_num_gpus: int | None = option(
        None,
        "GPUs of all engines; --rollout-num-engines is this divided by --rollout-num-gpus-per-engine. With --colocate "
        "and neither of them given: as many as the trainer has ranks",
        ge=1,
    )
    rollout_num_gpus_per_engine: int = option(1, "GPUs of each engine, all on one node", ge=1)
    num_gpus_per_node: int | None = option(None, "most GPUs of a node that the run uses; all where absent", ge=1)
    colocate: bool = option(
        False,
        "trainer, critic, engines and the other roles share devices; --offload-train and --offload-rollout have "
        "the trainer and the engines hold the memory in turn",
    )
    offload_train: bool = option(
        False,
        "while engines generate, trained roles move their models and optimizer states to the host's memory; with "
        "--schedule lockstep",
    )
    offload_rollout: bool = option(
        False,
        "while the trainer works, engines give back the memory of weights, key-value cache and CUDA graphs; with "
        "--schedule lockstep, and engines that the run starts",
    )
    colocate_actor_ref: bool = option(
        False, "processes of the reference model and of the actor's forward pass share devices with the trainer's ranks"
    )
    colocate_critic_reward: bool = option(False, "processes of a reward model share devices with the critic's ranks")
    resource: dict[str, list[int]] | None = option(
        None,
        'replicas and GPUs of each replica by role, in place of the counts: \'{"actor": [1, 8], "rollout": [1, 4], '
        '"reference": [1, 1], "advantages": [1, 0]}\'; rollout names the engines, other names are roles of your own',
        metavar="JSON",
    )
    rollout_worker_nodes: list[str] = option(
        [],
        "addresses of the nodes of the rollout workers, dealt out in turn, for example those with CPUs to spare for "
        "rewards and tools; without it: near the trainer",
        metavar="ADDRESS",
    )
    train_env_vars: dict[str, str] = option(
        {}, "environment variables of the trainer's ranks and of the processes of roles", metavar="JSON"
    )
    placement_timeout_s: float = option(
        300.0, "deadline for a cluster's free devices, which other jobs may hold, in seconds", gt=0
    )
