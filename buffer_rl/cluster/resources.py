"""Which accelerators the roles ask Ray for."""

from __future__ import annotations

import ray

from buffer_rl.train.options import TrainOptions


def train_gpus(args: TrainOptions) -> float:
    """Accelerators of each trainer rank: one where the device allows it and the cluster has them, else none."""
    if args.train_device == "cpu":
        return 0.0
    has_gpus = ray.cluster_resources().get("GPU", 0) >= args.num_train_ranks
    return 1.0 if has_gpus or args.train_device == "cuda" else 0.0
