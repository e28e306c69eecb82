"""Micro-batches through the model of one replica, which is spread over pipeline stages and tensor ranks.

Every rank of the replica runs the same micro-batches through Megatron's schedule, a context-parallel rank with its
tokens of each row; the ranks of the last stage get what comes out for all response tokens. Replicas whose forward
passes have collectives in common, and virtual pipeline stages, need certain numbers of micro-batches: a pass without
rows, which contributes nothing, makes up for each that is not there.

The gradient is counted once: each context-parallel rank computes the loss of all response tokens, and differentiates
it by the outputs of its own tokens alone. The gradient of a rank's keys and values is summed over the ranks in the
backward pass of attention, and that of parameters over replicas and context-parallel ranks by Megatron's
``DistributedDataParallel``, which divides it by nothing (``calculate_per_token_loss``).

Suffix legend: ``_n`` is ``[num_response_tokens]``; ``_o`` is ``[num_outputs]``, the response tokens that this rank has
an output for: all without context parallelism; ``_bt`` is ``[num_rows, max_response]``; ``_sbh`` is
``[length, num_rows, hidden]``, of this rank's tokens, with packed rows as one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model

from buffer_rl.errors import TrainError
from buffer_rl.kinds.marks import Unit
from buffer_rl.kinds.objective import Objective
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.collate import MicroBatch, collate, no_rows, row_blocks
from buffer_rl.trainer.peers import most_of
from buffer_rl_megatron import compat
from buffer_rl_megatron.attention import Share, packed_rows, share_of
from buffer_rl_megatron.layers import ValueHead
from buffer_rl_megatron.options import has_auxiliary_loss
from buffer_rl_megatron.routing import RoutingReplay, places_of_experts, without_experts
from buffer_rl_megatron.vocabulary import log_probs_and_entropies

if TYPE_CHECKING:
    from buffer_rl_megatron.options import MegatronArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One pass through the model. number: of the micro-batch. indices, rows: of the batch; no rows in a pass that only
    keeps step. inputs: what the model is called with. is_padding: bool, of the shape of its ``input_ids``. own_o:
    int64, which response tokens this rank has an output for. predictor_o: int64, the place of the token before each of
    them in ``_sbh``, length times rows. target_o, kept: as in ``MicroBatch``, of these. routed: int64, of each token of
    the routers the place of its experts (``places_of_experts``); None without them."""

    number: int
    indices: list[int]
    rows: TrainBatch
    batch: MicroBatch
    inputs: dict[str, Any]
    is_padding: torch.Tensor
    own_o: torch.Tensor
    predictor_o: torch.Tensor
    target_o: torch.Tensor
    kept: tuple[torch.Tensor, ...]
    routed: np.ndarray | None = None


