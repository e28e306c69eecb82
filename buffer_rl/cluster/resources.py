"""Which accelerators the roles ask Ray for."""

from __future__ import annotations

from typing import Any, cast

import ray

from buffer_rl.errors import ConfigError
from buffer_rl.train.options import TrainOptions


def train_gpus(args: TrainOptions) -> float:
    """Accelerators of each trainer rank: one where the device allows it and the cluster has them, else none."""
    if args.train_device == "cpu":
        return 0.0
    resources: dict[str, float] = cast(Any, ray).cluster_resources()
    has_gpus = resources.get("GPU", 0) >= args.num_train_ranks
    return 1.0 if has_gpus or args.train_device == "cuda" else 0.0


def role_gpus(args: TrainOptions) -> float:
    """Accelerators of each worker of ``ref`` and ``actor_fwd``, beside those of the trainer ranks.

    Raises ConfigError if the cluster has too few: the workers would wait for them until a deadline passes."""
    num_gpus = train_gpus(args)
    wanted = args.num_train_ranks + args.num_ref_workers + args.num_actor_fwd_workers
    found = int(cast(Any, ray).cluster_resources().get("GPU", 0))
    if num_gpus and wanted > args.num_train_ranks and found < wanted:
        raise ConfigError(
            f"{args.num_train_ranks} trainer ranks and {wanted - args.num_train_ranks} workers of roles need an "
            f"accelerator each, and there are {found}",
            where="--num-ref-workers and --num-actor-fwd-workers",
            hint="lower them (the trainer then does that work), or add --train-device cpu",
        )
    return num_gpus
