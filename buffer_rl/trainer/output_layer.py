"""The output layer and what follows it as one function, so that no logits of all response tokens are ever there.

Log-probabilities and entropies are computed some tokens at a time, logits included, and the logits again in the
backward pass. Its memory is that of ``CHUNK_ELEMENTS`` logits, whatever the number of response tokens. This needs a
model whose logits are what its output layer returns; ``fuse_where_possible`` tries that out.

The layer stays in the model, which calls it as ever: during a pass its ``forward`` is another one. Hooks of the layer,
such as those that gather a sharded weight, run as in any pass.

Suffix legend: ``_n`` is ``[num_response_tokens]``; ``_nh`` is ``[num_response_tokens, hidden]``; ``_nv`` is
``[num_response_tokens, vocabulary]``; ``_vh`` is ``[vocabulary, hidden]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from buffer_rl.plugin.calls import contained
from buffer_rl.trainer.vocabulary import chunk_size, chunks, cut_off, entropy_of, entropy_slope

FUSED = "gives_the_logits"
"""The attribute of an output layer whose result is the model's logits."""
_LARGEST_LOGIT = 1e3
"""Of the probe. A cap of 30 changes such a logit; that of a small one is lost in rounding."""
_PLACES = (1, 0, 0)
"""Predictors of the probe, of its two tokens: a shared prompt has one for several rows."""


def fuse_where_possible(model: torch.nn.Module, probe: torch.nn.Module | None = None) -> None:
    """Mark the output layer of a model as one that ``response_log_probs`` computes with log-probabilities and entropies
    in one: a linear layer without bias, no subclass of it, whose result is the model's logits bit for bit. Nothing
    changes for other models. probe: a copy to try out in its place."""
    try:
        with torch.no_grad(), contained():
            head: Any = cast("Any", model).get_output_embeddings()
            is_plain = _class_of(head) is torch.nn.Linear and head.bias is None and "forward" not in vars(head)
            tried: Any = model if probe is None else probe
            layer = tried.get_output_embeddings()
            # Two, as what the layer returns in a pass is two wide.
            fits = is_plain and all(_returns(tried, layer, width) for width in (layer.out_features, 2))
    except Exception:  # fault boundary: many architectures, of which some do more with logits
        fits = False
    if fits:
        setattr(head, FUSED, True)


def _class_of(module: torch.nn.Module) -> type[Any]:
    """Its class; of a module whose weights are split over ranks, which FSDP2 gave another class, the one before."""
    own = type(module)
    return own.__bases__[1] if own.__bases__[0].__name__ == "FSDPModule" else own


def is_fused(model: torch.nn.Module) -> bool:
    """Whether the model's output layer may be replaced by ``fused_log_probs``."""
    return getattr(cast("Any", model).get_output_embeddings(), FUSED, False) is True


def _returns(model: torch.nn.Module, head: torch.nn.Linear, width: int) -> bool:
    """Whether the model calls its output layer once, and returns what that returns: here numbers
    ``[1, predictors, width]`` float32, which are not those of any hidden states."""
    device = head.weight.device
    count = len(_PLACES) * width
    numbers = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, count, device=device).view(1, len(_PLACES), width)
    calls: list[torch.Size] = []

    def compute(hidden_nh: torch.Tensor) -> torch.Tensor:
        calls.append(hidden_nh.shape)
        return numbers.clone()[0]

    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    with at_predictors(head, torch.tensor(_PLACES, device=device), compute):
        logits: Any = model(input_ids=ids, use_cache=False).logits
    expected = [(len(_PLACES), head.in_features)]
    return calls == expected and logits.dtype == numbers.dtype and torch.equal(logits, numbers)


@contextmanager
def at_predictors(
    head: Any, predictor_n: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor] | None
) -> Iterator[None]:
    """The output layer sees the hidden states of ``predictor_n`` alone, places among all tokens of its input, and
    returns ``[1, num_response_tokens, ...]``: with ``compute`` what that gives of them in place of its own result."""

    def narrow(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, predictor_n)

    if compute is None:  # what is around the layer stays the model's: some architectures scale or cap logits after it
        with head.register_forward_pre_hook(lambda _module, args: (narrow(args[0])[None], *args[1:])):
            yield
        return
    # A copy of a few numbers: FSDP2 warns of a model that returns a view.
    head.forward = lambda hidden: compute(narrow(hidden))[None].clone()
    try:
        yield
    finally:
        del head.forward


