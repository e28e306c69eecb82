"""Ranks of trainer backends in processes of their own; run as a program, one rank of several backends, one after
another.

The job is a list of ``(reference, args, steps)``: the trainer backend, the options, and for each optimizer step its
deals, each a list of every replica's rows; perhaps with the folder of a checkpoint to begin with.
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from buffer_rl.cluster.process import reserved_port
from buffer_rl.errors import CheckpointError, NonFiniteError
from buffer_rl.kinds.kind import implements
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.kinds.trainer import SavesLater, Sleeps
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.rank import build_trainer
from buffer_rl.trainer.sharding import whole
from buffer_rl.trainer.steps import summed_over_ranks
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.scripts import run_scripts

DEADLINE_S = 240


def run_ranks(world_size: int, job_file: Path) -> list[list[dict[str, Any]]]:
    """What each rank found for each item of the job."""
    outs = [job_file.with_name(f"out_{world_size}_{rank}") for rank in range(world_size)]
    scripts = [[__file__, str(job_file), str(rank), str(world_size), str(out)] for rank, out in enumerate(outs)]
    with reserved_port("127.0.0.1") as held:
        port = str(held.getsockname()[1])
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        run_scripts(scripts, variables, DEADLINE_S)
    return [pickle.loads(out.read_bytes()) for out in outs]


def groups_of(batch: TrainBatch, *numbers: int) -> TrainBatch:
    """The rows of the groups that are the ``numbers``-th of the batch."""
    uids = list(dict.fromkeys(row.uid for row in batch.row_ids))
    chosen = {uids[number] for number in numbers}
    return batch.select(index for index, row in enumerate(batch.row_ids) if row.uid in chosen)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def train(
    reference: str, args: Any, steps: list[Any], rank: int, world_size: int, folder: Path, start: str = ""
) -> dict[str, Any]:
    """The rank's account of each step, with the gradient that the torch trainer has; the weights at the end, of the run
    itself and of a trainer that resumed from what was saved before the last step; the folder for transformers; the
    error of a checkpoint that is not there."""
    registry = PluginRegistry()
    args = args.model_copy(update={"train_backend": reference})
    objective = Objective(args, registry)
    trainer, resumed = (build_trainer(args, registry, rank, world_size, objective) for _ in range(2))
    if start:
        trainer.load(start)
    accounts = [take_step(trainer, objective, deals) for deals in steps[:-1]]
    trainer.save(str(folder))
    deadline = time.monotonic() + DEADLINE_S
    while implements(trainer, SavesLater) and not trainer.is_saved():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dist.barrier()
    resumed.load(str(folder))
    if implements(trainer, Sleeps):
        trainer.sleep()
        trainer.wake_up()
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
    if isinstance(trainer.built, TorchTrainer):
        named = trainer._actor.named_parameters()
        account["gradient"] = {name: whole(p.grad) / divisor for name, p in named if p.grad is not None}
    try:
        return {**account, "loss": sums.loss, "divisor": divisor, **trainer.optimizer_step(1 / divisor)}
    except NonFiniteError as error:
        return {**account, "error": str(error)}


def weights_of(trainer: Any) -> dict[str, Any]:
    return {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}


def main(job_file: str, rank: int, world_size: int, out_file: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found = []
    for number, (reference, args, steps, *start) in enumerate(pickle.loads(Path(job_file).read_bytes())):
        folder = Path(f"{job_file}_{world_size}_{number}")
        found.append(train(reference, args, steps, rank, world_size, folder, *start))
    Path(out_file).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
