"""What the work of a run costs, from its own timeline and metrics: seconds of an engine, a rollout worker, a trainer.

Few parameters, each a median or a least-squares fit over the run's steps but the first, without outliers:

    generation   an engine with n running requests decodes a token of each in ``decode_step + decode_token * n``
    rewards      ``score`` for each group, one after another in a rollout worker
    update       ``update_fixed + update_token * tokens / ranks``, of the tokens of a step's responses
    passes       ``forward_token * tokens / ranks`` for each pass of a frozen model or old log-probabilities
    fixed parts  of a ticket, before an update, of a publication and of it the pause of engines; the rest of a step

Lengths are those of the samples that the run shows. What the timeline does not tell is listed (``Recorded.unknown``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from buffer_rl.errors import DataError
from buffer_rl.observe.metrics import read_metrics, steps_of
from buffer_rl.observe.run_folder import SAMPLES_FILE, records_in
from buffer_rl.observe.timeline import TRACE_FILE, WorkSpan, read_trace
from buffer_rl.plan.roles import ACTOR, MODEL_FIELDS

FEWEST_STEPS = 3
PRIOR = 0.3
"""Standard deviation of the share of a first term, before any value is seen."""
STEP_SHARE, FIXED_SHARE = 0.5, 0.0
"""Shares that are expected: of what a decoding step takes whatever its batch, and of the fixed part of an update."""
DETERMINED = 0.7
"""By how much the values of a run must narrow a share, for it to count as determined."""
LEAST_NOISE = 1e-4
"""Relative to the mean value."""
OUTLIER = 4.0
"""Median absolute deviations from a fit beyond which a step is left out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, of processes that share no core with others. See the module."""

    decode_step: float = 0.0
    decode_token: float = 0.0
    score: float = 0.0
    ticket: float = 0.0
    prepare: float = 0.0
    forward_token: float = 0.0
    update_fixed: float = 0.0
    update_token: float = 0.0
    publish: float = 0.0
    pause: float = 0.0
    rest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a run's options its costs depend on. samples: of a group. engines, ranks: processes of each."""

    groups: int
    samples: int
    engines: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run: its costs, and what they were found from.

    residuals: of each fit, the median of its relative errors. unknown: what the trace does not tell. lengths: tokens of
    the responses of each group that the run shows. drops: share of the groups that a filter dropped. passes: fields
    that the trainer computes before an update. step_s, ticket_s, update_s: measured means.
    """

    costs: Costs
    lengths: Sequence[Sequence[int]]
    drops: float
    passes: tuple[str, ...]
    num_steps: int
    step_s: float
    ticket_s: float
    update_s: float
    residuals: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the fits read of one step. seconds: from the end of the publication before to that of its own. tokens: of
    the responses that it trained on; generated: by its tickets, with those of dropped groups."""

    seconds: float
    tokens: float
    generated: float
    dropped: float
    longest: float
    times: Mapping[str, float]


def fitted(folder: str | Path, shape: Shape) -> Recorded:
    """The costs of the run in ``folder``. Raises DataError if it has no trace, or too few steps for a fit."""
    spans = read_trace(folder)
    if not any(span.name == "update" for span in spans.get(ACTOR, ())):
        where, expected = str(Path(folder) / TRACE_FILE), "the folder (--run-dir) of a run that trained"
        raise DataError("there is no timeline of training steps", where=where, expected=expected)
    steps = _steps(spans, read_metrics(folder), shape)
    if len(steps) < FEWEST_STEPS:
        what = f"{len(steps)} steps without a checkpoint or an evaluation follow the first one"
        hint = "--num-rollout 12, and a larger --save-interval and --eval-interval"
        raise DataError(what, where=str(folder), expected=f"at least {FEWEST_STEPS} for a fit", hint=hint)
    unknown: list[str] = []
    residuals: dict[str, float] = {}
    passes = tuple(sorted({span.name for span in spans[ACTOR]} & set(MODEL_FIELDS)))
    seconds = [value for name in passes for value in _seconds(spans, ACTOR, name)[1:]]
    costs = Costs(
        **_generation(steps, shape, residuals, unknown),
        **_training(steps, shape, seconds, residuals, unknown),
        **_fixed(steps, spans),
    )
    lengths = _lengths(Path(folder), steps, shape, unknown)
    dropped = fmean(step.dropped for step in steps)
    if others := sorted(set(spans) - {"rollout", ACTOR, "publish", "save"}):
        left_out = ", ".join(others)
        unknown.append(f"what depends on roles with processes of their own, whose work is left out: {left_out}")
    unknown.append("tokens of prompts: their cost is part of that of the responses' tokens")
    unknown.append("how an update scales with ranks: here its token part is divided by them")
    return Recorded(
        costs=costs,
        lengths=lengths,
        drops=dropped / (dropped + shape.groups),
        passes=passes,
        num_steps=len(steps),
        step_s=fmean(step.seconds for step in steps),
        ticket_s=fmean(_seconds(spans, "rollout", "rollout")[1:]),
        update_s=fmean(step.times["update"] for step in steps),
        residuals=residuals,
        unknown=tuple(unknown),
    )


