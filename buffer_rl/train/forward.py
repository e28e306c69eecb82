"""Log-probabilities and entropies of response tokens under a causal language model.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``; ``_n`` is ``[num_response_tokens]``; ``_nv`` is
``[num_response_tokens, vocabulary]``.

Rows go through the model packed where it takes them so (``buffer_rl.train.packing``). Else they are padded on the right
and no attention mask is passed: under causal attention no token sees what comes after it, so padding cannot reach a
real token, positions are right as they stand, and attention takes its fast causal path.
The vocabulary is only evaluated where a response token is predicted: prompt and padding positions are left out just
before the output layer. What follows its logits is computed some tokens at a time, and again in the backward pass, so
that the logits and their gradient are all that is as large as response tokens times vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from buffer_rl.errors import TrainError
from buffer_rl.files.hf_config import length_problem
from buffer_rl.kinds.objective import Objective
from buffer_rl.records.groups import TrainBatch
from buffer_rl.train.collate import MicroBatch, collate, row_blocks, split_rows
from buffer_rl.train.packing import is_packed

if TYPE_CHECKING:
    from buffer_rl.args import Args


CHUNK_ELEMENTS = 1 << 24
"""Logits that are worked on at a time: 64 MiB of float32, and a few times as much while it lasts."""


def response_log_probs(
    model: PreTrainedModel,
    micro: MicroBatch,
    temperature: float,
    *,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(log_probs_bt, entropy_bt)`` in nats, float32, 0 on padding; both differentiable in the model's weights.

    temperature: the logits are divided by it, so that the probabilities are those that the engine sampled from.
    The entropy is 0 without ``with_entropy``. Where ``micro`` has kept tokens, both are of the distribution
    renormalised over these.
    """
    logits_nv = _response_logits(model, micro)
    of_logits = partial(_of_logits, temperature, with_entropy)
    log_probs_n, entropy_n = in_chunks(of_logits, logits_nv, micro.target_n, micro.kept)
    return _pad(log_probs_n, micro), _pad(entropy_n, micro)


