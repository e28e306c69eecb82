"""Compares the engine's log-probabilities of sampled tokens with the trainer's, before a run's first optimizer step.

Both compute the same quantity from the same weights, so they differ by rounding alone. Where they do not, the engine
sampled from another distribution than the one that is trained, which no metric of a run shows before it collapses.
Tokens of older weights say nothing about that: only rows are compared whose tokens are all of the weights that are
trained (``rows_of_version``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import DataError, TrainError
from buffer_rl.options.section import required
from buffer_rl.plan.algorithm import trains_on_older
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch

MAX_ROWS = 8
MAX_SHOWN = 3
FEW_TOKENS = 4
"""At the beginning of a response: where a prompt that was rendered in another way shows most."""

CAUSES: Mapping[str, str] = {
    "weights": "other weights: the engine does not serve what the trainer holds (another folder behind --router-url, a "
    "publication that an engine confirmed without taking it, a model provider or converter that is not its own "
    "inverse)",
    "temperature": "another temperature: a request's temperature is not --rollout-temperature",
    "prompt": "another prompt: tokens of chat template or tokenizer that the engine was sent are not those of the row",
    "dtype": "number formats: --engine-dtype, or a quantized engine, beside the trainer's, float32 or --bf16; "
    "in a mixture of experts, tokens go to other experts then (--replay-routed-experts has the trainer follow)",
    "truncated": "truncated sampling: an engine that renormalises its log-probabilities over top-k, top-p or min-p, "
    "and a trainer that does not (--replay-kept-tokens, with a trainer that reads the column kept_tokens)",
    "positions": "positions: rope scaling or a sliding window that engine and trainer apply differently",
    "unsampled": "tokens that the engine did not sample (a tool's, a user's) whose loss mask is 1; theirs must be 0",
}
"""Why engine and trainer differ, the most frequent cause first; the last one is named only where the rows show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbGap:
    """How far engine and trainer are apart: the mean and the largest ``|engine - trainer|`` of a token, in nats."""

    mean: float = 0.0
    largest: float = 0.0
    num_tokens: int = 0

    def __str__(self) -> str:
        if not self.num_tokens:
            return (
                "the engine's log-probabilities were not compared with the trainer's: no row of the first step has "
                "rollout_log_probs, of the weights that it trains, for a token that is trained on"
            )
        return (
            f"engine and trainer agree on the log-probabilities of {self.num_tokens} sampled tokens: "
            f"{self.mean:.2g} nats apart on average, {self.largest:.2g} at most"
        )

    @staticmethod
    def worst(_role: str, gaps: Sequence[LogProbGap]) -> LogProbGap:
        """The gap of a role's ranks: the largest mean and the largest token of any, and the tokens of all."""
        return LogProbGap(
            mean=max(gap.mean for gap in gaps),
            largest=max(gap.largest for gap in gaps),
            num_tokens=sum(gap.num_tokens for gap in gaps),
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """One row's compared tokens: offsets in the response ``[n]``, and both log-probabilities ``[n]`` float64."""

    row_id: RowId
    offsets: np.ndarray
    engine: np.ndarray
    trainer: np.ndarray

    @property
    def gaps(self) -> np.ndarray:
        """``|engine - trainer|``; infinite where one of them is not finite."""
        gaps: np.ndarray = np.nan_to_num(np.abs(self.engine - self.trainer), nan=np.inf, posinf=np.inf)
        return gaps

    def __str__(self) -> str:
        gaps = self.gaps
        at = int(gaps.argmax())
        return (
            f"{self.row_id}: {gaps.mean():.3g} nats a token over {len(gaps)}; at response token {self.offsets[at]} the "
            f"engine says {self.engine[at]:.4f}, the trainer {self.trainer[at]:.4f}"
        )


def rows_of_version(args: Args, batch: TrainBatch) -> np.ndarray:
    """Which rows the engine sampled from the weights that are trained on them, ``[num_rows]`` bool: those whose column
    ``weight_version``, of the oldest token, is the number of the step. All rows, in a schedule without older tokens."""
    if not trains_on_older(args):
        return np.ones(len(batch), dtype=bool)
    versions = batch.columns.get("weight_version")
    return np.zeros(len(batch), dtype=bool) if versions is None else np.asarray(versions) == batch.rollout_id


def compare_log_probs(
    args: Args, batch: TrainBatch, log_probs: Callable[[TrainBatch], Sequence[np.ndarray] | None], *, where: str
) -> LogProbGap:
    """Compare the unmasked tokens of at most ``MAX_ROWS`` rows of ``batch``: the longest one, and others from all over
    it, so that several prompts are among them.

    log_probs: the trainer's, per row ``[response_length]``, in nats; None on a rank that does not have them. Tokens
    where these are not finite are passed over: they are for ``--max-non-finite-steps``. Rows of foreign groups, whose
    ``rollout_log_probs`` are NaN, are passed over too, and so are rows with tokens of older weights. The gap has no
    tokens where there is nothing to compare: no such row has an unmasked token, the rows have no ``rollout_log_probs``,
    or this rank no log-probabilities.

    Raises TrainError, naming ``where``, the likely causes and the rows, if the mean gap is above
    ``args.max_logprob_diff`` or is not finite; DataError for a row whose ``rollout_log_probs`` are not one a token."""
    chosen = _spread(args, batch)
    if not chosen:
        return LogProbGap()
    few = batch.select(chosen)
    computed = log_probs(few)  # whatever columns there are: all ranks of a backend may be needed
    if computed is None or "rollout_log_probs" not in few.columns:
        return LogProbGap()
    rows = []
    columns = (few.columns["loss_mask"], few.columns["rollout_log_probs"], computed, rows_of_version(args, few))
    for row_id, mask, engine, trainer, is_comparable in zip(few.row_ids, *columns, strict=True):
        if _is_unknown(engine) or not is_comparable:
            continue
        if len(engine) != len(mask):
            what = f"rollout_log_probs has {len(engine)} values for a response of {len(mask)} tokens"
            raise DataError(what, where=str(row_id), expected="one value for each response token")
        offsets = np.flatnonzero((np.asarray(mask) != 0) & np.isfinite(trainer))
        if len(offsets):
            pair = (np.asarray(values, dtype=np.float64)[offsets] for values in (engine, trainer))
            rows.append(_Row(row_id, offsets, *pair))
    if not rows:
        return LogProbGap()
    gaps = np.concatenate([row.gaps for row in rows])
    gap = LogProbGap(mean=float(gaps.mean()), largest=float(gaps.max()), num_tokens=len(gaps))
    if gap.mean > required(args.max_logprob_diff, "max_logprob_diff"):
        raise _too_far(args, gap, rows, where)
    return gap


def _spread(args: Args, batch: TrainBatch) -> list[int]:
    """Indices of rows with unmasked tokens that the engine sampled from the weights that are trained. Where no row has
    one, the first row: every rank that has rows computes log probabilities, even of masked tokens, since a backend may
    need all ranks for that."""
    masks = batch.columns["loss_mask"] if len(batch) else []
    engine, comparable = batch.columns.get("rollout_log_probs", masks), rows_of_version(args, batch)
    trained = [i for i in range(len(batch)) if comparable[i] and np.any(masks[i]) and not _is_unknown(engine[i])]
    trained = trained or list(range(len(batch)))[:1]
    if len(trained) <= MAX_ROWS:
        return trained
    longest = max(trained, key=lambda index: batch.lengths[index])
    others = [index for index in trained if index != longest]
    step = len(others) / (MAX_ROWS - 1)
    return sorted([longest, *(others[int(number * step)] for number in range(MAX_ROWS - 1))])


def _is_unknown(log_probs: np.ndarray) -> bool:
    """Whether these are the ``rollout_log_probs`` of a row that no engine sampled (see ``GroupConverter``)."""
    return bool(len(log_probs) and np.isnan(log_probs).all())


def likely_causes(args: Args, rows: Sequence[_Row]) -> list[str]:
    """Keys of ``CAUSES``: first the causes for which the tokens are evidence, then the others by frequency."""
    limit = required(args.max_logprob_diff, "max_logprob_diff")
    where, gaps = np.concatenate([row.offsets for row in rows]), np.concatenate([row.gaps for row in rows])
    ours, theirs = np.concatenate([row.engine for row in rows]), np.concatenate([row.trainer for row in rows])
    early, late = where < FEW_TOKENS, where >= np.median(where)
    truncates = args.rollout_top_p < 1.0 or args.rollout_top_k > 0 or args.rollout_min_p > 0.0
    evidence = {
        "unsampled": bool(np.all(ours[gaps > limit] == 0.0)),
        "truncated": truncates and bool(np.all(ours - theirs > -limit / 10)),
        "prompt": _is_far_only(gaps, early, limit),
        "positions": _is_far_only(gaps, late, limit),
    }
    shown = [cause for cause, speaks in evidence.items() if speaks]
    return [*shown, *(cause for cause in CAUSES if cause not in shown and cause != "unsampled")]


def _is_far_only(gaps: np.ndarray, part: np.ndarray, limit: float) -> bool:
    """Whether the tokens of ``part`` are far apart on average and the others are not; a few tokens say nothing."""
    inside, outside = gaps[part], gaps[~part]
    enough = min(len(inside), len(outside)) >= FEW_TOKENS
    return bool(enough and inside.mean() > limit and outside.mean() < limit / 10)


def _too_far(args: Args, gap: LogProbGap, rows: Sequence[_Row], where: str) -> TrainError:
    causes = enumerate(likely_causes(args, rows), start=1)
    listed = "".join(f"\n    {number}. {CAUSES[cause]}" for number, cause in causes)
    worst = sorted(rows, key=lambda row: -row.gaps.mean())[:MAX_SHOWN]
    shown = "".join(f"\n    {row}" for row in worst)
    return TrainError(
        f"before the first optimizer step, the engine's log-probabilities are {gap.mean:.3g} nats a token away from "
        f"the trainer's (mean of {gap.num_tokens} tokens of {len(rows)} rows, at most {gap.largest:.3g}){shown}",
        where=where,
        expected=f"at most --max-logprob-diff {args.max_logprob_diff:g} on average",
        hint=f"likely causes, the most likely first:{listed}\n  '--max-logprob-diff none' trains all the same",
        see="docs/troubleshooting.md#engine-and-trainer-disagree",
    )


def batch_of(sequences: Sequence[Sequence[int]], num_tokens: int) -> TrainBatch:
    """A batch of sequences of token ids, of which the last ``num_tokens`` are the response."""
    uid, count = GroupUid("publication", 0, 0), len(sequences)
    columns: dict[str, Any] = {
        "tokens": [np.asarray(sequence, dtype=np.int32) for sequence in sequences],
        "response_length": np.full(count, num_tokens, dtype=np.int32),
        "loss_mask": [np.ones(num_tokens, dtype=np.float32) for _ in range(count)],
    }
    row_ids = [RowId(uid, index, 0) for index in range(count)]
    return TrainBatch(rollout_id=0, task="publication", row_ids=row_ids, columns=columns)
