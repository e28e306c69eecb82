"""Routing replay of mixture-of-experts models: a token goes to the experts that it had when the engine sampled.

Megatron's router passes its scores to an object, if it has one, which chooses the experts of each token; their weights
are then computed as for its own choice, and gradients flow through them. megatron-core's ``RouterReplay`` is such an
object, but keeps the routers of all models of a process in one list, and the indices of recomputed passes in a queue
that assumes their order. Here each model has a ``RoutingReplay``. It is told the micro-batch before each forward pass,
and before each backward pass, as recomputed layers route once more, after forward passes of other micro-batches.

A token without experts, such as padding and the last one of a row, goes where the router sends it.

Suffix legend: ``_t`` is ``[num_tokens]``, the tokens of this rank's routers in the order in which these have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from buffer_rl.errors import ConfigError, DataError
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.routing_replay import Differing
from buffer_rl_megatron.compat import current_device

if TYPE_CHECKING:
    from buffer_rl_megatron.forward import Micro
    from buffer_rl_megatron.options import MegatronArgs

COLUMN = "routed_experts"
NONE = -1
"""In place of a token's experts, where it has none."""


def places_of_experts(args: MegatronArgs, rows: TrainBatch, row_t: np.ndarray, step_t: np.ndarray) -> np.ndarray | None:
    """Of each token of this rank's routers the place of its experts in the column, whose rows are concatenated; int64,
    ``NONE`` for a token without experts. None if the rows have no such column.

    row_t, step_t: int64, of each token of all tensor ranks its row and its place there; padding may be in a row behind
    ``rows``. Under sequence parallelism a tensor rank has its part of these tokens, which it routes."""
    if COLUMN not in rows.columns or not len(rows):
        return None
    counts_b = np.array([*map(len, rows.columns[COLUMN]), 0])
    starts_b = np.cumsum(counts_b) - counts_b
    place_t = np.where(step_t < counts_b[row_t], starts_b[row_t] + step_t, NONE)
    if args.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        place_t = np.split(place_t, size)[parallel_state.get_tensor_model_parallel_rank()]
    return place_t


def without_experts(rows: TrainBatch) -> TrainBatch:
    """The rows without the column, which ``collate`` would copy to the device for all micro-batches at once."""
    return replace(rows, columns={name: column for name, column in rows.columns.items() if name != COLUMN})