def in_chunks(
    of_logits: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    logits_nv: torch.Tensor,
    target_n: torch.Tensor,
    kept: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``of_logits(logits_nv, target_n, *kept)``, which is ``(log_probs_n, entropy_n)``, some tokens at a time, and
    again in the backward pass. kept: as in ``MicroBatch``."""
    size = max(1, CHUNK_ELEMENTS // max(1, logits_nv.shape[-1]))
    chunks = [_split(values, size) for values in (logits_nv, target_n)]
    if kept:
        counts_n, ids = kept
        counts = _split(counts_n, size)
        chunks += [counts, _split(ids, [int(count_c.sum()) for count_c in counts])]
    parts = [
        # A single one would gain nothing from being computed twice.
        of_logits(*chunk)
        if len(logits_nv) <= size
        else checkpoint(of_logits, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*chunks, strict=True)
    ]
    log_probs_n, entropy_n = (torch.cat(values) for values in zip(*parts, strict=True))
    return log_probs_n, entropy_n


def _split(values_n: torch.Tensor, sizes: int | list[int]) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = values_n.split(sizes)  # type: ignore[no-untyped-call]
    return parts


def _of_logits(
    temperature: float, with_entropy: bool, logits_nv: torch.Tensor, target_n: torch.Tensor, *kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of some response tokens, ``[num_response_tokens]`` float32 each."""
    logits_nv = logits_nv.float()
    if temperature != 1.0:
        logits_nv = logits_nv / temperature
    if kept:
        logits_nv = only_kept(logits_nv, *kept)
    all_log_probs_nv = torch.log_softmax(logits_nv, dim=-1)
    log_probs_n = all_log_probs_nv.gather(-1, target_n[:, None]).squeeze(-1)
    entropy_n = torch.zeros_like(log_probs_n)
    if with_entropy:
        entropy_n = _Entropy.apply(all_log_probs_nv)  # type: ignore[no-untyped-call]
    return log_probs_n, entropy_n


def only_kept(logits_nv: torch.Tensor, counts_n: torch.Tensor, kept: torch.Tensor, *, first: int = 0) -> torch.Tensor:
    """The logits, -inf for the tokens that top-k, top-p and min-p cut off when the engine sampled (see
    ``MicroBatch``). first: the first token of the part of the vocabulary that the logits are of."""
    cut_nv = (counts_n > 0)[:, None].expand(logits_nv.shape).clone()
    rows = torch.repeat_interleave(torch.arange(len(counts_n), device=counts_n.device), counts_n)
    own = (kept >= first) & (kept < first + logits_nv.shape[1])
    cut_nv[rows[own], kept[own] - first] = False
    return logits_nv.masked_fill(cut_nv, float("-inf"))


def response_values(model: PreTrainedModel, micro: MicroBatch) -> torch.Tensor:
    """The values of a model with a value head before each response token, ``[num_rows, max_response]`` float32, 0 on
    padding: what its output layer returns, whatever the architecture makes of logits after it."""
    found: list[torch.Tensor] = []
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    handle = head.register_forward_hook(lambda _module, _args, output: found.append(output))
    try:
        _response_logits(model, micro)
    finally:
        handle.remove()
    return _pad(found[0].float().reshape(-1), micro)


class _Entropy(torch.autograd.Function):
    """``-sum(p log p)`` over the vocabulary, in nats. Its backward pass needs the log-probabilities alone, which
    ``log_softmax`` keeps anyway: a loss that does not use the entropy pays no memory for its gradient."""

    @staticmethod
    def forward(ctx: Any, log_probs_nv: torch.Tensor) -> torch.Tensor:
        """``[num_response_tokens, vocabulary]`` to ``[num_response_tokens]``."""
        ctx.save_for_backward(log_probs_nv)
        entropy_n: torch.Tensor = -(log_probs_nv.exp() * finite_log_probs(log_probs_nv)).sum(-1)
        return entropy_n

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        """``d(-p log p) / d(log p) = -p (log p + 1)``."""
        (log_probs_nv,) = ctx.saved_tensors
        slope_nv: torch.Tensor = -log_probs_nv.exp() * (finite_log_probs(log_probs_nv) + 1) * gradients[0][:, None]
        return slope_nv


def finite_log_probs(log_probs_nv: torch.Tensor) -> torch.Tensor:
    """A token of probability 0 contributes 0, the limit of p log p, where its log is -inf."""
    return log_probs_nv.clamp(min=torch.finfo(log_probs_nv.dtype).min)


def _response_logits(model: PreTrainedModel, micro: MicroBatch) -> torch.Tensor:
    """Logits ``[num_response_tokens, vocabulary]`` of the positions before each response token."""
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise TrainError(f"{type(model).__name__} has no output layer", expected="a causal language model")
    if isinstance(model, PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        if problem := length_problem(vars(config), micro.tokens_bl.shape[1]):
            raise TrainError(
                f"a row has {micro.tokens_bl.shape[1]} tokens: {problem[0]}",
                expected=f"rows of at most {problem[1]} tokens",
                hint=f"--rollout-max-context-len {problem[1]}, or a rollout function that keeps to it",
            )

    inputs: dict[str, Any] = {"input_ids": micro.tokens_bl}
    predictor_n = micro.predictor_n
    if micro.packing is not None and is_packed(model):
        inputs, predictor_n = micro.packing.inputs(), micro.packing.predictor_n

    def keep_predictors(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, predictor_n)[None], *args[1:])

    # The hook narrows the output layer's input and leaves everything around it to the model, because some
    # architectures scale or cap the logits afterwards.
    handle = head.register_forward_pre_hook(keep_predictors)
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        handle.remove()
    if logits.shape[:2] != (1, micro.predictor_n.numel()):
        raise TrainError(
            f"{type(model).__name__} returned logits of shape {tuple(logits.shape)}",
            expected=f"(1, {micro.predictor_n.numel()}, vocabulary)",
        )
    selected: torch.Tensor = logits.squeeze(0)  # whose gradient is a view, too
    return selected


def _pad(values_n: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    padded_bt = values_n.new_zeros(micro.response_bt.shape)
    return padded_bt.masked_scatter(micro.response_bt, values_n)


def batch_outputs(
    args: Args, model: PreTrainedModel, batch: TrainBatch, device: torch.device, objective: Objective
) -> list[np.ndarray]:
    """Log-probabilities in nats at the temperature of the objective, or a critic's values: per row
    ``[response_length]`` float32, in the micro-batches of the objective. Reads ``max_tokens_per_gpu`` and
    ``deterministic``. Raises TrainError for a token that the model does not know."""
    _require_vocabulary(model, batch)
    rows: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(batch)
    packed = is_packed(model)
    for indices in row_blocks(args, batch, objective.unit, packed=packed):
        micro = collate(batch.select(indices), device, packed=packed)
        with torch.no_grad():
            if objective.critic:
                outputs_bt = response_values(model, micro)
            else:
                outputs_bt, _ = response_log_probs(model, micro, objective.temperature, with_entropy=False)
        for index, row in zip(indices, split_rows(outputs_bt, micro.response_lengths), strict=True):
            rows[index] = row
    return rows


def _require_vocabulary(model: PreTrainedModel, batch: TrainBatch) -> None:
    """The vocabulary of a reference or a teacher may be smaller than that of the model that sampled."""
    if not isinstance(model, PreTrainedModel):
        return
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    given = [batch.columns[name] for name in ("tokens", "kept_tokens") if name in batch.columns]
    for row_id, *arrays in zip(batch.row_ids, *given, strict=True):
        if (largest := max((int(np.max(ids, initial=0)) for ids in arrays), default=0)) >= size:
            raise TrainError(
                f"the token {largest} is not in the vocabulary of {model.config._name_or_path or type(model).__name__}",
                where=str(row_id),
                expected=f"token ids below {size}",
                hint="--ref-load, --opd-teacher-load and --critic-load take models of --hf-checkpoint's vocabulary",
            )
