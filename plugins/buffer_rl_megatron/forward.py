"""Micro-batches through the model of one replica, which is spread over pipeline stages and tensor ranks.

Every rank of the replica runs the same micro-batches through Megatron's schedule; the ranks of the last stage get what
comes out. Replicas whose forward passes have collectives in common, and virtual pipeline stages, need certain numbers
of micro-batches: a pass without rows, which contributes nothing, makes up for each that is not there.

Suffix legend: ``_n`` is ``[num_response_tokens]``; ``_bt`` is ``[num_rows, max_response]``; ``_sbh`` is
``[length, num_rows, hidden]``, with packed rows as one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from buffer_rl.scope import Unit
from buffer_rl.train.collate import MicroBatch, collate, row_blocks
from buffer_rl.types import TrainBatch
from buffer_rl_megatron import compat
from buffer_rl_megatron.attention import packed_rows
from buffer_rl_megatron.layers import ValueHead
from buffer_rl_megatron.options import balances_experts
from buffer_rl_megatron.vocabulary import log_probs_and_entropies


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One pass through the model. number: of the micro-batch. indices, rows: of the batch; no rows in a pass that only
    keeps step. inputs: what the model is called with. is_padding: bool, of its shape. predictor_n: int64, of each
    response token the place of the token before it in ``_sbh``, length times rows."""

    number: int
    indices: list[int]
    rows: TrainBatch
    batch: MicroBatch
    inputs: dict[str, Any]
    is_padding: torch.Tensor
    predictor_n: torch.Tensor


