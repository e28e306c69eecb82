"""The five lines at the top of a report: prompts, tokens, weights, rewards, scale. Each is right, wrong with what and
where, or unknown with why.

Each is a pure function of what the run's folder holds, as ``Evidence``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from buffer_rl.errors import short_repr
from buffer_rl.observe.metrics import PARTS_OF_ROLLOUTS
from buffer_rl.observe.run_folder import SAMPLES_FILE, RunFacts
from buffer_rl.plan.algorithms import LOSSES, Divisor
from buffer_rl.plan.roles import ACTOR, CRITIC

MAX_FAULTS = 5
"""That a line names; the others are counted."""
GAP = "train/train_rollout_logprob_abs_diff"
_SAME = 1e-5  # relative: of sums in float32 and float64
_MISSING = object()
_UNTRAINED = ("failed", "aborted")  # statuses of samples whose reward must not count
_NOT_FINITE = ("nan", "inf", "-inf")  # as a file of JSON holds them


class State(StrEnum):
    """What a line says."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line. text: what was found, or why nothing is known. faults: what is wrong, and where."""

    name: str = ""
    state: State
    text: str
    faults: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """What the ledger of a run says. unread: why it could not be read; the rest is empty then.

    faults: what contradicts its accounting, such as a group in quarantine that was trained. commits: rollout, step and
    number of groups. counts: groups by state."""

    unread: str = ""
    faults: Sequence[str] = ()
    commits: Sequence[tuple[int, int, int]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


UNREAD = LedgerFacts(unread="the ledger was not read")


@dataclass(kw_only=True)
class Evidence:
    """What the folder of a run holds: its metrics and samples, line by line."""

    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]] = ()
    facts: RunFacts = field(default_factory=RunFacts)
    ledger: LedgerFacts = UNREAD

    @cached_property
    def steps(self) -> Mapping[int, Mapping[str, float | None]]:
        """The metrics of each training step, with None for a number that is not finite; of a step that was done twice,
        the later ones."""
        steps: dict[int, dict[str, float | None]] = {}
        for record in self.metrics:
            if record.get("kind") != "eval":
                numbers = {name: value for name, value in record.items() if "/" in name}
                steps.setdefault(int(record["step"]), {}).update(numbers)
        return steps

    @property
    def trained(self) -> list[int]:
        """The steps that have metrics of the trainer, ascending."""
        return sorted(step for step, metrics in self.steps.items() if any(n.startswith("train/") for n in metrics))

    def of_metric(self, name: str) -> dict[int, float | None]:
        """A metric by step, of the steps that have it."""
        return {step: metrics[name] for step, metrics in sorted(self.steps.items()) if name in metrics}


def checks_of(evidence: Evidence) -> list[Check]:
    """The five lines."""
    return [replace(check(evidence), name=check.__name__) for check in (prompts, tokens, weights, rewards, scale)]


def prompts(evidence: Evidence) -> Check:
    """None lost, none twice: the ledger's accounting holds, and agrees with the metrics on each step."""
    ledger = evidence.ledger
    if ledger.unread:
        return _unknown(ledger.unread)
    committed = {rollout: groups for rollout, _, groups in ledger.commits}
    faults = [f"ledger: {fault}" for fault in ledger.faults]
    missing = [step for step in evidence.trained if step not in committed]
    faults += [f"step {step} was trained, and the ledger has no commit of it" for step in missing]
    for step, groups in evidence.of_metric("rollout/num_groups").items():
        if groups is not None and committed.get(step, groups) != groups:
            faults.append(f"step {step} trained on {groups:g} prompts, and the ledger has committed {committed[step]}")
    if faults:
        return _wrong(faults)
    if not committed:
        return _unknown("no step is committed yet")
    others = [f"{count} {state}" for state, count in ledger.counts.items() if count and state in _OTHER_STATES]
    text = f"{sum(committed.values())} prompts, each trained once, in {len(committed)} steps"
    return _right("; ".join(filter(None, (text, ", ".join(others)))))


_OTHER_STATES = ("leased", "finished", "rejected", "quarantined")


