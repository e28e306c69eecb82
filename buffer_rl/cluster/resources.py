"""Which accelerators the roles ask Ray for."""

from __future__ import annotations

from typing import Any, cast

import ray

from buffer_rl.train.options import TrainOptions


def train_gpus(args: TrainOptions) -> float:
    """Accelerators of each trainer rank: one where the device allows it and the cluster has them, else none."""
    if args.train_device == "cpu":
        return 0.0
    resources: dict[str, float] = cast(Any, ray).cluster_resources()
    has_gpus = resources.get("GPU", 0) >= args.num_train_ranks
    return 1.0 if has_gpus or args.train_device == "cuda" else 0.0