def micro_batches(args: Any, batch: TrainBatch, unit: Unit, device: torch.device, *, in_step: bool) -> list[Micro]:
    """The passes that this rank makes for ``batch``, as many as the other replicas' where they work ``in_step``."""
    packed = args.qkv_format == "thd"
    blocks = row_blocks(args, batch, unit, packed=packed, shares_prompts=False) if len(batch) else []
    count = len(blocks)
    if in_step:
        most = torch.tensor(count, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        count = int(most)
    if parallel_state.get_virtual_pipeline_model_parallel_world_size():
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        count = -(-count // stages) * stages
    blocks += [[] for _ in range(count - len(blocks))]
    multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    make = _packed if packed else _padded
    micros = [make(number, block, batch.select(block), device, multiple) for number, block in enumerate(blocks)]
    if balances_experts(args):
        for micro in micros:
            if micro.indices:  # else there would be no token at all
                micro.inputs["padding_mask"] = micro.is_padding
    return micros


def _packed(number: int, indices: list[int], rows: TrainBatch, device: torch.device, multiple: int) -> Micro:
    """Rows one after another, and a row of padding where sequence parallelism needs another length."""
    batch = collate(rows, device) if indices else _nothing(device)
    lengths = np.asarray(rows.lengths if indices else [multiple], dtype=np.int64)
    tokens = np.concatenate(rows.columns["tokens"]).astype(np.int64) if indices else np.zeros(multiple, dtype=np.int64)
    if padding := -len(tokens) % multiple:
        lengths, tokens = np.append(lengths, padding), np.append(tokens, np.zeros(padding, dtype=np.int64))
    width = batch.tokens_bl.shape[1]
    starts = torch.from_numpy(np.cumsum(lengths) - lengths).to(device)
    predictor_n = starts[batch.predictor_n // width] + batch.predictor_n % width
    steps = np.concatenate([np.arange(length) for length in lengths])
    inputs = {
        "input_ids": torch.from_numpy(tokens)[None].to(device),
        "position_ids": torch.from_numpy(steps)[None].to(device),
        "attention_mask": None,
        "packed_seq_params": packed_rows(lengths, device),
    }
    is_padding = torch.arange(len(tokens), device=device)[None] >= sum(rows.lengths)
    return Micro(
        number=number,
        indices=indices,
        rows=rows,
        batch=batch,
        inputs=inputs,
        is_padding=is_padding,
        predictor_n=predictor_n,
    )


def _padded(number: int, indices: list[int], rows: TrainBatch, device: torch.device, multiple: int) -> Micro:
    """Rows padded on the right, where no token of the row sees it."""
    batch = collate(rows, device) if indices else _nothing(device)
    num_rows, width = batch.tokens_bl.shape
    tokens_bl = torch.nn.functional.pad(batch.tokens_bl, (0, -width % multiple))
    steps = torch.arange(tokens_bl.shape[1], device=device).expand(num_rows, -1)
    inputs = {"input_ids": tokens_bl, "position_ids": steps, "attention_mask": None}
    predictor_n = batch.predictor_n % width * num_rows + batch.predictor_n // width
    lengths_b = torch.tensor(rows.lengths if indices else [0], device=device)
    return Micro(
        number=number,
        indices=indices,
        rows=rows,
        batch=batch,
        inputs=inputs,
        is_padding=steps >= lengths_b[:, None],
        predictor_n=predictor_n,
    )


def _nothing(device: torch.device) -> MicroBatch:
    """A row of one token without a response."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens_bl=torch.zeros((1, 1), dtype=torch.int64, device=device),
        response_bt=torch.zeros((1, 0), dtype=torch.bool, device=device),
        predictor_n=none,
        target_n=none,
        response_lengths=[0],
    )


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micros: Sequence[Micro],
    compute: Callable[[Micro, torch.Tensor], Any],
    *,
    backward: bool,
) -> dict[int, Any]:
    """Run the micro-batches through Megatron's schedule. Returns by their numbers what ``compute`` gave on the last
    pipeline stage, and nothing on the others.

    compute: of a micro-batch that has rows and the model's output at its response tokens: what is returned, and with
    ``backward`` ``(loss, what is returned)``, of which the loss is not divided by anything."""
    found: dict[int, Any] = {}

    def reduce(micro: Micro, output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if not backward:
            if micro.indices:
                found[micro.number] = compute(micro, output)
            return None
        loss = 0.0 * output.sum()  # a pass without response tokens has a backward pass, too
        if micro.indices:
            own, found[micro.number] = compute(micro, output)
            loss = loss + own
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    def forward_step(iterator: Iterator[Micro], model: torch.nn.Module) -> tuple[Any, Any]:
        micro = next(iterator)
        with at_responses(model, micro):
            output = model(**micro.inputs)
        if isinstance(getattr(unwrap_model(model), "output_layer", None), ValueHead):
            output = output.transpose(0, 1).flatten(0, 1).index_select(0, micro.predictor_n)
        return output, partial(reduce, micro)

    several = len(chunks) > 1
    iterators = [iter(micros) for _ in chunks]
    with compat.cpu_devices(), torch.set_grad_enabled(backward):
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


@contextmanager
def at_responses(model: torch.nn.Module, micro: Micro) -> Iterator[None]:
    """Have the output layer see the tokens before response tokens alone; logits are then ``[1, num_response_tokens,
    vocabulary of this rank]``."""
    layer = getattr(unwrap_model(model), "output_layer", None)
    if layer is None or isinstance(layer, ValueHead):
        yield
        return

    def select(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden_sbh = inputs[0]
        if layer.gathers_before:
            hidden_sbh = gather_from_sequence_parallel_region(hidden_sbh, tensor_parallel_output_grad=True)
        return (hidden_sbh.flatten(0, 1).index_select(0, micro.predictor_n)[:, None], *inputs[1:])

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


def response_log_probs(
    micro: Micro, logits: torch.Tensor, temperature: float, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(log_probs_bt, entropy_bt)`` float32 in nats, 0 on padding, equal on all tensor ranks."""
    log_probs_n, entropy_n = log_probs_and_entropies(
        logits.flatten(0, 1),
        micro.batch.target_n,
        temperature=temperature,
        group=parallel_state.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        kept=micro.batch.kept,
    )
    return padded(log_probs_n, micro), padded(entropy_n, micro)


def padded(values_n: torch.Tensor, micro: Micro) -> torch.Tensor:
    """Response tokens as ``[num_rows, max_response]``, 0 on padding."""
    padded_bt = values_n.new_zeros(micro.batch.response_bt.shape)
    return padded_bt.masked_scatter(micro.batch.response_bt, values_n)