def tokens(evidence: Evidence) -> Check:
    """Trained as sampled: engine and trainer agree on the log-probability of the tokens that both computed."""
    gaps = evidence.of_metric(GAP)
    limit = evidence.facts.option("--max-logprob-diff", _MISSING)
    if evidence.facts.is_supervised:
        return _unknown("supervised: the tokens are the data's own, and none were sampled")
    if not gaps:
        compared = "no step compared the log-probabilities of engine and trainer"
        return _unknown(compared if evidence.trained else "nothing is trained")
    if faults := _not_finite(gaps, "the difference of log-probabilities"):
        return _wrong(faults)
    step, worst = max(_finite(gaps).items(), key=lambda item: item[1])
    found = f"engine and trainer differ by {worst:.2g} nats per token at most (step {step})"
    if limit is _MISSING:
        return _unknown(f"{found}; the run did not note its limit")
    if limit is None:
        return _unknown(f"{found}; --max-logprob-diff none sets no limit")
    over = _above(limit, gaps, "{:.3g} nats per token between engine and trainer")
    return _wrong(over) if over else _right(f"{found}, in {len(gaps)} of {len(evidence.trained)} steps")


def weights(evidence: Evidence) -> Check:
    """Each token is from the version that it claims: one that was published, and no older than the schedule allows."""
    bound = evidence.facts.max_staleness
    if not evidence.trained:
        return _unknown("nothing is trained")
    if bound is None:
        return _unknown("the run did not note its bound of staleness")
    staleness = evidence.of_metric("staleness/max")
    faults = [*_not_finite(staleness, "the staleness"), *_above(bound, staleness, "tokens are {:g} versions old")]
    claimed = [sample for sample in evidence.samples if sample.get("versions")]
    newest = max([*evidence.trained, *(rollout for rollout, _, _ in evidence.ledger.commits)]) + 1
    keeps = bool(evidence.facts.option("--partial-rollout"))
    faults += [f"{_place(sample)}: {fault}" for sample in claimed if (fault := _of_spans(sample, bound, newest, keeps))]
    if faults:
        return _wrong(faults)
    if not claimed and not staleness:
        return _unknown("no recorded sample names its version")
    parts = [f"staleness {max(_finite(staleness).values()):g} at most, {bound} allowed"] if staleness else []
    if claimed:
        which = "a published version within the bound" if bound else "the version of their step"
        parts.append(f"the tokens of {len(claimed)} recorded samples are of {which}")
    return _right("; ".join(parts))


def _of_spans(sample: Mapping[str, Any], bound: int, newest: int, keeps_tokens: bool) -> str:
    """What is wrong with the versions of a sample; empty if nothing is.

    An evaluation is of the version that its number names, a training rollout of that down to ``bound`` below."""
    rollout = int(sample.get("rollout_id") or 0)
    try:
        spans = [(int(version), int(start), int(end)) for version, start, end in sample["versions"]]
    except (TypeError, ValueError):
        return f"its versions cannot be read: {short_repr(sample['versions'])}"
    ends = [0, *(end for _, _, end in spans)]
    # Tokens that no model sampled, such as an agent's observations, are in no span.
    if any(start < before or end <= start for (_, start, end), before in zip(spans, ends[:-1], strict=True)):
        return f"its spans of versions overlap, or have no tokens: {sample['versions']}"
    versions = [version for version, _, _ in spans]
    is_eval = sample.get("kind") == "eval"
    low = 0 if keeps_tokens and not is_eval else max(0, rollout - (0 if is_eval else bound))
    high = newest if bound and not is_eval else rollout
    wrong = [version for version in versions if not low <= version <= high]
    if not wrong:
        return ""
    allowed = f"version {low}" if low == high else f"versions {low} to {high}"
    return f"tokens of version {wrong[0]}, where only {allowed} can be"