class RoutingReplay:
    """Replays the column ``routed_experts`` of micro-batches in the routers of one model.

    Collective: all pipeline stages make it together. Raises ConfigError if the model has no router of experts, or one
    that chooses them in another way than by their scores."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Any) -> None:
        self._counts = torch.zeros(2)
        self._recomputes = config.recompute_granularity is not None
        self._choices: dict[torch.nn.Module, list[_Choice]] = {}
        for chunk in map(unwrap_model, chunks):
            layers = [layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
            self._choices[chunk] = [_Choice(layer.mlp.router, int(layer.layer_number)) for layer in layers]
        own = [choice.layer for choices in self._choices.values() for choice in choices]
        stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
        dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
        numbers = sorted(number for stage in stages for number in stage)
        if not numbers:
            raise ConfigError("the model has no experts", where="--replay-routed-experts", hint="leave it out")
        self._sizes = {"num_layers": len(numbers), "num_experts": config.num_moe_experts, "k": config.moe_router_topk}
        for choices in self._choices.values():
            for choice in choices:
                choice.layer = numbers.index(choice.layer)

    def begin(self, chunk: torch.nn.Module, micro: Micro, *, again: bool = False) -> None:
        """Have the routers of the chunk replay the experts of the micro-batch from now on; of one without the column
        none. again: before the backward pass, in which layers may be recomputed.

        Raises DataError for a row whose experts are not those of its tokens in this model."""
        choices = self._choices[unwrap_model(chunk)]
        if micro.routed is None or not choices or (again and not self._recomputes):
            replayed: Sequence[torch.Tensor | None] = [None] * len(choices)
        else:
            layers = [choice.layer for choice in choices]
            chosen = torch.from_numpy(experts_of(micro.rows, micro.routed, layers, **self._sizes))
            replayed = chosen.to(micro.is_padding.device).unbind(1)
        for choice, experts in zip(choices, replayed, strict=True):
            choice.experts, choice.counts = experts, None if again else self._counts

    def differing(self) -> Sums:
        """The metric of the passes since the replay was entered. Collective over the ranks of a replica."""
        for group in (parallel_state.get_context_parallel_group(), parallel_state.get_model_parallel_group()):
            dist.all_reduce(self._counts, group=group)
        return Differing(num_other=self._counts[0], num_given=self._counts[1]).sums()

    def __enter__(self) -> Self:
        self._counts = torch.zeros(2, dtype=torch.int64, device=current_device())
        return self

    def __exit__(self, *_: object) -> None:
        """All routers choose by themselves again."""
        for choices in self._choices.values():
            for choice in choices:
                choice.experts = None


def experts_of(
    rows: TrainBatch, place_t: np.ndarray, layers: Sequence[int], *, num_layers: int, num_experts: int, k: int
) -> np.ndarray:
    """Each token's experts in some of the layers that have experts, ``[num_tokens, len(layers), k]`` int16.

    place_t: see ``places_of_experts``. num_layers: of the model, with ``num_experts`` each, of which a token has ``k``.
    Raises DataError for a row whose experts are not those of its tokens in such a model."""
    parts = []
    for row_id, length, experts in zip(rows.row_ids, rows.lengths, rows.columns[COLUMN], strict=True):
        fits = len(experts) < length and experts.shape[1:] == (num_layers, k)
        if not fits or (experts.size and not 0 <= experts.min() <= experts.max() < num_experts):
            what = f"{COLUMN} has the shape {experts.shape}, and numbers up to {experts.max(initial=0)}"
            expected = f"at most {length - 1} tokens, {num_layers} layers with experts, in each {k} of {num_experts}"
            hint = "engine and trainer must have the same model"
            raise DataError(what, where=str(row_id), expected=expected, hint=hint)
        parts.append(experts[:, list(layers)].astype(np.int16))
    has = place_t != NONE
    found = np.full((len(place_t), len(layers), k), NONE, dtype=np.int16)
    found[has] = np.concatenate(parts)[place_t[has]]
    return found


class _Choice:
    """Chooses the experts in one router, whose attribute ``router_replay`` it becomes. experts: those that the tokens
    of the running pass must have, ``[num_tokens, k]`` int16; None where the router chooses. counts: what the tokens are
    added to, ``[2]`` int64: those that the router would have sent to others, and all with experts."""

    def __init__(self, router: torch.nn.Module, layer: int) -> None:
        if not isinstance(router, TopKRouter) or router.routing_type == "sinkhorn" or router.config.moe_router_fusion:
            what = f"the router {type(router).__name__} of layer {layer} does not ask for the experts of its tokens"
            expected = "megatron-core's TopKRouter without Sinkhorn routing and fused kernels"
            raise ConfigError(what, where="--replay-routed-experts", expected=expected)
        self.layer = layer
        self.experts: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None
        router.router_replay = self

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and the numbers of each token's experts, ``[num_tokens, topk]``; what Megatron calls.

        scores: ``[num_tokens, num_experts]``. default_compute_topk: what the router chooses."""
        assert default_compute_topk is not None
        if self.experts is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        assert self.experts.shape == (len(scores), topk), "the experts are those of another micro-batch"
        with torch.no_grad():
            _, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        replayed = torch.where(self.experts == NONE, chosen, self.experts.to(chosen.dtype))
        if self.counts is not None:
            is_other = (chosen[:, :, None] != replayed[:, None, :]).all(-1).any(-1)
            self.counts += torch.stack([is_other.sum(), (self.experts[:, 0] != NONE).sum()])
        return scores.gather(1, replayed), replayed
