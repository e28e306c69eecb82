"""Routing replay of the torch trainer: tokens go to the engine's experts (R3, arXiv:2510.11370).

Engine and trainer compute with other kernels and number formats, so a token whose router finds two experts about equal
goes to one in the engine and to the other in the trainer; its log-probability differs then by much more than rounding.
With replay, the trainer's routers choose what the engine's chose, and weigh it by their own numbers, as the model does:
the gradient flows through the routers as ever.

A router's code stays the model's own. During a pass, the ``topk`` in it that chooses experts returns the given ones,
and their numbers. ``RoutingReplay.of`` tries out whether a model's routers take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from buffer_rl.args import Args
from buffer_rl.embedded.routers import NUM_TOKENS, find_routers, recorded_experts
from buffer_rl.errors import ConfigError, DataError, TrainError
from buffer_rl.files.hf_config import text_config
from buffer_rl.kinds.token_loss import Reduction, Sums, Total
from buffer_rl.plugin.calls import contained
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.packing import TOLERANCE, TOLERANCE_OF_HALVES, probe_of

_TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(slots=True)
class Differing:
    """For how many tokens, in each layer, experts were given (``num_given``), and for how many of these the model's own
    router would have chosen others (``num_other``)."""

    num_given: Any = 0
    num_other: Any = 0

    def sums(self) -> Sums:
        """The share as a metric, ``routed_experts_differ``; none without such tokens."""
        if isinstance(self.num_given, int):
            return Sums()
        share = Total(Reduction.MEAN, self.num_other, self.num_given)
        return Sums(metrics={"routed_experts_differ": share})


class RoutingReplay:
    """The replay in models of one architecture. names: of their routers, in the order of layers."""

    def __init__(self, names: tuple[str, ...], num_experts: int) -> None:
        self._names, self._num_experts = names, num_experts

    @classmethod
    def of(cls, args: Args, model: PreTrainedModel) -> RoutingReplay | None:
        """That of ``--replay-routed-experts``; None without it. Raises ConfigError for a model whose routers are not
        known, or do not take given experts."""
        if not args.replay_routed_experts:
            return None
        try:
            with torch.no_grad(), contained():
                probe = probe_of(model)
                names = find_routers(probe)
                fits = len(names) == len(_sizes(model).layers)
                reason = f"{len(names)} of its modules are known as routers, for {len(_sizes(model).layers)} layers"
                if fits:
                    fits = _takes_given(cls(names, _sizes(probe).num_experts), names, probe)
                    reason = "they do not choose the given ones"
        except Exception as error:  # fault boundary: many architectures
            fits, reason = False, f"{type(error).__name__}: {error}"
        if not fits:
            raise ConfigError(
                f"the routers of {type(model).__name__} cannot be given experts: {reason}",
                where="--replay-routed-experts",
                expected="a mixture-of-experts model of transformers, each of whose routers is one module that returns "
                "numbers of all experts, the chosen ones and their weights",
                hint="take it out, or another trainer",
            )
        return cls(names, _sizes(model).num_experts)

    def check(self, batch: TrainBatch) -> None:
        """Raises DataError for a row with experts that the model does not have."""
        for row_id, experts in zip(batch.row_ids, batch.columns.get("routed_experts", ()), strict=False):
            found = int(experts.max(initial=0))
            if experts.shape[1:2] != (len(self._names),) or found >= self._num_experts:
                what = f"its experts have the shape {list(experts.shape)}, and numbers up to {found}"
                expected = f"[tokens, {len(self._names)} layers, …], and numbers below {self._num_experts}"
                hint = "were these rows recorded with another model?"
                raise DataError(what, where=str(row_id), expected=expected, hint=hint)

    @contextmanager
    def within(self, model: PreTrainedModel, given: torch.Tensor | None) -> Iterator[Differing]:
        """For the forward and backward pass over a micro-batch whose tokens have the experts ``given``,
        ``[num_tokens, layers, top_k]``: those of a token without any are -1. Recomputed layers call their routers again
        in the backward pass."""
        differing = Differing()
        with ExitStack() as stack:
            for at, name in enumerate(self._names if given is not None else ()):
                assert given is not None
                router: Any = model.get_submodule(name)
                router.forward = partial(self._forward, router, router.forward, given[:, at], differing)
                stack.callback(delattr, router, "forward")
            yield differing

    def _forward(
        self, router: Any, forward: Any, given: torch.Tensor, differing: Differing, hidden: torch.Tensor, *args: Any
    ) -> Any:
        num_tokens = hidden.numel() // hidden.shape[-1]
        if num_tokens != len(given):
            what = f"{type(router).__name__} gets {num_tokens} tokens, and there are experts of {len(given)} places"
            raise TrainError(what, where="--replay-routed-experts")
        with _Given(given, self._num_experts, differing) as mode:
            answer = forward(hidden, *args)
        if mode.num_calls != 1:
            where = "--replay-routed-experts"
            raise TrainError(f"{type(router).__name__} chose {mode.num_calls} times for each token", where=where)
        return answer


class _Given(TorchFunctionMode):
    """The ``topk`` that chooses ``given``, ``[num_tokens, top_k]``, of as many numbers as there are experts, returns
    these; where a token's are -1, what it would return."""

    def __init__(self, given: torch.Tensor, num_experts: int, differing: Differing) -> None:
        super().__init__()
        self._given, self._num_experts, self._differing = given, num_experts, differing
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        numbers = args[0] if func in _TOPK and args else None
        if numbers is None or tuple(numbers.shape) != (len(self._given), self._num_experts):
            return answer
        if answer[1].shape != self._given.shape:
            return answer
        self.num_calls += 1
        own = answer[1]
        has_some = self._given[:, :1] >= 0
        chosen = torch.where(has_some, self._given.long(), own)
        is_other = (own[:, :, None] != chosen[:, None, :]).all(-1).any(-1)
        self._differing.num_given = self._differing.num_given + has_some.sum()
        self._differing.num_other = self._differing.num_other + is_other.sum()
        return torch.return_types.topk((numbers.gather(-1, chosen), chosen))


def _sizes(model: PreTrainedModel) -> ExpertSizes:
    sizes = ExpertSizes.of(text_config(model.config.to_dict()))
    if sizes is None:
        raise ValueError("its configuration has no experts")
    return sizes


def _takes_given(replay: RoutingReplay, names: tuple[str, ...], model: PreTrainedModel) -> bool:
    """Whether routers choose what they are given, in any order, and give what they would without if that is their own
    choice."""
    ids = torch.arange(NUM_TOKENS, device=model.device)[None]

    def passed(given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        with recorded_experts(model, names) as chosen, replay.within(model, given):
            logits = model(input_ids=ids, use_cache=False).logits
        return torch.stack(chosen, 1), logits

    own, logits = passed(None)
    other = (own + 1) % _sizes(model).num_experts
    limit = (TOLERANCE if logits.dtype.itemsize >= 4 else TOLERANCE_OF_HALVES) * logits.abs().max()
    turned = passed(own.flip(-1))[1]
    chosen, elsewhere = passed(other)
    return bool(
        (turned - logits).abs().max() <= limit < (elsewhere - logits).abs().max() and torch.equal(chosen, other)
    )