def fused_log_probs(
    hidden_nh: torch.Tensor,
    weight_vh: torch.Tensor,
    target_n: torch.Tensor,
    *kept: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> torch.Tensor:
    """Log-probabilities and entropies of tokens in nats, ``[num_response_tokens, 2]``, differentiable in hidden states
    and weight; float32, or float64 if these are. Arguments as in ``of_logits``; without ``with_entropy`` the entropies
    are 0."""
    outputs: torch.Tensor = _LogProbs.apply(hidden_nh, weight_vh, temperature, with_entropy, target_n, *kept)  # type: ignore[no-untyped-call]
    return outputs


class _LogProbs(torch.autograd.Function):
    """Of logits ``z = W h / temperature``: ``log p_t`` and the entropy ``H``, with the gradients
    ``d log p_t / d z_j = [j = t] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``.

    Each chunk takes the operations that autograd would take of ``of_logits``, in the same order, and all chunks take
    place in the same memory. The log-probabilities of a single chunk are kept for the backward pass: they are not
    larger than those of any other."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nh: torch.Tensor,
        weight_vh: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        target_n: torch.Tensor,
        *kept: torch.Tensor,
    ) -> torch.Tensor:
        """``[num_response_tokens, 2]``."""
        size = chunk_size(len(weight_vh), weight_vh.device)
        states_nh, matrix_vh = _factors(hidden_nh, weight_vh)
        first_sv, second_sv = _memory(2, states_nh, matrix_vh, size)
        parts = []
        for states_ch, target_c, *kept_c in chunks(size, kept, states_nh, target_n):
            logits_cv, log_probs_cv = first_sv[: len(states_ch)], second_sv[: len(states_ch)]
            _all_log_probs(states_ch, matrix_vh, temperature, kept_c, logits_cv, log_probs_cv)
            found_c = log_probs_cv.gather(-1, target_c[:, None]).squeeze(-1)
            entropy_c = torch.zeros_like(found_c)
            if with_entropy:  # -inf becomes finite in place, which the backward pass takes as well
                entropy_c = entropy_of(log_probs_cv, probs=logits_cv, finite=log_probs_cv)
            parts.append(torch.stack([found_c, entropy_c], -1))
        ctx.save_for_backward(hidden_nh, weight_vh, target_n, *kept, *([second_sv] if len(hidden_nh) <= size else []))
        ctx.temperature, ctx.with_entropy, ctx.num_kept, ctx.size = temperature, with_entropy, len(kept), size
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of hidden states and weight."""
        hidden_nh, weight_vh, target_n, *more = ctx.saved_tensors
        kept, single = more[: ctx.num_kept], more[ctx.num_kept :]
        states_nh, matrix_vh = _factors(hidden_nh, weight_vh)
        first_sv, second_sv, *third = _memory(2 if single else 3, states_nh, matrix_vh, ctx.size)
        all_log_probs_sv = (single or third)[0]
        outputs_n2 = gradients[0]
        # A loss that has no entropy in it gives zeros, for which nothing need be computed.
        has_entropy = ctx.with_entropy and bool(outputs_n2[:, 1].any())
        of_hidden, of_weight = [], None
        for states_ch, outputs_c2, target_c, *kept_c in chunks(ctx.size, kept, states_nh, outputs_n2, target_n):
            count = len(states_ch)
            log_probs_cv, work_cv, slope_cv = all_log_probs_sv[:count], first_sv[:count], second_sv[:count]
            if not single:
                _all_log_probs(states_ch, matrix_vh, ctx.temperature, kept_c, work_cv, log_probs_cv)
            of_entropy = outputs_c2[:, 1] if has_entropy else None
            _slope(log_probs_cv, target_c, outputs_c2[:, 0], of_entropy, work_cv, slope_cv)
            if ctx.temperature != 1.0:
                slope_cv.div_(ctx.temperature)
            factor_cv = slope_cv.to(matrix_vh.dtype)
            if ctx.needs_input_grad[0]:
                of_hidden.append(factor_cv @ matrix_vh)
            if ctx.needs_input_grad[1]:
                of_weight = _added(of_weight, factor_cv.t(), states_ch)
        return (
            torch.cat(of_hidden).to(hidden_nh.dtype) if of_hidden else None,
            None if of_weight is None else of_weight.to(weight_vh.dtype),
            *[None] * (3 + len(kept)),
        )


def _factors(hidden_nh: torch.Tensor, weight_vh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What products are made of: in float32 on a device that rounds products of shorter numbers to these."""
    if hidden_nh.is_cuda or hidden_nh.dtype.itemsize >= 4:
        return hidden_nh, weight_vh
    return hidden_nh.float(), weight_vh.float()


def _memory(count: int, states_nh: torch.Tensor, matrix_vh: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Tensors for the logits of a chunk: on a CPU, memory that is new for each operation costs as much as that."""
    dtype = states_nh.dtype if states_nh.dtype.itemsize >= 4 else torch.float32
    shape = (min(size, len(states_nh)), len(matrix_vh))
    return [torch.empty(shape, dtype=dtype, device=states_nh.device) for _ in range(count)]


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix product, in float32 if its factors are shorter."""
    if left.dtype.itemsize >= 4:
        return torch.mm(left, right, out=out)
    product = torch.mm(left, right, out_dtype=torch.float32)
    return product if out is None else out.copy_(product)


def _added(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``total``, in place, plus the product."""
    if total is None:
        return _product(left, right)
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    return total.add_(_product(left, right))


def _all_log_probs(
    states_nh: torch.Tensor,
    matrix_vh: torch.Tensor,
    temperature: float,
    kept: list[torch.Tensor],
    logits_nv: torch.Tensor,
    log_probs_nv: torch.Tensor,
) -> None:
    """Writes ``log_probs_nv``, by way of ``logits_nv``."""
    _product(states_nh, matrix_vh.t(), out=logits_nv)
    if temperature != 1.0:
        logits_nv.div_(temperature)
    if kept:
        logits_nv.masked_fill_(cut_off(logits_nv, *kept), float("-inf"))
    torch.log_softmax(logits_nv, -1, out=log_probs_nv)


def _slope(
    log_probs_nv: torch.Tensor,
    target_n: torch.Tensor,
    of_log_probs: torch.Tensor,
    of_entropy: torch.Tensor | None,
    work_nv: torch.Tensor,
    slope_nv: torch.Tensor,
) -> None:
    """Writes the gradient of the logits from those of the outputs into ``slope_nv``, by way of ``work_nv``; it is 0 for
    tokens that were cut off, whose probability is."""
    if of_entropy is None:
        work_nv.zero_()
    else:
        entropy_slope(log_probs_nv, of_entropy, probs=work_nv, finite=slope_nv)
    work_nv.scatter_add_(-1, target_n[:, None], of_log_probs[:, None])
    torch.ops.aten._log_softmax_backward_data.out(work_nv, log_probs_nv, -1, work_nv.dtype, out=slope_nv)
