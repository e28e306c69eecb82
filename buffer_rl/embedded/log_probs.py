"""Log-probabilities beyond that of each drawn token: those of the prompt's tokens, of the likeliest tokens of each
position, and of tokens that the request names. Teachers and evaluations ask for them.

Those of output tokens are ``log_softmax(logits / temperature)``, as drawn; those of the prompt have temperature 1.
Where top-k, top-p or min-p cut tokens off, all keep the probabilities of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

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
            if not tokens:
                return
            log_probs = torch.log_softmax(logits[: len(tokens)].double(), dim=-1)
            index = torch.tensor(tokens, device=logits.device)[:, None]
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
