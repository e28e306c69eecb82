"""What was sent and what was sampled in one turn, and the rows that the turns of a sample make.

Rows are made of token ids alone. A turn extends the longest row whose tokens are a prefix of its prompt; what lies
between has a loss mask of 0. A turn without such a row opens one. So each sampled token is trained exactly once, and
nothing is trained that was not sampled, whatever the agent did with the texts: branches, retries, sub-agents.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from buffer_rl.errors import RolloutError
from buffer_rl.records.experts import joined, num_recomputed
from buffer_rl.records.groups import Sample, Status, VersionSpan, tile
from buffer_rl.records.sample import STATUS_OF_REASON


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model: the ids that were sent, and those that were sampled behind them.

    prompt_ids: ``[prompt_length]``, at least one. output_ids: ``[num_tokens]``, with the token or the stop string that
    ended the turn. log_probs: of each output token, in nats, ``[num_tokens]``. spans: which weight version sampled
    which output tokens; they tile ``output_ids``, or are empty if no version is known. kept: see
    ``Sample.rollout_kept_tokens``, ``[num_tokens]``; None if the engine did not return them. experts: of the tokens of
    both but the last, likewise; see ``Sample.rollout_routed_experts``. Those of the first ``experts_start`` tokens are
    in ``base``, an earlier turn of the session that this one continues.
    finish_reason: stop, length or abort. matched: the token id or the string that stopped it, None if unknown.
    digest: of the prompt and the parameters (``turn_digest``). ordinal: how often the same was asked before in the
    session. Both together are the turn's identity.

    Raises RolloutError if the lengths do not fit.

    Example:
        digest = turn_digest([5, 8], {"temperature": 1.0})
        spans = (VersionSpan(7, 0, 2),)
        Turn(prompt_ids=(5, 8), output_ids=(6, 1), log_probs=(-0.5, -0.1), spans=spans, matched=1, digest=digest)
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    spans: tuple[VersionSpan, ...] = ()
    kept: tuple[bytes, ...] | None = None
    experts: np.ndarray | None = field(default=None, compare=False)
    experts_start: int = field(default=0, compare=False)
    base: Turn | None = field(default=None, compare=False, repr=False)
    finish_reason: str = "stop"
    matched: int | str | None = None
    digest: str
    ordinal: int = 0

    def __post_init__(self) -> None:
        length, fault = len(self.output_ids), ""
        if not self.prompt_ids:
            fault = "it has no prompt"
        elif len(self.log_probs) != length or len(self.output_ids if self.kept is None else self.kept) != length:
            fault = f"{len(self.log_probs)} log_probs, {len(self.kept or ())} kept, {length} output tokens"
        elif self.experts is not None and self.experts_start + len(self.experts) != self.num_tokens - 1:
            fault = f"experts of {len(self.experts)} tokens for {len(self.prompt_ids)} + {length}"
        elif self.spans and not tile(self.spans, length):
            fault = f"its version spans {[(s.start, s.end) for s in self.spans]} do not tile {length} output tokens"
        elif self.finish_reason not in STATUS_OF_REASON:
            fault = f"unknown finish reason {self.finish_reason!r}"
        if fault:
            expected = f"a prompt, one log_prob an output token, one of {', '.join(STATUS_OF_REASON)}"
            raise RolloutError(fault, where=f"turn {self.digest[:12]}/{self.ordinal}", expected=expected)

    def whole_experts(self) -> np.ndarray | None:
        """Of all tokens but the last, ``[num_tokens - 1, layers, experts a token]``."""
        if self.experts is None or not self.experts_start:
            return self.experts
        before = None if self.base is None else self.base.whole_experts()
        return joined(None if before is None else before[: self.experts_start], self.experts, self.experts_start)

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.prompt_ids) + len(self.output_ids)

    def on(self, base: Turn | None) -> Turn | None:
        """This turn with ``base`` for the experts of its first tokens; None if it does not have them."""
        return None if base is None or base.num_tokens <= self.experts_start else replace(self, base=base)

    @property
    def order(self) -> tuple[int, str, int]:
        """Place among the turns of a sample: prompt length, digest, ordinal. A turn's parents have shorter prompts, so
        they come before it, and the order of completion has no influence."""
        return len(self.prompt_ids), self.digest, self.ordinal


def turn_digest(prompt_ids: Sequence[int], parameters: Mapping[str, Any]) -> str:
    """Digest of what was asked: hexadecimal, 64 characters. parameters: of sampling, as JSON holds them."""
    said = json.dumps(parameters, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(_bytes(prompt_ids) + said.encode()).hexdigest()


def continued(turns: Iterable[Turn], prompt_ids: Sequence[int]) -> Turn | None:
    """The longest of the turns with experts whose tokens a prompt begins with; None if there is none."""
    sent = _bytes(prompt_ids)
    found = (turn for turn in turns if turn.experts is not None)
    fitting = (turn for turn in found if sent.startswith(_bytes([*turn.prompt_ids, *turn.output_ids])))
    return max(fitting, key=lambda turn: turn.num_tokens, default=None)


_OF_SAMPLE = (
    *("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "rollout_kept_tokens"),
    *("rollout_routed_experts", "status"),
)


@dataclass(slots=True, kw_only=True)
class Row:
    """One row of a sample: its fields but ``turns`` have the names and the shapes of ``Sample``.

    The prompt is that of the first turn. loss_mask is 1 for each token that a turn of this row sampled, else 0, with a
    log-probability of 0. status: of the last turn. turns: in the order of their tokens, at least one.
    """

    tokens: list[int]
    response_length: int = 0
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    weight_versions: list[VersionSpan] = field(default_factory=list)
    rollout_kept_tokens: list[bytes] | None = field(default_factory=list)
    rollout_routed_experts: np.ndarray | None = None
    experts_recomputed: int = 0
    status: Status = Status.PENDING
    turns: list[Turn] = field(default_factory=list)

    def sample(self, prompt: Sample, part: int) -> Sample:
        """``prompt`` with this row, whose values it takes over, as its part ``part``; its response's text is left as it
        is."""
        facts = {name: getattr(self, name) for name in _OF_SAMPLE}
        if self.experts_recomputed:
            facts["experts_recomputed"] = self.experts_recomputed
        return prompt.changed(part=part, **facts)

    def turn_ends(self) -> list[int]:
        """Of each turn the place of its last token in the response, ``[num_turns]``."""
        start = len(self.tokens) - self.response_length
        return [len(turn.prompt_ids) + len(turn.output_ids) - start - 1 for turn in self.turns]

    def _append(self, turn: Turn) -> None:
        known = self.rollout_routed_experts
        reaches = known is not None and turn.experts_start <= len(known)
        if reaches:
            self.rollout_routed_experts = joined(known, turn.experts, turn.experts_start)
        else:
            whole = turn.whole_experts()
            self.rollout_routed_experts = joined(known, whole, 0) if self.turns else whole
        self.experts_recomputed += 0 if turn.experts is None else num_recomputed(turn.spans)
        gap = turn.prompt_ids[len(self.tokens) :]
        start = self.response_length + len(gap)
        self.tokens += [*gap, *turn.output_ids]
        self.response_length = start + len(turn.output_ids)
        self.loss_mask += [0] * len(gap) + [1] * len(turn.output_ids)
        self.rollout_log_probs += [0.0] * len(gap) + [*turn.log_probs]
        self.weight_versions += [VersionSpan(s.version, s.start + start, s.end + start) for s in turn.spans]
        if turn.kept is None or self.rollout_kept_tokens is None:
            self.rollout_kept_tokens = None
        else:
            self.rollout_kept_tokens += [b""] * len(gap) + [*turn.kept]
        self.status = STATUS_OF_REASON[turn.finish_reason]
        self.turns.append(turn)


def rows(turns: Iterable[Turn]) -> list[Row]:
    """The rows of one sample, in the order in which they are opened; they depend on the set of turns alone.

    A turn without output tokens makes no row and extends none. Raises RolloutError if two turns have one identity.
    """
    found: list[Row] = []
    written: list[bytes] = []  # the tokens of each row as bytes, which compare many times faster than numbers
    last: Turn | None = None
    for turn in sorted(turns, key=lambda turn: turn.order):
        if last is not None and last.order == turn.order:
            where = f"turn {turn.digest[:12]}/{turn.ordinal}"
            raise RolloutError("two turns have one identity", where=where, expected="an ordinal for each repetition")
        last = turn
        if not turn.output_ids:
            continue
        sent = _bytes(turn.prompt_ids)
        prefixes = [number for number, tokens in enumerate(written) if sent.startswith(tokens)]
        if prefixes:
            number = max(prefixes, key=lambda number: (len(written[number]), -number))
        else:
            number = len(found)
            found.append(Row(tokens=list(turn.prompt_ids)))
            written.append(b"")
        found[number]._append(turn)
        written[number] = sent + _bytes(turn.output_ids)
    return found


def _bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
