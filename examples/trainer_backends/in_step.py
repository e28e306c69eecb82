"""A trainer backend whose replicas work in step: the shape of FSDP2 and of expert parallelism, without their sharding.

Every forward and backward pass has a collective over replicas; here it compares their numbers of passes. So all
replicas make equally many: at the start of each call they agree on the largest number of micro-batches, and a replica
with fewer, perhaps none, makes up for it with passes that contribute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from buffer_rl.errors import TrainError
from buffer_rl.kinds.objective import Objective
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.plan.algorithm import frozen_models_of_trainer
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Topology, TrainBatch
from buffer_rl.trainer.collate import collate, row_blocks, split_rows
from buffer_rl.trainer.forward import response_log_probs
from buffer_rl.trainer.model import Model, ModelFactory, weight_buckets
from buffer_rl.trainer.optimizer import Optimizer
from buffer_rl.trainer.peers import most_of
from buffer_rl.trainer.pretrained import initial_folder, load_tokenizer, pick_device
from buffer_rl.trainer.rank_files import load_state, save_state


class InStepTrainer:
    """Implements ``buffer_rl.kinds.trainer.Trainer``; the ranks have joined the default process group."""

    def __init__(self, args: Any, rank: int, world_size: int, objective: Objective) -> None:
        self.topology = Topology(dp_rank=rank, dp_size=world_size, in_step=True)
        self._args, self._rank, self._world_size, self._objective = args, rank, world_size, objective
        self._device = pick_device(args.train_device)
        self._num_passes = 0
        self._factory = ModelFactory(args, PluginRegistry.from_flags(args.plugin), self._device)
        self._model = self._load("actor")
        self._actor = self._model.module
        self._models = {"actor": self._actor}
        for name in frozen_models_of_trainer(args):
            self._models[name] = self._load(name, frozen=True).module
        self._tokenizer = load_tokenizer(args.hf_checkpoint, "--hf-checkpoint")
        self._optimizer = Optimizer(args, self._actor, world_size)

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        with torch.no_grad():
            for indices in self._passes(batch):
                if indices is None:
                    self._empty_pass(model)
                    continue
                micro = collate(batch.select(indices), self._device)
                log_probs, _ = response_log_probs(
                    self._models[model], micro, self._objective.temperature, with_entropy=False
                )
                found.update(zip(indices, split_rows(log_probs, micro.response_lengths), strict=True))
        return [found[index] for index in range(len(batch))]

    def accumulate(self, batch: TrainBatch) -> Sums:
        parts = []
        for indices in self._passes(batch):
            if indices is None:
                loss = 0.0 * self._empty_pass("actor")
            else:
                rows = batch.select(indices)
                micro = collate(rows, self._device)
                log_probs, entropy = response_log_probs(self._actor, micro, self._objective.temperature)
                loss, sums = self._objective(log_probs, entropy, rows)
                parts.append(sums)
            loss.backward()
            self._optimizer.accumulate()
        return Sums.of(parts)

    def optimizer_step(self, scale: float) -> dict[str, float]:
        return self._optimizer.step(scale)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def export(self) -> Iterator[dict[str, Any]]:
        yield from weight_buckets(self._model.weights(), copy=False)

    def save_hf(self, path: str) -> None:
        if self._rank == 0:
            self._model.save_hf(self._tokenizer, path)

    def save(self, path: str) -> None:
        save_state(path, self._actor, self._optimizer, self._model.state(), self._rank)

    def load(self, path: str) -> None:
        load_state(path, self._actor, self._optimizer, self._model.state(), self._rank)

    def _load(self, model_name: str, *, frozen: bool = False) -> Model:
        model = self._factory.build(*initial_folder(self._args, model_name), frozen=frozen)
        model.module.register_forward_pre_hook(lambda _module, _inputs: self._compare_passes())
        model.module.register_forward_hook(self._compare_in_backward)
        return model

    def _passes(self, batch: TrainBatch) -> list[list[int] | None]:
        """Rows of each micro-batch, then None for each that only other replicas have."""
        own = row_blocks(self._args, batch, self._objective.unit)
        return [*own, *[None] * (most_of(len(own), self._device) - len(own))]

    def _empty_pass(self, model: str) -> torch.Tensor:
        tokens = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        return self._models[model](input_ids=tokens, use_cache=False).logits.sum()

    def _compare_in_backward(self, _module: Any, _inputs: Any, output: Any) -> None:
        if output.logits.requires_grad:
            output.logits.register_hook(lambda _gradient: self._compare_passes())

    def _compare_passes(self) -> None:
        """Raises TrainError if the replicas have not made equally many passes."""
        self._num_passes += 1
        extremes = torch.tensor([self._num_passes, -self._num_passes], device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if extremes.sum():
            raise TrainError(f"{self._num_passes} passes, others {extremes.tolist()}", where=f"replica {self._rank}")
