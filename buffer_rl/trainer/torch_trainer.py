"""The default trainer backend: one data-parallel rank that trains a Hugging Face causal language model with torch.

Each rank works on its own rows. If each has the whole model, ranks meet only in ``optimizer_step`` (one sum of the
gradients), which waits for all of them, at most ``train_timeout_s``. If the model is split over ranks
(``--fsdp-size``), they meet in every pass, and make equally many. A failure that only some ranks see must therefore end
the whole group; a gradient that is not finite is seen by all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from buffer_rl.args import Args
from buffer_rl.errors import TrainError
from buffer_rl.kinds.objective import Objective
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.kinds.trainer import Memory
from buffer_rl.plan.algorithm import frozen_models_of_trainer
from buffer_rl.plan.layout import layout_of
from buffer_rl.plan.roles import CRITIC, MODEL_OF_ROLE
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.collate import MicroBatch
from buffer_rl.trainer.forward import batch_outputs, passes, replayed, response_log_probs, response_values
from buffer_rl.trainer.lora import MergedChange, add_adapters, as_at_the_start, write_adapter
from buffer_rl.trainer.model import Model, ModelFactory, weight_buckets
from buffer_rl.trainer.optimizer import Optimizer
from buffer_rl.trainer.peers import most_of
from buffer_rl.trainer.pretrained import initial_folder, load_tokenizer, pick_device
from buffer_rl.trainer.rank_files import load_split_state, load_state, save_split_state, save_state
from buffer_rl.trainer.routing_replay import RoutingReplay
from buffer_rl.trainer.sharding import Sharding, reshard


class TorchTrainer:
    """Implements ``buffer_rl.kinds.trainer.Trainer``, for the policy and for a critic.

    Raises ConfigError if the model, the tokenizer or the device is not there, PluginError if a plugin of
    the trainer does not resolve, or model provider or converter do something wrong.
    """

    def __init__(self, args: Args, rank: int, world_size: int, objective: Objective) -> None:
        self._sharding = sharding = Sharding.of(args, world_size)
        self._splits = sharding is not None and sharding.splits
        self.topology = layout_of(world_size).topology(rank, in_step=self._splits, shares=True)
        self._args = args
        self._rank = rank
        self._written: Callable[[], bool] = lambda: True
        self._objective = objective
        registry = PluginRegistry.from_flags(args.plugin)
        self._device = pick_device(args.train_device)
        self._models = ModelFactory(args, registry, self._device, sharding)
        folder = initial_folder(args, CRITIC if objective.critic else "actor")
        self._model = self._models.build(*folder, frozen=bool(args.lora_rank))
        if objective.critic:
            self._model.add_value_head()
        self._start = add_adapters(self._model.module, args) if args.lora_rank else {}
        self._change = MergedChange()
        if args.recompute_granularity:
            self._model.recompute_layers()
        self._actor = self._model.module
        self._replay = None if objective.critic else RoutingReplay.of(args, self._actor)
        if sharding is not None:
            sharding.apply(self._actor)
        self._tokenizer = load_tokenizer(
            args.hf_checkpoint, "--hf-checkpoint", trust_remote_code=args.trust_remote_code
        )
        frozen = [] if objective.critic else frozen_models_of_trainer(args)
        if self._model.has_adapters and args.ref_load is None:
            frozen = [name for name in frozen if name != "ref"]  # it is the policy as it began
        self._frozen = {name: self._load_frozen(name) for name in frozen}
        # Adapters are whole on each rank, whatever their base is; FSDP2 sums what it has split.
        self._splits_trained = self._splits and not self._model.has_adapters
        self._optimizer = Optimizer(args, self._actor, 1 if self._splits_trained else world_size)
        # Threads that write must not meet in the group in which passes do.
        in_background = self._splits_trained and args.async_save
        self._saving = torch.distributed.new_group(backend="gloo") if in_background else None

    @property
    def replays_experts(self) -> bool:
        """Whether ``--replay-routed-experts`` is what is done here; not for a critic."""
        return self._replay is not None

    @property
    def trains_adapters(self) -> bool:
        """Whether ``--lora-rank`` is what is done here."""
        return self._model.has_adapters

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray]:
        """Log-probabilities of the response tokens under ``model``: "actor", "base", which is that without adapters, or
        "ref" or "teacher", which are loaded when they are first needed. Per row ``[response_length]`` float32, in nats,
        at the sampling temperature."""
        is_start = model == "ref" and self._args.ref_load is None and "ref" not in self._frozen
        if self._model.has_adapters and (is_start or model == "base"):
            with as_at_the_start(self._actor, self._start if is_start else {}):
                return self._outputs(self._actor, batch)
        return self._outputs(self._named(model).module, batch, self._replay if model == "actor" else None)

    def values(self, batch: TrainBatch) -> list[np.ndarray]:
        """A critic's values before each response token: per row ``[response_length]`` float32."""
        return self._outputs(self._actor, batch)

    def accumulate(self, batch: TrainBatch) -> Sums:
        """Forward and backward of the rows: adds the gradient of their summed loss to that of the step. Equal rows are
        grouped into the same micro-batches as in ``log_probs``, so the first ratio of new to old probability is
        exactly 1."""
        parts: list[Sums] = []
        own = self._args, self._actor, batch, self._device, self._objective
        for indices, micro in passes(*own, self._num_passes, self._replay):
            with replayed(self._replay, self._actor, micro) as differing:
                parts.append(self._accumulate(micro, batch.select(indices)))
            if differing is not None:
                parts.append(differing.sums())
        return Sums.of(parts)

    def _accumulate(self, micro: MicroBatch, rows: TrainBatch) -> Sums:
        """Forward and backward of a micro-batch."""
        if not len(rows):
            log_probs, entropy = response_log_probs(self._actor, micro, self._objective.temperature)
            nothing: torch.Tensor = log_probs.sum() + entropy.sum()
            nothing.backward()  # type: ignore[no-untyped-call]  # other ranks wait for this one
            self._optimizer.accumulate()
            return Sums()
        if self._objective.critic:
            loss, sums = self._objective(None, None, rows, response_values(self._actor, micro))
        else:
            outputs = response_log_probs(self._actor, micro, self._objective.temperature)
            loss, sums = self._objective(*outputs, rows)
        loss.backward()
        self._optimizer.accumulate()
        return sums

    def zero_grad(self) -> None:
        """Forget what ``accumulate`` summed since the last step."""
        self._optimizer.zero_grad()

    def optimizer_step(self, scale: float) -> dict[str, float]:
        """Sum the gradients over ranks, multiply them by ``scale``, clip, step, zero them. Metrics: ``grad_norm``,
        ``lr``.

        Raises NonFiniteError on every rank, with the parameters unchanged, if the gradient is not finite."""
        return self._optimizer.step(scale)

    def export(self) -> Iterator[dict[str, Any]]:
        """The actor's weights under Hugging Face names, on the device that they are on, tied weights once, in
        buckets of at most ``--update-weight-buffer-size`` bytes (a larger tensor has its own). Available on every rank.

        They are the weights themselves where no conversion is needed: read them before the next ``optimizer_step``."""
        yield from weight_buckets(self._model.weights(), self._args.update_weight_buffer_size, copy=False)

    def save_hf(self, path: str) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load. Only rank 0 writes."""
        if self._rank == 0 or self._splits:
            self._model.save_hf(self._tokenizer, path, writes=self._rank == 0)

    def write_adapter(self, path: str) -> None:
        """Write the adapters in peft's format. Only rank 0 writes: they are whole and equal on all."""
        if self._rank == 0:
            write_adapter(self._actor, Path(path))

    def unchanged_share(self) -> float:
        """Of merged adapters: see ``MergedChange``."""
        return self._change.share(self._actor, self._args.engine_dtype)

    def save(self, path: str) -> None:
        """Write this rank's part of a checkpoint into the folder ``path`` (see ``buffer_rl.trainer.rank_files``); under
        ``--async-save`` on a thread.

        Raises TrainError between ``accumulate`` and ``optimizer_step``: gradients are not saved."""
        if self._optimizer.has_gradients:
            raise TrainError("there are gradients of an unfinished step", hint="save after optimizer_step")
        own = path, self._actor, self._optimizer, self._model.state(), self._rank
        if self._splits_trained:
            self._written = save_split_state(*own, background=self._saving)
        else:
            self._written = save_state(*own, background=self._args.async_save)

    def is_saved(self) -> bool:
        """Whether what ``save`` began is written. Raises CheckpointError if it cannot be."""
        return self._written()

    def load(self, path: str) -> None:
        """The inverse of ``save``. Raises CheckpointError if something is missing, damaged or does not fit."""
        load = load_split_state if self._splits_trained else load_state
        load(path, self._actor, self._optimizer, self._model.state(), self._rank)

    def load_ref(self, path: str) -> None:
        """The reference model takes the weights in the Hugging Face folder ``path``."""
        self._frozen.pop("ref", None)  # so that there are never two of them
        self._frozen["ref"] = self._load_frozen("ref", path)

    def sleep(self, tags: Collection[Memory] = tuple(Memory)) -> None:
        """Move models and the optimizer's state to the host's memory; on a CPU they are there. Raises TrainError for
        the optimizer's part in an unfinished step."""
        if Memory.OPTIMIZER in tags:
            self._optimizer.sleep()
        self._move(tags, torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, tags: Collection[Memory] = tuple(Memory)) -> None:
        """The inverse of ``sleep``; the optimizer's state goes where the weights are."""
        self._move(tags, self._device)
        if Memory.OPTIMIZER in tags:
            self._optimizer.follow_parameters()

    def _outputs(
        self, module: PreTrainedModel, batch: TrainBatch, replay: RoutingReplay | None = None
    ) -> list[np.ndarray]:
        found = batch_outputs(self._args, module, batch, self._device, self._objective, self._num_passes, replay)
        reshard(module)
        return found

    def _move(self, tags: Collection[Memory], device: torch.device) -> None:
        if Memory.WEIGHTS in tags:
            self._model.move(device)
        for model in self._frozen.values() if Memory.FROZEN in tags else ():
            model.move(device)

    def _num_passes(self, own: int) -> int:
        """Of a call: as many as the rank that needs most, if passes wait for each other."""
        return most_of(own, self._device) if self.topology.in_step else own

    def _named(self, name: str) -> Model:
        if name == "actor":
            return self._model
        if name not in MODEL_OF_ROLE.values():
            expected = ", ".join(MODEL_OF_ROLE.values())
            raise TrainError(f"there is no model {name!r}", where="log_probs", expected=expected)
        if name not in self._frozen:
            self._frozen[name] = self._load_frozen(name)
        return self._frozen[name]

    def _load_frozen(self, name: str, path: str | None = None) -> Model:
        folder, flag = (path, f"load_{name}") if path else initial_folder(self._args, name)
        return self._models.build(folder, flag, frozen=True)
