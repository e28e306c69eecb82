"""Optimizer steps of a Megatron trainer on the ranks of ``harness.megatron_ranks``, and what they found together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from buffer_rl.records.groups import TrainBatch
from harness.megatron_ranks import RankPool


@dataclass(kw_only=True)
class Case:
    """Options of a run, and the rows of each of its optimizer steps. parts: calls of ``accumulate`` that each step is
    made of. critic: train a value model. scale: a factor of the gradient, 1 where it is right. sleeps: the trainer
    sleeps and wakes up between the steps. abandoned: rows of a step before the first one, which is not taken. load,
    save: folders of checkpoints before the first and after the last step. last: rows whose outputs after the last step
    are asked for, in place of those of the first batch before the first one. model: whose they are. reference: a folder
    that the reference is loaded from at the start. trainer: reference of the class."""

    args: Any
    batches: Sequence[TrainBatch]
    parts: int = 1
    critic: bool = False
    scale: float = 1.0
    sleeps: bool = False
    abandoned: TrainBatch | None = None
    load: str | None = None
    save: str | None = None
    last: TrainBatch | None = None
    model: str = "actor"
    reference: str | None = None
    trainer: str = "buffer_rl_megatron.trainer:MegatronTrainer"


@dataclass(kw_only=True)
class Found:
    """What was found: log-probabilities (or values) of the first batch by row id before the first step, each step's
    metrics, and the weights afterwards under Hugging Face names."""

    outputs: dict[Any, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


def run_case(ranks: RankPool, case: Case, timeout_s: float = 120.0) -> Found:
    """Run the case on ``args.num_train_ranks`` ranks."""
    from buffer_rl.kinds.token_loss import Sums

    world_size = case.args.num_train_ranks
    parts = ranks.run(world_size, steps_of_rank, case, timeout_s=timeout_s)
    found = Found()
    for part in parts:
        found.outputs |= part["outputs"]
        found.weights |= part["weights"]
    for steps in zip(*(part["steps"] for part in parts), strict=True):
        means = reduce(Sums.__add__, (sums for sums, _ in steps)).means()
        assert len({metrics["grad_norm"] for _, metrics in steps}) == 1, "the gradient norm differs between ranks"
        found.steps.append(means | steps[0][1])
    return found


def steps_of_rank(case: Case) -> dict[str, Any]:
    """The case on this rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from buffer_rl.buffer.readers import balanced_partition
    from buffer_rl.kinds.token_loss import Sums
    from buffer_rl.plugin.registry import PluginRegistry
    from buffer_rl.trainer.objective import Objective
    from buffer_rl.trainer.peers import summed_over_ranks
    from buffer_rl.trainer.pretrained import prepare_torch

    args = case.args
    prepare_torch(args, args.seed)
    registry = PluginRegistry.from_flags(args.plugin)
    objective = Objective(args, registry, "critic" if case.critic else "actor")
    try:
        trainer = registry.load(case.trainer)(args, dist.get_rank(), dist.get_world_size(), objective)
        place = trainer.topology

        def outputs_of(batch: TrainBatch) -> dict[Any, Any]:
            rows = trainer.values(batch) if case.critic else trainer.log_probs(case.model, batch)
            return dict(zip(batch.row_ids, rows or [], strict=True)) if place.is_head else {}

        def share(whole: TrainBatch) -> TrainBatch:
            return whole.select(balanced_partition(whole.lengths, place.dp_size)[place.dp_rank])

        if case.load is not None:
            trainer.load(case.load)
        if case.reference is not None:
            trainer.load_ref(case.reference)
        if case.abandoned is not None:
            batch = share(case.abandoned)
            objective.compute_advantages(batch)
            trainer.accumulate(batch)
            trainer.zero_grad()
        outputs: dict[Any, Any] = {}
        steps = []
        for number, whole in enumerate(case.batches):
            batch = share(whole)
            objective.compute_advantages(batch)
            if number == 0:
                outputs = outputs_of(batch)
            elif case.sleeps:
                trainer.sleep()
                gradients = [buffer.grad_data.untyped_storage() for buffer in trainer._optimizer._buffers()]
                assert sum(storage.nbytes() for storage in gradients) == 0
                trainer.wake_up()
                assert all(storage.nbytes() for storage in gradients)
            bounds = [len(batch) * part // case.parts for part in range(case.parts + 1)]
            sums = sum((trainer.accumulate(batch.select(range(*part))) for part in pairwise(bounds)), Sums())
            own = sums if place.is_head else Sums()
            (divisor,) = summed_over_ranks([own.divisor])
            steps.append((own, trainer.optimizer_step(case.scale / divisor)))
        if case.save is not None:
            trainer.save(case.save)
        if case.last is not None:
            outputs = outputs_of(share(case.last))
        weights = {name: tensor.float().clone() for bucket in trainer.export() for name, tensor in bucket.items()}
        return {"outputs": outputs, "steps": steps, "weights": weights if place.is_source else {}}
    finally:
        parallel_state.destroy_model_parallel()


def differences(found: Found, expected: Found) -> dict[str, float]:
    """The largest difference of each kind; of losses, entropies and gradient norms relative ones."""
    assert found.weights.keys() == expected.weights.keys()
    assert found.outputs.keys() == expected.outputs.keys()

    def relative(name: str) -> float:
        return max(
            abs(mine.get(name, 0.0) - theirs.get(name, 0.0)) / max(1e-3, abs(theirs.get(name, 0.0)))
            for mine, theirs in zip(found.steps, expected.steps, strict=True)
        )

    sizes = {name: relative(name) for name in ("loss", "log_probs", "entropy", "grad_norm")}
    sizes["outputs"] = max(
        float(np.abs(rows - expected.outputs[row]).max(initial=0)) for row, rows in found.outputs.items()
    )
    sizes["weights"] = max(float((found.weights[name] - expected.weights[name]).abs().max()) for name in found.weights)
    return sizes


LIMITS = {"outputs": 1e-5, "loss": 5e-6, "log_probs": 5e-6, "entropy": 5e-6, "grad_norm": 5e-6, "weights": 1e-5}
"""Of float32, for values of up to twenty and gradients of up to ten."""


def beyond(found: Found, expected: Found) -> dict[str, float]:
    """The differences that are beyond ``LIMITS``."""
    return {kind: size for kind, size in differences(found, expected).items() if size > LIMITS[kind]}
