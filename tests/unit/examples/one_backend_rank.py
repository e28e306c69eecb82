"""Run by test_trainer_backends.py as a process of its own: one rank of several trainer backends, one after another.

The job is a list of ``(reference, args, steps)``: the trainer backend, the options, and for each optimizer step its
deals, each a list of every replica's rows.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from buffer_rl.errors import CheckpointError, NonFiniteError
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.train.objective import Objective
from buffer_rl.train.rank import build_trainer
from buffer_rl.train.steps import summed_over_ranks


def train(
    reference: str, args: Any, steps: list[list[list[TrainBatch]]], rank: int, world_size: int, folder: Path
) -> dict[str, Any]:
    """The rank's account of each step; the weights at the end, of the run itself and of a trainer that resumed from
    what was saved before the last step; the folder for transformers; the error of a checkpoint that is not there."""
    registry = PluginRegistry()
    args = args.model_copy(update={"train_backend": reference})
    objective = Objective(args, registry)
    trainer, resumed = (build_trainer(args, registry, rank, world_size, objective) for _ in range(2))
    accounts = [take_step(trainer, objective, deals) for deals in steps[:-1]]
    trainer.save(str(folder))
    dist.barrier()
    resumed.load(str(folder))
    accounts.append(take_step(trainer, objective, steps[-1]))
    take_step(resumed, objective, steps[-1])
    trainer.save_hf(str(folder / "hf"))
    found = {"steps": accounts, "weights": weights_of(trainer), "resumed": weights_of(resumed), "hf": folder / "hf"}
    try:
        trainer.load(str(folder / "absent"))
    except CheckpointError as error:
        found["load_error"] = str(error)
    return found


def take_step(trainer: Any, objective: Objective, deals: list[list[TrainBatch]]) -> dict[str, Any]:
    """One optimizer step on the deals, with the log-probabilities of each under both models."""
    place, sums = trainer.topology, Sums()
    account: dict[str, Any] = {"actor": [], "ref": []}
    for deal in deals:
        rows = deal[place.dp_rank]
        for model in ("actor", "ref"):
            account[model].append(trainer.log_probs(model, rows))
        if len(rows):
            rows.columns["ref_log_probs"] = account["ref"][-1]
            objective.compute_advantages(rows)
        sums += trainer.accumulate(rows)
    (divisor,) = summed_over_ranks([sums.divisor if place.is_head else 0.0])
    try:
        return {**account, "loss": sums.loss, "divisor": divisor, **trainer.optimizer_step(1 / divisor)}
    except NonFiniteError as error:
        return {**account, "error": str(error)}


def weights_of(trainer: Any) -> dict[str, Any]:
    return {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}


def main(job_file: str, rank: int, world_size: int, out_file: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found = []
    for number, (reference, args, steps) in enumerate(pickle.loads(Path(job_file).read_bytes())):
        found.append(train(reference, args, steps, rank, world_size, Path(f"{job_file}_{world_size}_{number}")))
    Path(out_file).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