def _steps(spans: Mapping[str, Sequence[WorkSpan]], lines: Sequence[Mapping[str, Any]], shape: Shape) -> list[Step]:
    """Every step but the first one, and but those with a checkpoint or an evaluation beside them."""
    metrics = steps_of(lines)
    ends = {span.step: span.end for span in spans.get("publish", ()) if span.name == "publish"}
    ends = ends or {span.step: span.end for span in spans[ACTOR] if span.name == "update"}
    others = [span for members in spans.values() for span in members if span.name in ("save", "evaluate")]
    steps = []
    for before, now in pairwise(sorted(step for step in ends if step >= 0)):
        start, end, found = ends[before], ends[now], metrics.get(now, {})
        if now != before + 1 or "perf/step_time" not in found or any(s.start < end and s.end > start for s in others):
            continue
        steps.append(_step(end - start, found, shape))
    return steps


def _step(seconds: float, found: Mapping[str, float], shape: Shape) -> Step:
    mean = found.get("rollout/response_len/mean", 0.0)
    trained = mean * found.get("rollout/num_groups", shape.groups) * shape.samples
    prefix = "production/" if "production/generated_tokens" in found else "rollout/"
    drops = (name for name in found if name.startswith(f"{prefix}drop_") and not name.endswith("too_old"))
    times = {name.removeprefix("perf/").removesuffix("_time"): v for name, v in found.items() if name.endswith("_time")}
    return Step(
        seconds=seconds,
        tokens=trained,
        generated=found.get(prefix + "generated_tokens", trained),
        dropped=sum(found[name] for name in drops),
        longest=found.get(prefix + "response_len/max", mean),
        times={"update": 0.0, "train": 0.0, "publish": 0.0, "rollout": 0.0, **times},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """``a * x + b * y`` near each value. residual: the median of the relative errors. is_determined: whether
    the values tell the two terms apart."""

    a: float
    b: float
    residual: float
    is_determined: bool


def least_squares(rows: Sequence[tuple[float, float]], values: Sequence[float], share: float) -> Fit:
    """Fit ``(x, y)`` of each row to its value, without negative terms. What is far from a first fit is left out.

    share: what the first term is of the mean value, give or take ``PRIOR``, before any value is seen. It decides as far
    as noise, or rows that hardly differ, leave it open.
    """
    given, wanted = np.asarray(rows, dtype=float), np.asarray(values, dtype=float)
    middle = float(np.mean(wanted))
    if middle <= 0:
        return Fit(a=0.0, b=0.0, residual=0.0, is_determined=False)
    chosen = np.ones(len(wanted), dtype=bool)
    for _ in range(2):
        free = given @ np.linalg.lstsq(given[chosen], wanted[chosen], rcond=None)[0]
        noise = max(LEAST_NOISE * middle, float(np.sqrt(np.mean((free - wanted)[chosen] ** 2))))
        prior = np.asarray([[float(np.mean(given[:, 0])) / middle, 0.0]]) / PRIOR
        system = np.concatenate([given[chosen] / noise, prior])
        found = _non_negative(system, np.append(wanted[chosen] / noise, share / PRIOR))
        errors = np.abs(given @ found - wanted)
        chosen = errors <= max(OUTLIER * float(np.median(errors)), LEAST_NOISE * middle)
    spread = float(np.sqrt((prior @ np.linalg.pinv(system.T @ system) @ prior.T)[0, 0]))  # 1: as wide as before
    residual = float(np.median(errors / np.maximum(wanted, LEAST_NOISE * middle)))
    return Fit(a=float(found[0]), b=float(found[1]), residual=residual, is_determined=spread < DETERMINED)


def _non_negative(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares with two parameters, neither of which is negative."""
    both = np.linalg.lstsq(rows, values, rcond=None)[0]
    if min(both) >= 0:
        return np.asarray(both)
    squares = np.maximum(np.sum(rows**2, axis=0), 1e-30)
    alone = np.diag(np.maximum(0.0, rows.T @ values / squares))  # a row each, the other parameter 0
    best: np.ndarray = alone[int(np.argmin([np.sum((rows @ one - values) ** 2) for one in alone]))]
    return best


def _generation(
    steps: Sequence[Step], shape: Shape, residuals: dict[str, float], unknown: list[str]
) -> dict[str, float]:
    """The parameters of engines and rewards."""
    shares = [step.generated / shape.engines for step in steps]
    spent = [step.times.get("generate", step.times["rollout"]) for step in steps]
    depths = [step.longest * _rounds(step.dropped, shape.groups) for step in steps]
    fit = least_squares(list(zip(depths, shares, strict=True)), spent, STEP_SHARE)
    residuals["generation"] = fit.residual
    if not fit.is_determined:
        what = "what a decoding step takes whatever its batch"
        unknown.append(f"{what}: noise leaves it open, and half of generation is expected")
    scores = [step.times.get("reward", 0.0) / (shape.groups + step.dropped) for step in steps]
    residuals["rewards"] = _spread(scores)
    return {"decode_step": fit.a, "decode_token": fit.b, "score": median(scores)}


def _rounds(dropped: float, groups: int) -> float:
    """How many groups follow one another in the slot of a ticket that needs most of them, on average: a filter drops
    a group with the share ``q``, and the last of P slots ends after ``1 + log P / log 1/q`` groups."""
    share = dropped / (dropped + groups)
    return 1.0 if share * groups < 1 else 1.0 + math.log(groups) / -math.log(share)


def _training(
    steps: Sequence[Step], shape: Shape, seconds: Sequence[float], residuals: dict[str, float], unknown: list[str]
) -> dict[str, float]:
    """The parameters of the trainer. seconds: of each pass."""
    shares = [step.tokens / shape.ranks for step in steps]
    fit = least_squares([(1.0, share) for share in shares], [step.times["update"] for step in steps], FIXED_SHARE)
    residuals["update"] = fit.residual
    if not fit.is_determined:
        unknown.append("a fixed part of an update: noise leaves it open, and all in proportion to tokens is expected")
    forward = median(seconds) / fmean(shares) if seconds else 0.0
    if seconds:
        residuals["passes"] = _spread(seconds)
    return {"update_fixed": fit.a, "update_token": fit.b, "forward_token": forward}


def _fixed(steps: Sequence[Step], spans: Mapping[str, Sequence[WorkSpan]]) -> dict[str, float]:
    """Medians of what depends on no number of tokens."""

    def typical(seconds: Callable[[Step], float]) -> float:
        return max(0.0, median(seconds(step) for step in steps))

    pauses = _seconds(spans, "publish", "pause")[1:]
    tickets = _seconds(spans, "rollout", "rollout")[1:]
    generated = typical(lambda step: step.times.get("generate", step.times["rollout"]))
    passes = sum(median(_seconds(spans, ACTOR, name)) for name in MODEL_FIELDS if _seconds(spans, ACTOR, name))
    return {
        "ticket": max(0.0, median(tickets) - generated) if tickets else 0.0,
        "prepare": max(0.0, typical(lambda step: step.times["train"] - step.times["update"]) - passes),
        "publish": typical(lambda step: step.times["publish"]),
        "pause": median(pauses) if pauses else typical(lambda step: step.times["publish"]),
        "rest": typical(lambda step: step.seconds - sum(step.times[name] for name in ("rollout", "train", "publish"))),
    }


def _lengths(folder: Path, steps: Sequence[Step], shape: Shape, unknown: list[str]) -> list[list[int]]:
    """Tokens of responses by group: of the samples that the run shows; without any, the mean of each step."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for record in records_in(folder, SAMPLES_FILE):
        if record.get("kind") != "eval" and record.get("versions"):
            groups[record["rollout_id"], str(record["uid"])].append(int(record["versions"][-1][2]))
    if groups:
        return list(groups.values())
    unknown.append("lengths of single responses: the run shows no samples, so each is as long as its step's mean")
    return [[max(1, round(step.tokens / (shape.groups * shape.samples)))] for step in steps]


def _seconds(spans: Mapping[str, Sequence[WorkSpan]], role: str, name: str) -> list[float]:
    return [span.seconds for span in spans.get(role, ()) if span.name == name]


def _spread(values: Sequence[float]) -> float:
    """Median of the relative deviations from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values) / middle if middle else 0.0