def micro_batches(
    args: MegatronArgs, batch: TrainBatch, unit: Unit, device: torch.device, *, in_step: bool
) -> list[Micro]:
    """The passes that this rank makes for ``batch``, as many as the other replicas' where they work ``in_step``."""
    packed, size = args.qkv_format == "thd", args.context_parallel_size
    own = args.model_copy(update={"max_tokens_per_gpu": size * args.max_tokens_per_gpu})
    blocks = row_blocks(own, batch, unit, packed=packed, shares_prompts=False) if len(batch) else []
    count = len(blocks)
    if in_step:
        count = most_of(count, device, parallel_state.get_data_parallel_group())
    if parallel_state.get_virtual_pipeline_model_parallel_world_size():
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        count = -(-count // stages) * stages
    blocks += [[] for _ in range(count - len(blocks))]
    make, micros = _packed if packed else _padded, []
    for number, indices in enumerate(blocks):
        rows = batch.select(indices)
        collated = collate(without_experts(rows), device) if indices else no_rows(device)
        laid_out = make(args, rows, collated, device)
        micros.append(Micro(number=number, indices=indices, rows=rows, batch=collated, **laid_out))
        if indices and has_auxiliary_loss(args):  # without rows there would be no token at all
            micros[-1].inputs["padding_mask"] = micros[-1].is_padding
    return micros


def _multiples(args: MegatronArgs) -> tuple[int, int]:
    """What the length of a row, and that of all rows together, are multiples of."""
    size = args.context_parallel_size
    row = 2 * size if size > 1 else 1
    return row, math.lcm(row, size * args.tensor_model_parallel_size if args.sequence_parallel else 1)


def _packed(args: MegatronArgs, rows: TrainBatch, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Fields of a ``Micro``: rows one after another, each padded for its chunks, and a row of padding where sequence
    parallelism needs another length."""
    of_row, of_all = _multiples(args)
    real = np.asarray(rows.lengths if len(rows) else [1], dtype=np.int64)
    lengths = -(-real // of_row) * of_row
    if padding := -int(lengths.sum()) % of_all:
        real, lengths = np.append(real, 0), np.append(lengths, padding)
    share = share_of(lengths, args.context_parallel_size, parallel_state.get_context_parallel_rank())
    starts = np.cumsum(lengths) - lengths
    steps = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    is_padding = steps >= np.repeat(real, lengths)
    tokens = np.zeros(len(steps), dtype=np.int64)
    tokens[~is_padding] = np.concatenate(rows.columns["tokens"]) if len(rows) else 0
    inputs = {
        "input_ids": torch.from_numpy(tokens[share.own])[None].to(device),
        "position_ids": torch.from_numpy(steps[share.own])[None].to(device),
        "attention_mask": None,
        "packed_seq_params": packed_rows(share, device, blockwise=args.transformer_impl == "local"),
    }
    row_t = np.repeat(np.arange(len(lengths)), lengths)
    width = batch.tokens_bl.shape[1]
    token_n = torch.from_numpy(starts).to(device)[batch.predictor_n // width] + batch.predictor_n % width
    return {
        "inputs": inputs,
        "is_padding": torch.from_numpy(is_padding[share.own])[None].to(device),
        "routed": places_of_experts(args, rows, row_t[share.own], steps[share.own]),
        **_own_predictors(share, token_n, batch),
    }


def _padded(args: MegatronArgs, rows: TrainBatch, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Fields of a ``Micro``: rows padded on the right, where no token of the row sees it."""
    num_rows, width = batch.tokens_bl.shape
    padding = -width % _multiples(args)[1]
    size, rank = args.context_parallel_size, parallel_state.get_context_parallel_rank()
    share = share_of(np.array([width + padding]), size, rank)
    steps = torch.from_numpy(share.own).to(device)
    tokens_bl = torch.nn.functional.pad(batch.tokens_bl, (0, padding))[:, steps]
    positions = steps.expand(num_rows, -1)
    own = _own_predictors(share, batch.predictor_n % width, batch)
    own["predictor_o"] = own["predictor_o"] * num_rows + batch.predictor_n[own["own_o"]] // width
    row_t, step_t = np.tile(np.arange(num_rows), len(steps)), np.repeat(share.own, num_rows)
    return {
        "inputs": {"input_ids": tokens_bl, "position_ids": positions, "attention_mask": None},
        "is_padding": positions >= torch.tensor(rows.lengths if len(rows) else [0], device=device)[:, None],
        "routed": places_of_experts(args, rows, row_t, step_t),
        **own,
    }


def _own_predictors(share: Share, token_n: torch.Tensor, batch: MicroBatch) -> dict[str, Any]:
    """The response tokens of a ``Micro`` whose predictors the rank has. token_n: int64, the place in the rows of the
    token before each."""
    place_n = torch.from_numpy(share.place_t).to(token_n.device)[token_n]
    is_own_n = place_n // share.own.size == share.rank
    kept: tuple[torch.Tensor, ...] = ()
    if batch.kept:
        counts_n, ids = batch.kept
        kept = (counts_n[is_own_n], ids[is_own_n.repeat_interleave(counts_n)])
    own_o = is_own_n.nonzero().flatten()
    places = {"own_o": own_o, "predictor_o": place_n[own_o] % share.own.size}
    return {**places, "target_o": batch.target_n[own_o], "kept": kept}


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micros: Sequence[Micro],
    compute: Callable[[Micro, torch.Tensor], Any],
    *,
    backward: bool,
    before_backward: Callable[[Micro], None] | None = None,
    replay: RoutingReplay | None = None,
) -> dict[int, Any]:
    """Run the micro-batches through Megatron's schedule. Returns by their numbers what ``compute`` gave on the last
    pipeline stage, and nothing on the others.

    compute: of a micro-batch that has rows and the model's output for ``own_o``: what is returned, and with
    ``backward`` ``(loss, what is returned)``, of which the loss is not divided by anything. before_backward: called on
    each stage when a micro-batch's backward pass begins there. replay: of the experts of the chunks' routers."""
    found: dict[int, Any] = {}

    def reduce(micro: Micro, output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if not backward:
            if micro.indices:
                found[micro.number] = compute(micro, output)
            return None
        loss = torch.zeros((), device=output.device)
        if micro.indices:
            loss, found[micro.number] = compute(micro, output)
        if not loss.requires_grad:  # a pass without response tokens has a backward pass, too
            loss = loss + 0.0 * output.sum()
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    def begin_backward(model: torch.nn.Module, micro: Micro) -> None:
        if before_backward is not None:
            before_backward(micro)
        if replay is not None:
            replay.begin(model, micro, again=True)

    def forward_step(iterator: Iterator[Micro], model: torch.nn.Module) -> tuple[Any, Any]:
        micro = next(iterator)
        if replay is not None:
            replay.begin(model, micro)
        with at_responses(model, micro):
            output = model(**_inputs_of(model, micro))
        if output.requires_grad:
            output.register_hook(lambda _: begin_backward(model, micro))
        if isinstance(getattr(unwrap_model(model), "output_layer", None), ValueHead):
            output = output.transpose(0, 1).flatten(0, 1).index_select(0, micro.predictor_o)
        return output, partial(reduce, micro)

    several = len(chunks) > 1
    iterators = [iter(micros) for _ in chunks]
    with compat.cpu_devices(), torch.set_grad_enabled(backward), replay or nullcontext():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=list(chunks) if several else chunks[0],
            num_microbatches=len(micros),
            seq_length=1,  # those of the micro-batches are sent with them
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
    return found


def _inputs_of(model: torch.nn.Module, micro: Micro) -> dict[str, Any]:
    """Half-precision logits stay what they are: ``log_probs_and_entropies`` computes in float32, some at a time.

    Under sequence parallelism a tensor rank has its part of the tokens; of the padding, Megatron (0.16.1) takes that
    part on the first stage alone."""
    inputs = dict(micro.inputs)
    if isinstance(model, Float16Module) or isinstance(getattr(model, "module", None), Float16Module):
        inputs["fp32_output"] = False
    chunk, mask = unwrap_model(model), inputs.get("padding_mask")
    if mask is not None and not chunk.pre_process and chunk.config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        inputs["padding_mask"] = mask.chunk(size, 1)[parallel_state.get_tensor_model_parallel_rank()]
    return inputs


@contextmanager
def at_responses(model: torch.nn.Module, micro: Micro) -> Iterator[None]:
    """Have the output layer see the tokens before response tokens alone; logits are then
    ``[1, num_outputs, vocabulary of this rank]``."""
    layer = getattr(unwrap_model(model), "output_layer", None)
    if layer is None or isinstance(layer, ValueHead):
        yield
        return

    def select(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden_sbh = inputs[0]
        if layer.gathers_before:
            hidden_sbh = gather_from_sequence_parallel_region(hidden_sbh, tensor_parallel_output_grad=True)
        return (hidden_sbh.flatten(0, 1).index_select(0, micro.predictor_o)[:, None], *inputs[1:])

    handle = layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def gather_before_selecting(chunks: Sequence[torch.nn.Module]) -> None:
    """Under sequence parallelism the output layer gathers its input itself; response tokens are chosen from the whole,
    so ``at_responses`` gathers in its place. That gather's backward pass sums over ranks, in place of the layer's."""
    for chunk in chunks:
        layer = getattr(unwrap_model(chunk), "output_layer", None)
        if layer is not None and not isinstance(layer, ValueHead):
            layer.gathers_before = layer.sequence_parallel
            if layer.sequence_parallel:
                layer.sequence_parallel = False
                layer.disable_grad_reduce = True


def keep_gradients_of_recomputed_layers(chunks: Sequence[torch.nn.Module]) -> None:
    """Megatron's recomputed layers have a gradient only if their input has one, which that of the first layer has not
    where a provider froze the embeddings."""

    def require(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    for chunk in map(unwrap_model, chunks):
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(require)


def response_log_probs(
    micro: Micro, logits: torch.Tensor, temperature: float, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(log_probs_bt, entropy_bt)`` float32 in nats, 0 on padding, equal on all tensor and context ranks."""
    log_probs_o, entropy_o = log_probs_and_entropies(
        logits.flatten(0, 1),
        micro.target_o,
        temperature=temperature,
        group=parallel_state.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        kept=micro.kept,
    )
    return padded(log_probs_o, micro), padded(entropy_o, micro)


def padded(values_o: torch.Tensor, micro: Micro) -> torch.Tensor:
    """Outputs of all context-parallel ranks, ``[num_rows, max_response]``, 0 on padding; the gradient is that of this
    rank's alone."""
    values_n = values_o.new_zeros(micro.batch.target_n.shape).index_copy(0, micro.own_o, values_o)
    values_n = reduce_from_tensor_model_parallel_region(values_n, parallel_state.get_context_parallel_group())
    padded_bt = values_o.new_zeros(micro.batch.response_bt.shape)
    return padded_bt.masked_scatter(micro.batch.response_bt, values_n)


@dataclass(slots=True)
class CountedTokens:
    """The passes of an optimizer step so far, over which ``global_aux_loss`` counts each expert's tokens, and all
    replicas' tokens in them."""

    passes: int = 0
    tokens: float = 0.0

    def factors(self, micros: Sequence[Micro]) -> dict[int, float]:
        """Count the passes of ``micros``. Returns by their numbers what the loss is multiplied by. Collective: all
        replicas make equally many passes.

        Megatron (0.16.1) divides the mean of an expert's tokens over the passes by the tokens of the running pass. This
        is a share where all passes have equally many; otherwise the divisor must be their mean, too."""
        size = parallel_state.get_context_parallel_world_size()
        own = [sum(micro.rows.lengths) if micro.indices else size * micro.is_padding.numel() for micro in micros]
        tokens = torch.tensor(own, dtype=torch.float64, device=micros[0].is_padding.device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        found = {}
        for micro, of_pass in zip(micros, tokens.tolist(), strict=True):
            self.passes, self.tokens = self.passes + 1, self.tokens + of_pass
            found[micro.number] = of_pass * self.passes / self.tokens
        return found


class AuxiliaryLossWeights:
    """The weights, in the passes of ``micros``, of the auxiliary load-balancing loss of experts, whose gradient
    Megatron adds by itself. Collective: all pipeline stages make it together. counted: of ``global_aux_loss``.

    It is a mean over a micro-batch, and is weighed by the micro-batch's share of the divisor, as the objective's loss
    is. Earlier pipeline stages, whose rows lack what the objective reads, are told the share before the passes: it is
    that of log-probabilities of 0, so that the weights of a loss must not depend on them there.
    """

    def __init__(self, micros: Sequence[Micro], objective: Objective, counted: CountedTokens | None = None) -> None:
        self._factors = {} if counted is None else counted.factors(micros)
        self._divisors: dict[int, float] = {}
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        device = micros[0].batch.response_bt.device
        divisors = torch.zeros(len(micros), dtype=torch.float64, device=device)
        if parallel_state.is_pipeline_last_stage():
            for place, micro in enumerate(micros):
                if micro.indices:
                    divisors[place] = _divisor_of(micro, objective)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(divisors, last, group=parallel_state.get_pipeline_model_parallel_group())
        self._divisors = {micro.number: each for micro, each in zip(micros, divisors.tolist(), strict=True)}

    def record(self, micro: Micro, sums: Sums) -> None:
        """Take the divisor that the objective gave for the outputs. Raises TrainError if the stages have another."""
        divisor = float(sums.divisor)
        if not math.isclose(self._divisors.setdefault(micro.number, divisor), divisor, rel_tol=1e-6, abs_tol=1e-12):
            what = "the weights of the loss depend on log-probabilities, which earlier pipeline stages do not have"
            where = "--moe-router-load-balancing-type and --pipeline-model-parallel-size"
            expected = f"a divisor of {self._divisors[micro.number]:g} for the micro-batch, not {divisor:g}"
            hint = "take one pipeline stage, --moe-router-load-balancing-type none, or a loss with other weights"
            raise TrainError(what, where=where, expected=expected, hint=hint)

    def apply(self, micro: Micro) -> None:
        """Have the backward pass of the micro-batch, which begins, take its weight."""
        # Megatron multiplies its mean over the micro-batch by the tokens without padding; those of all tensor and
        # context ranks, as 0.16.1 sums the counts that it takes for the rank's in place.
        weight = self._divisors[micro.number] / sum(micro.rows.lengths) if micro.indices else 0.0
        weight *= self._factors.get(micro.number, 1.0)
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([weight], device=micro.batch.response_bt.device))


def _divisor_of(micro: Micro, objective: Objective) -> torch.Tensor:
    none_bt = torch.zeros(micro.batch.response_bt.shape, device=micro.batch.response_bt.device)
    outputs = (None, None, micro.rows, none_bt) if objective.critic else (none_bt, none_bt, micro.rows)
    divisor: torch.Tensor = objective(*outputs)[1].divisor
    return divisor
