"""Run by test_two_ranks.py as a process of its own: trains on this rank's share of the rows and writes the results."""

from __future__ import annotations

import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from buffer_rl.buffer.readers import balanced_partition
from buffer_rl.trainer.steps import KLControl, NonFiniteGuard, train_steps
from harness.trainers import make_trainer


def main(job_file: str, rank: int, world_size: int, out_file: str) -> None:
    args, batches = pickle.loads(Path(job_file).read_bytes())
    if world_size > 1:
        timeout = timedelta(seconds=args.train_timeout_s)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    trainer = make_trainer(args, rank, world_size)
    guard = NonFiniteGuard(Path(out_file).with_suffix(""), rank, 10)
    shares = [batch.select(balanced_partition(batch.lengths, world_size)[rank]) for batch in batches]
    report = train_steps(trainer, trainer._objective, shares, guard)
    KLControl(args, trainer._objective).adapt(report)
    weights = {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}
    Path(out_file).write_bytes(pickle.dumps((report, weights, trainer._objective.kl_coef)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
