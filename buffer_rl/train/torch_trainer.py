"""The default trainer backend: one data-parallel rank that trains a Hugging Face causal language model with torch.

Every rank holds the whole model and works on its own rows; ranks meet only in ``optimizer_step`` (one sum of the
gradients), which waits for all of them, at most ``train_timeout_s``. A failure that only some ranks see must therefore
end the whole group; a gradient that is not finite is seen by all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from buffer_rl.contracts import LossInputs
from buffer_rl.errors import ConfigError, TrainError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.scope import Scope
from buffer_rl.train.collate import collate, loss_inputs, row_blocks
from buffer_rl.train.forward import batch_log_probs, response_log_probs
from buffer_rl.train.model import ModelFactory, load_tokenizer, pick_device, unique_state, weight_buckets
from buffer_rl.train.objective import Objective, UnscaledShares
from buffer_rl.train.optimizer import Optimizer
from buffer_rl.train.state import load_state, save_state
from buffer_rl.types import TrainBatch


class TorchTrainer:
    """Implements ``buffer_rl.contracts.Trainer``.

    ``forward_backward`` may be called several times, with parts of a step's rows, before one ``optimizer_step``.
    ``log_probs`` and ``forward_backward`` group equal rows into equal micro-batches, so the first ratio of new to
    old probability is exactly 1.

    Raises ConfigError if the model, the tokenizer or the device is not there, PluginError if a plugin of
    the trainer does not resolve, or model provider or converter do something wrong.
    """

    def __init__(self, args: Any, rank: int, world_size: int) -> None:
        self._args = args
        self._rank = rank
        self._world_size = world_size
        registry = PluginRegistry.from_flags(args.plugin)
        self._objective = Objective(args, registry)
        self._temperature = loss_temperature(args, supervised=self._objective.supervised)

        self._device = pick_device(args.train_device)
        _prepare_torch(args, rank, self._device)
        self._models = ModelFactory(args, registry, self._device)
        self._actor = self._models.build(args.hf_checkpoint, "--hf-checkpoint")
        self._tokenizer = load_tokenizer(
            args.hf_checkpoint, "--hf-checkpoint", trust_remote_code=args.trust_remote_code
        )
        self._ref: PreTrainedModel | None = None
        if args.use_kl_loss and not args.num_ref_workers:
            self._ref = self._load_ref()
        self._optimizer = Optimizer(args, self._actor, world_size)
        self._unscaled = UnscaledShares(
            args.loss_agg_mode, "--stream-gradients" if args.stream_gradients else "--deterministic"
        )
        self._asleep = False
        if world_size > 1:
            _join_process_group(args, rank, world_size, self._device)

    def log_probs(self, role: str, batch: TrainBatch) -> list[np.ndarray]:
        """Log-probabilities of the response tokens under ``role``: "actor", or "ref", whose model is loaded when it
        is first needed. Per row ``[response_length]`` float32, in nats, at the sampling temperature."""
        self._require_awake()
        return batch_log_probs(self._args, self._model(role), batch, self._device, self._temperature)

    def compute_advantages(self, batch: TrainBatch) -> None:
        """Set the columns ``advantages`` and ``returns`` of ``batch`` by the chosen estimator; policy losses need
        them. Call it on a rank's rows before ``forward_backward``. The supervised loss has none: nothing is done.

        Raises PluginError if the estimator raises, or does not set both columns."""
        if not self._objective.supervised:
            self._objective.compute_advantages(batch)

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """Accumulate the gradient of the loss shares of ``batch``; metrics are shares that add up over calls and
        ranks. A batch without rows contributes nothing.

        Under ``--deterministic`` a loss of scope ``group`` or ``row`` takes the way of ``accumulate``, so that its
        gradient has the same bits, whenever its parts were computed and by how many ranks."""
        if self._args.deterministic and self._objective.scope is not Scope.ROLLOUT:
            self.accumulate(batch)
            return self.finish_accumulation(batch.total_samples, batch.total_tokens)
        self._require_awake()
        sums: dict[str, torch.Tensor] = {}
        for inputs in self._loss_inputs(batch):
            outputs = self._objective.loss(inputs)
            outputs.loss.backward()
            self._optimizer.check_loss(outputs.loss)
            self._optimizer.accumulate()
            for name, value in outputs.metrics.items():
                share = torch.as_tensor(value, device=self._device).detach()
                sums[name] = sums[name] + share if name in sums else share
        return {name: float(value) for name, value in sums.items()}

    def accumulate(self, batch: TrainBatch) -> None:
        """``forward_backward`` for rows of a step whose totals are not known yet; ``finish_accumulation`` divides by
        them. Raises ConfigError if the loss cannot be scaled afterwards."""
        self._require_awake()
        for inputs in self._loss_inputs(batch):
            loss = self._unscaled.unscaled_loss(self._objective.loss, inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.check_loss(loss)
            self._optimizer.accumulate()

    def finish_accumulation(self, total_samples: int, total_tokens: int) -> dict[str, float]:
        """Have the next step divide what ``accumulate`` summed by the totals of the whole step. Returns the metrics'
        shares, as ``forward_backward`` does."""
        self._optimizer.divisor = self._unscaled.divisor(total_samples, total_tokens)
        return self._unscaled.pop_metrics(total_samples, total_tokens)

    def zero_grad(self) -> None:
        """Forget what ``accumulate`` and ``forward_backward`` summed since the last step."""
        self._optimizer.zero_grad()
        self._unscaled.clear()

    def optimizer_step(self) -> dict[str, float]:
        """Sum the gradients over ranks, clip, step, zero them. Metrics: ``grad_norm``, ``lr``.

        Raises NonFiniteError on every rank, with the parameters unchanged, if a loss or the gradient is not finite."""
        self._require_awake()
        return self._optimizer.step()

    def export_buckets(self) -> Iterator[dict[str, Any]]:
        """The actor's weights under Hugging Face names, on the device that they are on, tied weights once, in
        buckets of at most 256 MB (a larger tensor has its own). Available on every rank, and asleep too.

        They are the weights themselves where no conversion is needed: read them before the next ``optimizer_step``."""
        yield from weight_buckets(self._models.export(self._actor), copy=False)

    def save_hf(self, path: str) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load. Only rank 0 writes."""
        if self._rank == 0:
            self._models.save_hf(self._actor, self._tokenizer, path)

    def save(self, path: str) -> None:
        """Write this rank's part of a checkpoint into the folder ``path`` (see ``buffer_rl.train.state``).

        Raises TrainError between ``forward_backward`` and ``optimizer_step``: gradients are not saved."""
        if self._optimizer.has_gradients:
            raise TrainError("there are gradients of an unfinished step", hint="save after optimizer_step")
        save_state(path, self._actor, self._optimizer, unique_state(self._actor), self._rank)

    def load(self, path: str) -> None:
        """The inverse of ``save``. Raises CheckpointError if something is missing, damaged or does not fit."""
        load_state(path, self._actor, self._optimizer, unique_state(self._actor), self._rank)

    def sleep(self) -> None:
        """Move models, gradients and optimizer state to the CPU and give the CUDA memory back.

        On the CPU there is nothing to give back and nothing moves. Until ``wake_up`` nothing can be computed."""
        self._asleep = True
        if self._device.type == "cuda":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """The inverse of ``sleep``."""
        if self._device.type == "cuda":
            self._move(self._device)
        self._asleep = False

    def _loss_inputs(self, batch: TrainBatch) -> Iterator[LossInputs]:
        """Each micro-batch after its forward pass."""
        for indices in row_blocks(self._args, batch):
            rows = batch.select(indices)
            micro = collate(rows, self._device)
            log_probs_bt, entropy_bt = response_log_probs(
                self._actor, micro, self._temperature, entropy_gradient=self._objective.entropy_gradient
            )
            yield loss_inputs(rows, micro, log_probs_bt, entropy_bt)

    def _model(self, role: str) -> PreTrainedModel:
        if role == "actor":
            return self._actor
        if role == "ref":
            if self._ref is None:
                self._ref = self._load_ref()
            return self._ref
        raise TrainError(f"there is no role {role!r}", where="log_probs", expected="actor or ref")

    def _load_ref(self) -> PreTrainedModel:
        flag = "--ref-load" if self._args.ref_load else "--hf-checkpoint"
        model = self._models.build(self._args.ref_load or self._args.hf_checkpoint, flag)
        return model.requires_grad_(False)

    def _move(self, device: torch.device) -> None:
        _move_module(self._actor, device)
        if self._ref is not None:
            _move_module(self._ref, device)
        self._optimizer.move_state(device)

    def _require_awake(self) -> None:
        if self._asleep:
            raise TrainError("the trainer sleeps", where=f"rank {self._rank}", hint="call wake_up first")


def _move_module(module: torch.nn.Module, device: torch.device) -> None:
    module.to(device)  # in place: the parameters stay the objects that the optimizer knows


def loss_temperature(args: Any, *, supervised: bool = False) -> float:
    """The divisor of logits: the sampling temperature, so that ratios compare equal distributions. Greedy
    sampling (0) has no such distribution, and supervised tokens were not sampled: both use 1."""
    if supervised or args.rollout_temperature <= 0:
        return 1.0
    return float(args.rollout_temperature)


def _prepare_torch(args: Any, rank: int, device: torch.device) -> None:
    torch.set_num_threads(args.num_train_threads)
    random.seed(args.seed + rank)
    np.random.seed((args.seed + rank) % 2**32)
    torch.manual_seed(args.seed + rank)
    # The run has a display of its own, and what this process prints goes into a log file.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if args.deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        torch.use_deterministic_algorithms(True)


def _join_process_group(args: Any, rank: int, world_size: int, device: torch.device) -> None:
    if dist.is_initialized():
        return
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ConfigError(
            f"{' and '.join(absent)} not set",
            where=f"trainer rank {rank} of {world_size}",
            expected="the address of rank 0 in the environment, or an initialised torch.distributed",
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=args.train_timeout_s)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
