"""``--train-backend megatron``: one rank of a model that Megatron splits by tensors, layers, experts and sequences.

Who waits for whom: in a forward or backward pass the ranks of a replica for each other, and all replicas where experts
are spread over them or parameters are gathered late (``topology.in_step``); in ``optimizer_step`` and ``export`` all
ranks. Megatron keeps its process groups in the process, so a process has one trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.models.gpt.gpt_model import GPTModel

from buffer_rl.errors import ConfigError, TrainError
from buffer_rl.kinds.objective import Objective
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.options.section import required
from buffer_rl.plan.algorithm import frozen_models_of_trainer
from buffer_rl.plan.roles import CRITIC, MODEL_OF_ROLE
from buffer_rl.plugin.calls import call, returned
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.plugin.signature import keywords_for
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.collate import require_vocabulary, split_rows
from buffer_rl.trainer.model import weight_buckets
from buffer_rl.trainer.pretrained import initial_folder, pick_device
from buffer_rl.trainer.rank_files import read_random, save_random
from buffer_rl_megatron import checkpoint, compat, options
from buffer_rl_megatron.attention import CausalAttention
from buffer_rl_megatron.bridge import Bridge, Provider, load_bridge, write_folder
from buffer_rl_megatron.forward import (
    AuxiliaryLossWeights,
    CountedTokens,
    Micro,
    gather_before_selecting,
    keep_gradients_of_recomputed_layers,
    micro_batches,
    padded,
    response_log_probs,
    run_schedule,
)
from buffer_rl_megatron.model_shape import read_configuration
from buffer_rl_megatron.optimizer import Optimizer, data_parallel
from buffer_rl_megatron.routing import RoutingReplay

if TYPE_CHECKING:
    from buffer_rl_megatron.options import MegatronArgs


class MegatronTrainer:
    """Implements ``buffer_rl.kinds.trainer.Trainer``, for the policy and for a critic.

    Raises ConfigError if the model, the tokenizer or the device is not there, or Megatron cannot split the model so."""

    def __init__(self, args: MegatronArgs, rank: int, world_size: int, objective: Objective) -> None:
        compat.install()
        self.topology = options.layout(args).topology(rank, in_step=options.is_in_step(args), shares=True)
        self._args, self._rank, self._objective = args, rank, objective
        self._device = _pick_device(args)
        registry = PluginRegistry.from_flags(args.plugin)
        self._provider = _provider(args, registry)
        self._hooks = {name: registry.load(path) for name in options.HOOKS if (path := getattr(args, name))}
        self._vocabularies: dict[str, tuple[int, str]] = {}
        self._trained = CRITIC if objective.critic else "actor"
        folder, _ = initial_folder(args, self._trained)
        _initialize(args, rank, world_size, self._device, folder)
        if hook := self._hooks.get("custom_megatron_init_path"):
            hook(args)
        self._bridge, chunks = self._built(self._trained, value_head=objective.critic)
        if args.recompute_granularity is not None:
            keep_gradients_of_recomputed_layers(chunks)
        replays = args.replay_routed_experts and not objective.critic
        self._replay = RoutingReplay(chunks, self._bridge.config) if replays else None
        self._chunks = data_parallel(args, self._bridge.config, chunks)
        self._optimizer = Optimizer(args, self._chunks)
        frozen = [] if objective.critic else frozen_models_of_trainer(args)
        self._frozen = {name: self._load_frozen(name) for name in frozen}
        self._place_in_rollout = (-1, 0)
        self._counted: CountedTokens | None = None
        self._written: Callable[[], bool] = lambda: True

    @property
    def replays_experts(self) -> bool:
        """Whether ``--replay-routed-experts`` is what is done here; not for a critic."""
        return self._replay is not None

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray] | None:
        """Log-probabilities of the response tokens under ``model``: "actor", "ref" or "teacher". Per row
        ``[response_length]`` float32, in nats, at the sampling temperature; None on ranks of other pipeline stages than
        the last. Raises TrainError for a token that the model does not know."""
        chunks = self._models(model)
        self._require_vocabulary(model, batch)
        if hook := self._hooks.get("custom_megatron_before_log_prob_hook_path"):
            hook(self._args, chunks, "" if model == "actor" else f"{model}_")

        def compute(micro: Micro, logits: torch.Tensor) -> torch.Tensor:
            return response_log_probs(micro, logits, self._objective.temperature, with_entropy=False)[0]

        return self._outputs(chunks, batch, compute)

    def values(self, batch: TrainBatch) -> list[np.ndarray] | None:
        """A critic's values before each response token: per row ``[response_length]`` float32. Raises TrainError for a
        token that it does not know."""
        self._require_vocabulary(self._trained, batch)
        return self._outputs(self._chunks, batch, lambda micro, values: padded(values.float().flatten(), micro))

    def accumulate(self, batch: TrainBatch) -> Sums:
        """Forward and backward of the rows: adds the gradient of their summed loss to that of the step. Equal rows are
        grouped into the same micro-batches as in ``log_probs``. Raises TrainError for a token that the model does not
        know."""
        self._require_vocabulary(self._trained, batch)
        if not self._optimizer.has_gradients:
            self._before_step(batch.rollout_id)

        def compute(micro: Micro, output: torch.Tensor) -> tuple[torch.Tensor, Sums]:
            if self._objective.critic:
                loss, sums = self._objective(None, None, micro.rows, padded(output.float().flatten(), micro))
            else:
                outputs = response_log_probs(micro, output, self._objective.temperature, with_entropy=True)
                loss, sums = self._objective(*outputs, micro.rows)
            if auxiliary is not None:
                auxiliary.record(micro, sums)
            return loss, sums

        micros, auxiliary = self._micros(batch), None
        with self._optimizer.accumulating():
            if not micros:
                return Sums()
            if options.has_auxiliary_loss(self._args):
                auxiliary = AuxiliaryLossWeights(micros, self._objective, self._counted)
            before = None if auxiliary is None else auxiliary.apply
            found = run_schedule(
                self._chunks, micros, compute, backward=True, before_backward=before, replay=self._replay
            )
        parts = [found[number] for number in sorted(found)]
        return Sums.of(parts if self._replay is None else [*parts, self._replay.differing()])

    def zero_grad(self) -> None:
        """Forget what ``accumulate`` summed since the last step."""
        self._optimizer.zero_grad()

    def optimizer_step(self, scale: float) -> dict[str, float]:
        """Sum the gradients over replicas, multiply them by ``scale``, clip, step, zero them. Metrics: ``grad_norm``,
        ``lr``.

        Raises NonFiniteError on every rank, with the parameters unchanged, if the gradient is not finite."""
        return self._optimizer.step(scale)

    def export(self) -> Iterator[dict[str, Any]]:
        """The weights under Hugging Face names, tied weights once, in buckets of at most
        ``--update-weight-buffer-size`` bytes; on every rank, one parameter gathered at a time."""
        weights = self._bridge.export(self._chunks)
        buckets = weight_buckets(weights, self._args.update_weight_buffer_size, copy=False)
        while True:
            with compat.cpu_devices():
                bucket = next(buckets, None)
            if bucket is None:
                return
            yield bucket

    def save_hf(self, path: str) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load. Every rank gathers, the head of
        replica 0 writes, a file at a time."""
        with compat.cpu_devices():
            model = required(self._args.hf_checkpoint, "hf_checkpoint")
            write_folder(self._bridge.export(self._chunks), model, path, writes=self.topology.is_source)

    def save(self, path: str) -> None:
        """Write weights, optimizer and random state into the folder ``path``, for any later layout (see
        ``buffer_rl_megatron.checkpoint``); under ``--async-save`` in processes of their own. Raises TrainError between
        ``accumulate`` and ``optimizer_step``."""
        if self._optimizer.has_gradients:
            raise TrainError("there are gradients of an unfinished step", hint="save after optimizer_step")
        save_random(Path(path), self._rank)
        what, step = (self._chunks, self._optimizer.megatron, path), self._optimizer.step_count
        with compat.cpu_devices():
            if self._args.async_save:
                self._written = checkpoint.start_save(*what, step=step)
            else:
                checkpoint.save(*what, step=step)

    def is_saved(self) -> bool:
        """Whether what ``save`` began is written; collective. Raises CheckpointError if it cannot be."""
        return self._written()

    def load(self, path: str) -> None:
        """The inverse of ``save``. A folder that Megatron-LM or slime saved to leaves the random state as it is.

        Raises CheckpointError if something is missing, damaged or does not fit."""
        has_random = any(Path(path).glob("random_*.json"))
        set_random = read_random(Path(path), self._rank) if has_random else None
        with compat.cpu_devices():
            step = checkpoint.load(self._chunks, self._optimizer.megatron, path)
        self._optimizer.zero_grad()
        self._optimizer.step_count = step
        if set_random is not None:
            set_random()

    def load_ref(self, path: str) -> None:
        """The reference model becomes the one in the Hugging Face folder ``path``, whose configuration may be another
        than that of the one before."""
        self._frozen.pop("ref", None)  # so that there are never two of them
        self._frozen["ref"] = self._load_frozen("ref", path)

    def sleep(self) -> None:
        """Free what training alone needs, for engines on the same device: gradients; on a GPU also weights and the
        optimizer's state, which go to host memory. Raises TrainError in an unfinished step."""
        self._optimizer.offload()
        if self._device.type == "cuda":
            for chunk in chain.from_iterable(self._frozen.values()):
                chunk.cpu()
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """The inverse of ``sleep``."""
        if self._device.type == "cuda":
            for chunk in chain.from_iterable(self._frozen.values()):
                chunk.to(self._device)
        self._optimizer.reload()

    def _micros(self, batch: TrainBatch) -> list[Micro]:
        return micro_batches(self._args, batch, self._objective.unit, self._device, in_step=self.topology.in_step)

    def _outputs(
        self, chunks: list[Any], batch: TrainBatch, compute: Callable[[Micro, torch.Tensor], torch.Tensor]
    ) -> list[np.ndarray] | None:
        micros = self._micros(batch)
        for chunk in chunks:
            chunk.eval()
        replay = self._replay if chunks is self._chunks else None
        found = run_schedule(chunks, micros, compute, backward=False, replay=replay) if micros else {}
        for chunk in self._chunks:
            chunk.train()
        if not parallel_state.is_pipeline_last_stage():
            return None
        rows: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(batch)
        for micro in micros:
            if micro.indices:
                split = split_rows(found[micro.number], micro.batch.response_lengths)
                for index, row in zip(micro.indices, split, strict=True):
                    rows[index] = row
        return rows

    def _require_vocabulary(self, name: str, batch: TrainBatch) -> None:
        """Each tensor rank would take the token for another one's: its log-probability would be 0."""
        if name in self._vocabularies:
            require_vocabulary(batch, *self._vocabularies[name])

    def _models(self, name: str) -> list[Any]:
        if name == "actor":
            return self._chunks
        if name not in MODEL_OF_ROLE.values():
            expected = ", ".join(MODEL_OF_ROLE.values())
            raise TrainError(f"there is no model {name!r}", where="log_probs", expected=expected)
        if name not in self._frozen:
            self._frozen[name] = self._load_frozen(name)
        return self._frozen[name]

    def _load_frozen(self, name: str, path: str | None = None) -> list[Any]:
        _, chunks = self._built(name, path)
        for chunk in chunks:
            chunk.requires_grad_(False)
        return chunks

    def _built(self, name: str, path: str | None = None, *, value_head: bool = False) -> tuple[Bridge, list[Any]]:
        """A model of this rank, filled from the folder ``path``; if it is not given, from the one that ``name`` starts
        with."""
        folder, flag = (path, f"load_{name}") if path else initial_folder(self._args, name)
        if folder is None:
            raise ConfigError("no model was named", where=flag, expected="a Hugging Face folder")
        with compat.cpu_devices():
            bridge = self.make_bridge(folder)
            chunks = bridge.build(value_head=value_head, provider=self._provider)
            bridge.load(chunks, folder)
        if size := read_configuration(folder).get("vocab_size"):
            self._vocabularies[name] = (size, folder)
        gather_before_selecting(chunks)
        return bridge, chunks

    def make_bridge(self, folder: str) -> Bridge:
        """What builds, fills and exports the models of a Hugging Face folder. A trainer of yours may return another
        with ``config``, ``build``, ``load`` and ``export`` (plugins/buffer_rl_megatron_glm4/README.md)."""
        args = self._args
        return load_bridge(
            folder,
            sequence_parallel=args.sequence_parallel,
            transformer_impl=args.transformer_impl,
            dtype=torch.bfloat16 if args.bf16 else torch.float32,
            overrides=_overrides(args),
            core_attention=CausalAttention,
            trust_remote_code=args.trust_remote_code,
        )

    def _before_step(self, rollout_id: int) -> None:
        rollout, step = self._place_in_rollout
        self._place_in_rollout = (rollout_id, step + 1 if rollout == rollout_id else 0)
        self._counted = CountedTokens() if self._args.moe_router_load_balancing_type == "global_aux_loss" else None
        reset_model_temporary_tensors(self._bridge.config, self._chunks)  # of a step that was not taken
        if hook := self._hooks.get("custom_megatron_before_train_step_hook_path"):
            hook(self._args, *self._place_in_rollout, self._chunks, self._optimizer.megatron, None)


