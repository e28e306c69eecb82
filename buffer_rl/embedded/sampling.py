"""Drawing tokens from logits: temperature, top-k, top-p, min-p, and random numbers that depend on nothing else.

The number behind a token is a hash of (seed, position), so a sequence drawn again with its seed comes out again,
whatever else is in the batch. The token is found by inverting the cumulative distribution in float64, in two levels
(blocks of 128 entries, then inside one), which is far cheaper than ``multinomial`` for large vocabularies.

The reported log-probability is ``log_softmax(logits / temperature)`` of the drawn token: it comes from the very
logits that were drawn from, over the whole vocabulary. top-k, top-p and min-p do **not** renormalise it, except where
the kept tokens are returned with it. Greedy requests (temperature 0) report ``log_softmax(logits)``. A trainer that
divides its logits by the same temperature computes the same quantity. Teachers and evaluations also ask for those of
the prompt's tokens, of the likeliest tokens of each position, and of tokens that the request names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from buffer_rl.embedded.fast_decoder import VOCAB_BLOCK
from buffer_rl.engines.protocol import GOLDEN, is_neutral, mix64

GREEDY_BELOW = 1e-6  # SGLang's threshold for "temperature 0"
MAX_ROWS = 4096
"""Most rows of a request: its prompts times ``n``."""
MAX_STOPS = 256
MAX_STOP_CHARS = 4096
"""Most stop strings of a request, and characters of one: each is searched for after every token."""


class SamplingError(ValueError):
    """A sampling parameter that the engine does not know, does not support or cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The ``sampling_params`` of one request, under SGLang's names and with its defaults."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Take the most probable token."""
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """Some tokens are cut off before drawing."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SamplingParams:
        """Read a request's parameters; None means the default. Raises SamplingError naming the parameter."""
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if name in _NEUTRAL:
                if not is_neutral(value, _NEUTRAL[name]):
                    raise SamplingError(f"sampling parameter {name!r} is not supported by the embedded engine")
            elif name not in _READERS:
                raise SamplingError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(_READERS))}")
            elif value is not None:
                try:
                    values[name] = _READERS[name](value)
                except (TypeError, ValueError, OverflowError) as error:
                    raise SamplingError(f"sampling parameter {name!r}: {value!r:.80} ({error})") from error
        params = cls(**values)
        params._check()
        return params

    def _check(self) -> None:
        wrong = [
            f"{name} must be in [{least}, {most}], got {value}"
            for name, (least, most) in _RANGES.items()
            if (value := getattr(self, name)) is not None and not least <= value <= most
        ]
        if self.min_new_tokens > self.max_new_tokens:
            wrong.append(f"min_new_tokens must be at most max_new_tokens, got {self.min_new_tokens}")
        if not self.top_p:
            wrong.append("top_p must be above 0")
        if len(self.stop) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in self.stop):
            wrong.append(f"stop must be at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
        if wrong:
            raise SamplingError("; ".join(wrong))


def _integer(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError("expected a whole number")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool | str):
        raise ValueError("expected a number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in found):
        raise ValueError("expected a string or a list of strings")
    return tuple(text for text in found if text)


def _token_ids(value: Any) -> frozenset[int]:
    return frozenset(_integer(item) for item in value)


_READERS: Mapping[str, Any] = {
    "max_new_tokens": _integer,
    "min_new_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "n": _integer,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "no_stop_trim": _flag,
    "sampling_seed": _integer,
}
# What the engine computes with: int32, float32 and the 64 bits of a seed, whose sign does not matter.
_RANGES: Mapping[str, tuple[float, float]] = {
    "max_new_tokens": (0, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
    "temperature": (0, 1_000_000),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),  # -1 and 0: all tokens
    "min_p": (0, 1),
    "n": (1, MAX_ROWS),
    "sampling_seed": (-(2**63), 2**64 - 1),
}
# Parameters of SGLang that this engine does not implement, with the values that change nothing (see is_neutral).
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "stream_interval": (1,),
    **dict.fromkeys(
        ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params", "logit_bias"), ()
    ),
}


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, position); ``[len(seeds)]``. Seeds are taken modulo 2**64."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    golden = np.uint64(GOLDEN)
    # The key is mixed first, or neighbouring seeds would walk through overlapping streams.
    bits: np.ndarray = mix64(mix64(key + golden) + (counter + np.uint64(1)) * golden)
    numbers: np.ndarray = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


@torch.inference_mode()
def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: np.ndarray, *, return_kept: bool = False
) -> tuple[list[int], list[float], list[bytes]]:
    """Draw one token a row. logits: ``[R, V]`` float32, V from ``padded_size``; uniform: ``[R]`` float64.

    Returns token ids, log-probabilities in nats (see the module's text for what they are the probability of), and the
    ids of the tokens that were drawn from, int32 and ascending; none where nothing is cut off, and without
    ``return_kept``. With it, log-probabilities are renormalised over these tokens.
    """
    num_rows, block_size = logits.shape[0], min(logits.shape[1], VOCAB_BLOCK)
    kinds = {id(p): p for p in params}.values()  # rows of a request share them
    if any(p.temperature != 1.0 and not p.greedy for p in kinds):
        scale = torch.tensor([1.0 if p.greedy else p.temperature for p in params], device=logits.device)
        logits = logits / scale[:, None]
    top, best = logits.max(dim=-1, keepdim=True)
    weights = torch.exp(logits - top).view(num_rows, -1, block_size)
    blocks = weights.sum(dim=-1, dtype=torch.float64)
    total = blocks.sum(dim=-1, keepdim=True)
    cut = [i for i, p in enumerate(params) if p.truncated] if any(p.truncated for p in kinds) else []
    kept_ids = [b""] * num_rows
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        kept = truncate(weights[rows].flatten(1), [params[i] for i in cut], total[rows])
        weights[rows] = kept.view(len(cut), -1, block_size)
        blocks[rows] = weights[rows].sum(dim=-1, dtype=torch.float64)
        if return_kept:
            total[rows] = blocks[rows].sum(dim=-1, keepdim=True)
            for i, row in zip(cut, kept, strict=True):
                kept_ids[i] = row.nonzero()[:, 0].cpu().numpy().astype("<i4").tobytes()
    u = torch.from_numpy(uniform).to(logits.device)[:, None]
    chosen = _invert(weights, blocks, u)
    if any(p.greedy for p in kinds):
        greedy = torch.tensor([p.greedy for p in params], device=logits.device)
        chosen = torch.where(greedy, best[:, 0], chosen)
    picked = logits.gather(1, chosen[:, None]).double()
    log_probs = (picked - top.double() - total.log())[:, 0]
    return chosen.tolist(), log_probs.tolist(), kept_ids