def rewards(evidence: Evidence) -> Check:
    """No failure is counted as a number: what failed has no reward, and what has one is finite."""
    if evidence.facts.is_supervised:
        return _unknown("supervised: nothing is scored")
    faults = []
    for metric in ("raw_reward", "raw_reward_all"):
        for part in PARTS_OF_ROLLOUTS:
            faults += _not_finite(evidence.of_metric(f"{part}/{metric}"), f"{part}/{metric}")
    scored = [sample for sample in evidence.samples if sample.get("reward") is not None]
    for sample in scored:
        if sample.get("status") in _UNTRAINED and not sample.get("masked"):
            faults.append(f"{_place(sample)}: status {sample['status']}, and yet the reward {sample['reward']}")
        elif not _is_finite(sample["reward"]):
            faults.append(f"{_place(sample)}: the reward {sample['reward']} is no finite number")
    if faults:
        return _wrong(faults)
    if not scored and not evidence.of_metric("rollout/raw_reward"):
        return _unknown("no reward was recorded")
    failures = [f"{part}/{domain}_failures" for part in PARTS_OF_ROLLOUTS for domain in ("infra", "data")]
    failed = sum(sum(_finite(evidence.of_metric(name)).values()) for name in failures)
    text = f"{len(scored)} recorded rewards are finite; {failed:g} failed attempts"
    # Of the ledger: quarantine.jsonl also has the groups of earlier runs in the folder, and of steps done again.
    if (quarantined := evidence.ledger.counts.get("quarantined")) is not None:
        text += f", {quarantined} prompts in quarantine"
    return _right(f"{text}, none of them counted")


def scale(evidence: Evidence) -> Check:
    """One divisor: the loss of a step was divided by a count over all of its rows, whatever micro-batches and ranks."""
    faults, unclear, compared = [], "", 0
    mode = str(evidence.facts.option("--loss-agg-mode", ""))
    for role in (ACTOR, CRITIC):
        known = LOSSES.get(evidence.facts.loss) if role == ACTOR else LOSSES["policy_loss"]
        unit = _unit(known.divisor, mode) if known and mode else ""
        for step, divisor in evidence.of_metric(f"{role}/divisor").items():
            counts = {each: evidence.steps[step].get(f"{role}/loss_{each}") for each in ("tokens", "samples")}
            if divisor is None or None in counts.values():
                faults.append(f"step {step}: {role}/divisor, or a count of its rows, is missing or not finite")
            elif unit and not math.isclose(divisor, counts[unit] or 0.0, rel_tol=_SAME):
                faults.append(f"step {step}: {role} divided by {divisor:g}, and the step has {counts[unit]:g} {unit}")
            elif not unit and not any(math.isclose(divisor, count or 0.0, rel_tol=_SAME) for count in counts.values()):
                unclear = f"the loss {evidence.facts.loss or '(not noted)'} weighs its rows by itself"
            compared += 1
    if faults:
        return _wrong(faults)
    if unclear:
        return _unknown(unclear)
    if not compared:
        return _unknown("the run did not note its divisors" if evidence.trained else "nothing is trained")
    return _right(f"the loss of {compared} steps was divided by one count over all rows of the step")


def _unit(divisor: Divisor, mode: str) -> str:
    if divisor is Divisor.OWN_WEIGHTS:
        return ""
    return "tokens" if divisor is Divisor.BY_MODE and mode == "token-mean" else "samples"


def _place(sample: Mapping[str, Any]) -> str:
    rollout = f"{'evaluation' if sample.get('kind') == 'eval' else 'rollout'} {sample.get('rollout_id')}"
    return f"{SAMPLES_FILE}: {rollout}, {sample.get('uid')}, sample {sample.get('sample_index')}"


def _is_finite(reward: Any) -> bool:
    if isinstance(reward, Mapping):
        values = [value for value in reward.values() if isinstance(value, int | float) or value in _NOT_FINITE]
        return all(map(_is_finite, values))
    return isinstance(reward, int | float) and math.isfinite(reward)


def _finite(values: Mapping[int, float | None]) -> dict[int, float]:
    return {step: value for step, value in values.items() if value is not None}


def _not_finite(values: Mapping[int, float | None], what: str) -> list[str]:
    return [f"step {step}: {what} is not finite" for step, value in values.items() if value is None]


def _above(limit: float, values: Mapping[int, float | None], what: str) -> list[str]:
    """The steps whose value is larger. what: the value, in the form of ``str.format``."""
    over = {step: what.format(value) for step, value in _finite(values).items() if value > limit}
    return [f"step {step}: {text}, at most {limit:g} is allowed" for step, text in over.items()]


def _right(text: str) -> Check:
    return Check(state=State.RIGHT, text=text)


def _unknown(why: str) -> Check:
    return Check(state=State.UNKNOWN, text=why)


def _wrong(faults: Sequence[str]) -> Check:
    text = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    text += f", of which the first {MAX_FAULTS}" if len(faults) > MAX_FAULTS else ""
    return Check(state=State.WRONG, text=text, faults=faults[:MAX_FAULTS])