def _provider(args: MegatronArgs, registry: PluginRegistry) -> Provider | None:
    """``--custom-model-provider-path``, called with the names that slime calls it with; ``args``, ``config`` and
    ``build`` are passed where it takes them."""
    kind, name = "model_provider", args.custom_model_provider_path
    if name is None:
        return None
    function = options.resolve_provider(name, registry)

    def provide(first: bool, last: bool, vp_stage: int | None, config: Any, build: Callable[[], Any]) -> Any:
        more = keywords_for(function, {"vp_stage": vp_stage, "args": args, "config": config, "build": build})
        model = call(kind, name, partial(function, pre_process=first, post_process=last, **more))
        if not isinstance(model, GPTModel):
            raise returned(kind, name, model, "a megatron.core.models.gpt.GPTModel, as build() makes it")
        return model

    return provide


def _overrides(args: MegatronArgs) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` that follow from the options."""
    given = {
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
        "recompute_modules": args.recompute_modules or None,
        "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        "moe_router_dtype": args.moe_router_dtype,
    }
    return {
        **{name: value for name, value in given.items() if value is not None},
        "calculate_per_token_loss": True,  # gradients are sums; the framework divides them
        "variable_seq_lengths": True,
        "hidden_dropout": 0.0,  # with dropout, a token's probability would differ between two passes
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        "moe_grouped_gemm": args.moe_grouped_gemm,
        "deallocate_pipeline_outputs": True,
        **({"moe_router_fusion": False} if args.replay_routed_experts else {}),  # the fused kernel replays nothing
    }


def _pick_device(args: MegatronArgs) -> torch.device:
    """Megatron computes on the CUDA device where there is one. Raises ConfigError."""
    device = pick_device(args.train_device)
    if device.type == "cpu" and torch.cuda.is_available():
        what = "Megatron computes on the GPU where torch sees one"
        raise ConfigError(what, where="--train-device", hint="for a CPU hide the GPUs: CUDA_VISIBLE_DEVICES=''")
    return device


def _initialize(args: MegatronArgs, rank: int, world_size: int, device: torch.device, folder: str | None) -> None:
    """Megatron's process groups and random state, and before them a process group of one rank if there is none."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=cast(Any, dist).HashStore(), rank=rank, world_size=world_size)
    layers = int(read_configuration(folder or "").get("num_hidden_layers", 0))
    with compat.cpu_devices():
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=options.virtual_stages(args, layers),
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=math.ceil(args.train_timeout_s / 60),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed, inference_rng_tracker=device.type == "cpu")
    place = {
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "tp": parallel_state.get_tensor_model_parallel_rank(),
    }
    assert place == options.layout(args).coordinates(rank), "rows are dealt by another order of ranks than Megatron's"