def _invert(weights: torch.Tensor, blocks: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution in two levels: the index ``[R]`` that ``u`` ``[R, 1]`` falls on.

    An index of weight 0 is never returned: it adds nothing to the running sum, so it is never the first to exceed
    the target, and rounding at the far end is caught by clamping to the first index that reaches the full sum.
    """
    if blocks.shape[1] == 1:
        return _first_above(weights[:, 0].double().cumsum(dim=-1), u * blocks)[:, 0]
    running = blocks.cumsum(dim=-1)
    target = u * running[:, -1:]
    block = _first_above(running, target)
    before = running.gather(1, block) - blocks.gather(1, block)
    inside = weights.gather(1, block[:, :, None].expand(-1, 1, VOCAB_BLOCK))[:, 0].double().cumsum(dim=-1)
    offset = _first_above(inside, target - before)
    return (block * VOCAB_BLOCK + offset)[:, 0]


def _first_above(running: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    first = torch.searchsorted(running, target, right=True)
    last = (running < running[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(first, last)


def truncate(weights: torch.Tensor, params: Sequence[SamplingParams], total: torch.Tensor) -> torch.Tensor:
    """Zero the weights that top-k, top-p or min-p cut off, each judged on the full distribution (SGLang's "joint"
    order): the k largest; the smallest set whose mass reaches p; at least min_p times the largest.

    weights: ``[R, V]``, ``exp(logits - max)``; total: their sum, ``[R, 1]`` float64. Ties go to the smaller id.
    """
    device, size = weights.device, weights.shape[-1]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else size for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device, dtype=torch.float64)[:, None]
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    exact = ordered.double()
    mass_before = exact.cumsum(dim=-1) - exact
    drop = torch.arange(size, device=device)[None] >= top_k
    drop |= (mass_before >= top_p * total) & (top_p < 1.0)
    drop |= exact < min_p * exact[:, :1]
    drop[:, 0] = False
    return torch.zeros_like(weights).scatter(1, ids, ordered.masked_fill(drop, 0.0))


Pair = tuple[float, int]
"""A log-probability in nats, and the token that it belongs to."""


@dataclass(slots=True, kw_only=True)
class LogProbDetails:
    """What one request wants of them, and what was found.

    start: the prompt position that reports begin at, or None for none. top: how many of the likeliest tokens of each
    position. ids: tokens to report at each position.
    input_log_probs, input_top, input_ids: for the prompt positions from ``start + 1`` on, given all before them.
    output_top, output_ids: for each output token.
    """

    start: int | None = None
    top: int = 0
    ids: tuple[int, ...] = ()
    input_log_probs: list[float] = field(default_factory=list)
    input_top: list[list[Pair]] = field(default_factory=list)
    input_ids: list[list[Pair]] = field(default_factory=list)
    output_top: list[list[Pair]] = field(default_factory=list)
    output_ids: list[list[Pair]] = field(default_factory=list)

    def fresh(self) -> LogProbDetails:
        """The same wishes, with nothing found yet."""
        return LogProbDetails(start=self.start, top=self.top, ids=self.ids)

    @torch.inference_mode()
    def read_prompt(self, prompt: tuple[int, ...], blocks: Iterable[torch.Tensor]) -> None:
        """blocks: logits ``[rows, V]`` behind the prompt's positions from ``start`` on, in order. What an earlier call
        found is replaced."""
        assert self.start is not None
        self.input_log_probs, self.input_top, self.input_ids = [], [], []
        following = prompt[self.start + 1 :]
        for logits in blocks:
            at = len(self.input_log_probs)
            tokens = following[at : at + logits.shape[0]]
            log_probs = torch.log_softmax(logits[: len(tokens)].double(), dim=-1)
            index = torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]
            self.input_log_probs += log_probs.gather(1, index)[:, 0].tolist()
            self._append(log_probs, self.input_top, self.input_ids)

    @torch.inference_mode()
    def read_output(self, logits: torch.Tensor, temperature: float) -> None:
        """logits: ``[V]``, those that the next token is drawn from."""
        self._append(torch.log_softmax(logits.double() / temperature, dim=-1)[None], self.output_top, self.output_ids)

    def _append(self, log_probs: torch.Tensor, top: list[list[Pair]], named: list[list[Pair]]) -> None:
        if self.top:
            values, ids = log_probs.topk(self.top, dim=-1)
            top += [list(zip(*row, strict=True)) for row in zip(values.tolist(), ids.tolist(), strict=True)]
        if self.ids:
            rows = log_probs[:, list(self.ids)].tolist()
            named += [list(zip(row, self.ids, strict=True)) for row in rows]
