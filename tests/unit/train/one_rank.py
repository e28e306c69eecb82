"""Run by test_two_ranks.py as a process of its own: trains on this rank's share of the rows and writes the results."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from buffer_rl.buffer.readers import balanced_partition
from buffer_rl.errors import TrainError
from buffer_rl.train.torch_trainer import TorchTrainer


def main(job_file: str, rank: int, world_size: int, out_file: str) -> None:
    args, batches = pickle.loads(Path(job_file).read_bytes())
    trainer = TorchTrainer(args, rank, world_size)
    metrics, failures = [], []
    for batch in batches:
        share = batch.select(balanced_partition(batch.lengths, world_size)[rank])
        trainer.compute_advantages(share)
        shares = trainer.forward_backward(share)
        try:
            metrics.append((shares, trainer.optimizer_step()))
        except TrainError as error:
            failures.append(str(error))
    weights = {name: tensor.clone() for bucket in trainer.export_buckets() for name, tensor in bucket.items()}
    torch.save({"metrics": metrics, "failures": failures, "weights": weights}, out_file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
