"""A trainer backend with tensor parallelism: one replica whose MLPs are split over all ranks.

Every rank gets the same rows, computes attention, norms and embedding of them in full, and a slice of each MLP: rows of
``gate_proj`` and ``up_proj``, the same columns of ``down_proj``. Between them two functions meet the other ranks, f and
g of Megatron-LM (arXiv 1909.08053, section 3). All that f and g return is equal on every rank, so the gradients of the
weights that no rank splits are equal too, and need no reduction.

It works for causal language models whose MLPs are three linear layers of these names without biases: Llama, Qwen2,
Qwen3, Mistral. Model providers and converters are not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from buffer_rl.errors import CheckpointError, ConfigError, NonFiniteError
from buffer_rl.kinds.objective import Objective
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.plan.algorithm import frozen_models_of_trainer
from buffer_rl.plan.layout import layout_of
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.collate import collate, row_blocks
from buffer_rl.trainer.forward import batch_outputs, response_log_probs
from buffer_rl.trainer.model import unique_state, weight_buckets
from buffer_rl.trainer.optimizer import learning_rate
from buffer_rl.trainer.packing import is_packed
from buffer_rl.trainer.pretrained import initial_folder, load_model, load_tokenizer, pick_device

SPLIT = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
"""Dimension of the ``[out, in]`` matrix that is split over ranks, by the end of its name."""


class SumOfGradients(torch.autograd.Function):
    """f: the identity; its backward pass sums the gradient, of which each rank has the part of its slice."""

    @staticmethod
    def forward(_ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return summed(gradients[0])


class SumOfSlices(torch.autograd.Function):
    """g: the sum of what each rank's slice gives; its backward pass is the identity."""

    @staticmethod
    def forward(_ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return summed(hidden)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in a tensor of its own."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def split_mlps(model: torch.nn.Module, rank: int, world_size: int) -> None:
    """Leave of each MLP the slice of this rank, between f and g. Raises ConfigError for a model without such MLPs."""
    mlps = [module for module in model.modules() if isinstance(getattr(module, "down_proj", None), torch.nn.Linear)]
    if not mlps or any(layer.bias is not None for mlp in mlps for layer in mlp.children() if hasattr(layer, "bias")):
        raise ConfigError(f"{type(model).__name__} has no MLPs of three linear layers", where="--hf-checkpoint")
    for mlp in mlps:
        for name, weight in list(mlp.named_parameters()):
            if weight.shape[SPLIT[name]] % world_size:
                raise ConfigError(f"{name} {list(weight.shape)} cannot be split", where="--num-train-ranks")
            own = weight.detach().chunk(world_size, SPLIT[name])[rank].clone()
            mlp.get_submodule(name.removesuffix(".weight")).weight = torch.nn.Parameter(own)
        mlp.register_forward_pre_hook(lambda _module, inputs: (SumOfGradients.apply(inputs[0]),))
        mlp.register_forward_hook(lambda _module, _inputs, output: SumOfSlices.apply(output))


def split_dimension(name: str) -> int | None:
    """The dimension that the weight of this name is split along; None for one that every rank has in full."""
    return next((dimension for end, dimension in SPLIT.items() if name.endswith(end)), None)


class TensorParallelTrainer:
    """Implements ``buffer_rl.kinds.trainer.Trainer``; the ranks have joined the default process group."""

    def __init__(self, args: Any, rank: int, world_size: int, objective: Objective) -> None:
        self.topology = layout_of(world_size, tp_size=world_size).topology(rank)
        self._args, self._rank, self._world_size, self._objective = args, rank, world_size, objective
        self._device = pick_device(args.train_device)
        self._tokenizer = load_tokenizer(args.hf_checkpoint, "--hf-checkpoint")
        self._models = {"actor": self._load("actor")}
        for name in frozen_models_of_trainer(args):
            self._models[name] = self._load(name).requires_grad_(False)
        self._actor = self._models["actor"]
        self._named = dict(self._actor.named_parameters())
        matrices = [weight for weight in self._named.values() if weight.ndim > 1]
        vectors = [weight for weight in self._named.values() if weight.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
        )
        self._step = 0

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray]:
        """Equal on every rank, and needed there: each calls the objective."""
        return batch_outputs(self._args, self._models[model], batch, self._device, self._objective)

    def accumulate(self, batch: TrainBatch) -> Sums:
        """As on one rank: what is parallel is inside the model."""
        parts = []
        packed = is_packed(self._actor)
        for indices in row_blocks(self._args, batch, self._objective.unit, packed=packed):
            rows = batch.select(indices)
            micro = collate(rows, self._device, packed=packed)
            log_probs, entropy = response_log_probs(self._actor, micro, self._objective.temperature)
            loss, sums = self._objective(log_probs, entropy, rows)
            loss.backward()
            parts.append(sums)
        return Sums.of(parts)

    def optimizer_step(self, scale: float) -> dict[str, float]:
        """There is one replica, so the gradients are those of the step already."""
        for weight in self._named.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad * scale
        norm = self._gradient_norm()
        if not torch.isfinite(norm):
            self.zero_grad()
            raise NonFiniteError(f"the gradient norm is {float(norm)}", where=f"optimizer step {self._step}")
        if self._args.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._args.clip_grad, norm)
        lr = learning_rate(self._args, self._step)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.zero_grad()
        self._step += 1
        return {"grad_norm": float(norm), "lr": lr}

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def export(self) -> Iterator[dict[str, Any]]:
        """Every rank gathers each split weight; the names are those of the Hugging Face folder already."""
        state = unique_state(self._actor)
        yield from weight_buckets(((name, self._gathered(name, tensor)) for name, tensor in state.items()), copy=False)

    def save_hf(self, path: str) -> None:
        """Every rank gathers, rank 0 writes."""
        weights = {name: tensor for bucket in self.export() for name, tensor in bucket.items()}
        if self._rank == 0:
            self._actor.save_pretrained(path, state_dict=weights)
            self._tokenizer.save_pretrained(path)

    def save(self, path: str) -> None:
        """Each rank's slices, in a file of its own."""
        Path(path).mkdir(parents=True, exist_ok=True)
        state = {"weights": self._actor.state_dict(), "adam": self._adam.state_dict(), "step": self._step}
        torch.save({**state, "world_size": self._world_size, "random": torch.get_rng_state()}, self._file(path))

    def load(self, path: str) -> None:
        try:
            state = torch.load(self._file(path), weights_only=True)
            if state["world_size"] != self._world_size:
                raise ValueError(f"it was saved by {state['world_size']} ranks, not {self._world_size}")
            self._actor.load_state_dict(state["weights"])
            self._adam.load_state_dict(state["adam"])
            torch.set_rng_state(state["random"])
            self._step = state["step"]
        except Exception as error:  # a damaged file fails in many ways
            raise CheckpointError(f"it does not load: {error}", where=str(self._file(path))) from error

    def _load(self, model_name: str) -> Any:
        folder, flag = initial_folder(self._args, model_name)
        model = load_model(folder, self._device, flag)
        split_mlps(model, self._rank, self._world_size)
        return model

    def _gradient_norm(self) -> torch.Tensor:
        """Over the whole model, the same number on every rank; of weights that all ranks have, rank 0 adds them."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, weight in self._named.items():
            if weight.grad is not None and (self._rank == 0 or split_dimension(name) is not None):
                squares += weight.grad.double().square().sum()
        return summed(squares).sqrt()

    def _gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dimension = split_dimension(name)
        if dimension is None:
            return tensor
        slices = [torch.empty_like(tensor) for _ in range(self._world_size)]
        dist.all_gather(slices, tensor.contiguous())
        return torch.cat(slices, dimension)

    def _file(self, path: str) -> Path:
        return Path(path) / f"tensor_parallel_{self._rank}.pt"
