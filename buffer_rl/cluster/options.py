"""Options of placement: how many devices the roles have, on which nodes, and which of them are shared."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.options.section import Section, option


class PlacementOptions(Section):
    """Where the processes of a run are placed. A device is a GPU; on a cluster of several nodes without any, a CPU."""

    heading: ClassVar[str] = "Placement"

    actor_num_nodes: int | None = option(
        None, "number of nodes for trainer ranks; sets --num-train-ranks, together with --actor-num-gpus-per-node", ge=1
    )
    actor_num_gpus_per_node: int | None = option(
        None, "number of trainer ranks per node, one GPU each; 1 if only --actor-num-nodes is set", ge=1
    )
    rollout_num_gpus: int | None = option(
        None,
        "number of GPUs for all engines; sets --rollout-num-engines, together with --rollout-num-gpus-per-engine. "
        "With --colocate and neither of them: the number of trainer ranks",
        ge=1,
    )
    rollout_num_gpus_per_engine: int = option(1, "number of GPUs per engine, all on one node", ge=1)
    num_gpus_per_node: int | None = option(None, "maximum number of GPUs to use per node; if not set: all", ge=1)
    colocate: bool = option(
        False,
        "place trainer, critic, engines and other roles on the same devices; with --offload-train and "
        "--offload-rollout, trainer and engines hold the memory in turn",
    )
    offload_train: bool = option(
        False, "move trained models and optimizer states to host memory during generation; --schedule lockstep"
    )
    offload_rollout: bool = option(
        False, "release the engines' weights, cache and CUDA graphs during training; --schedule lockstep, own engines"
    )
    colocate_actor_ref: bool = option(
        False, "place the processes of reference model and actor's forward pass on the devices of the trainer ranks"
    )
    colocate_critic_reward: bool = option(False, "place processes of a reward model on devices of the critic ranks")
    resource: dict[str, list[int]] | None = option(
        None,
        'number of replicas and GPUs per replica by role, in place of other counts: \'{"actor": [1, 8], "rollout": '
        '[1, 4], "reference": [1, 1], "advantages": [1, 0]}\'; rollout: the engines; other names: your roles',
        metavar="JSON",
    )
    rollout_worker_nodes: list[str] = option(
        [],
        "node addresses for rollout workers, used in turn, for example nodes with free CPUs for rewards and tools; "
        "if not set: near the trainer",
        metavar="ADDRESS",
    )
    train_env_vars: dict[str, str] = option(
        {}, "environment variables of trainer ranks and role processes", metavar="JSON"
    )
    placement_timeout_s: float = option(300.0, "deadline for free devices on the cluster, in seconds", gt=0)
