"""The life of one group, from what a run's folder has recorded: each attempt at it, its samples, and where it is now.

The facts are of the ledger and of the files beside it. What follows from several of them is said with its reason; what
none of them has is listed as not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any

from buffer_rl.buffer.ledger_audit import Transition
from buffer_rl.buffer.ledger_file import NOTE
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.rollouts import TOO_OLD, UNREPORTED
from buffer_rl.errors import ConfigError
from buffer_rl.observe.run_folder import QUARANTINE_FILE, records_in
from buffer_rl.records.groups import GroupUid
from buffer_rl.verbs.run_records import GroupRecord, RunRecords
from buffer_rl.verbs.table import shown_time

FAILURES = f"{NOTE}failures"
FAILED, UNKNOWN, NOT_NEEDED, BEGUN_AGAIN = "failed", "unknown", "not needed", "begun again"
_REASONS = {
    TOO_OLD: "its tokens were older than --max-staleness allows when the selection of the step was open",
    UNREPORTED: "the rollout function leased it and never mentioned it again",
    "prompt_too_long": "its prompt has more tokens than --rollout-max-prompt-len",
    "aborted": "the generate function ended it as aborted, or without any reward",
    "generate_failed": "the generate function gave it the status failed",
}
"""Why the framework rejects groups. Other reasons are those of a filter, or of the user's rollout function."""
_REOPENED = {"restart": "the Buffer began again with the ledger", "restore": "the run went back to a checkpoint"}
_SPELLING = (
    "uids are spelled as in the run's messages, samples.jsonl and quarantine.jsonl; evaluations have "
    "NAME@SOURCE:ROW:EPOCH; a number alone is a step"
)
_NOW = {
    GroupState.LEASED: "It is in work.",
    GroupState.FINISHED: "It is finished, and no step has selected it yet.",
    GroupState.PENDING: "It waits in the queue, before all groups that were never leased.",
}


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One lease. Times in seconds since 1970. end: the state that the lease ended with, None if it is in work. why: the
    reason of the ledger, or what follows from counts of failures and other leases (``FAILED``, ``NOT_NEEDED``,
    ``BEGUN_AGAIN``, ``UNKNOWN``); empty if nothing does."""

    attempt: int
    ticket: int | None
    leased: float
    opening: int
    end: str | None = None
    ended: float | None = None
    why: str = ""


@dataclass(slots=True, kw_only=True)
class GroupLife:
    """The facts. kind: ``training``, ``evaluation`` or ``foreign``. later: what happened after the attempts, the oldest
    first. record: what was recorded of the samples of the newest attempt. replaced_by: the groups that the ticket
    leased for it; one of several if there is more than one."""

    uid: GroupUid
    kind: str = "training"
    row_of: str = ""
    state: str = GroupState.PENDING
    reason: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    later: list[Transition] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    record: GroupRecord | None = None
    evaluations: list[GroupRecord] = field(default_factory=list)
    replaced_by: list[str] = field(default_factory=list)
    error: str = ""
    filter_name: str = ""
    at_work: bool = False
    num_workers: int = 1
    reward_key: str | None = None

    def facts(self) -> dict[str, Any]:
        """As JSON values, with the sentences."""
        lines, missing = sentences(self), not_recorded(self)
        return {**asdict(self), "uid": str(self.uid), "sentences": lines, "not_recorded": missing}


def group_life(records: RunRecords, uid: GroupUid) -> GroupLife:
    """Raises ConfigError for a uid that the run does not have, with the nearest ones."""
    row_of, use = _row_of(records, uid)
    audit, changed = records.audit, records.facts.changed
    life = GroupLife(uid=uid, row_of=row_of, at_work=records.at_work, reward_key=changed.get("--reward-key"))
    life.num_workers = int(changed.get("--num-rollout-workers", 1))
    is_default_rollout = "--rollout-function-path" not in changed
    if is_default_rollout:
        life.filter_name = str(changed.get("--dynamic-sampling-filter-path", ""))
    if (entry := audit.entry(uid)) is None:
        life.evaluations = list(records.sample_records(uid, "eval").values())
        if use.startswith("eval/") or life.evaluations:
            life.kind = "evaluation"
        elif not row_of:
            raise unknown_uid(records, str(uid))
        return life
    life.state, life.reason = entry.state, entry.reason
    is_of_source = any(row.source == uid.source and row.epoch is not None for row in audit.epochs())
    life.kind = "training" if row_of or is_of_source else "foreign"
    life.failures = failures_of(audit.facts().get(FAILURES, "{}"), uid)
    life.attempts, life.later = split_attempts(audit.history(uid))
    explain_requeues(life)
    if is_default_rollout:
        explain_rest(life, audit.of_rollout)
    last = life.attempts[-1].ticket if life.attempts else None
    selection = entry.rollout_id if entry.selected or entry.state is GroupState.TRAINED else None
    life.record = records.group_record(uid, last, selection)
    if entry.state in (GroupState.REJECTED, GroupState.QUARANTINED) and last is not None:
        life.replaced_by = [str(other) for other in replacements(audit.of_rollout(last), uid)]
    quarantined = [line for line in records_in(records.folder, QUARANTINE_FILE) if line.get("uid") == str(uid)]
    life.error = str(quarantined[-1].get("error", "")) if quarantined else ""
    return life


def _row_of(records: RunRecords, uid: GroupUid) -> tuple[str, str]:
    """The data file of a uid's row, and its use; empty if the run names no such row."""
    for source in records.facts.data:
        use, name, rows = str(source.get("use", "")), source.get("source_hash"), source.get("num_rows")
        if use != "train":  # uids of an evaluation set are of the set's name and the source's hash
            name = f"{use.removeprefix('eval/')}@{name}"
        if uid.source == name and (rows is None or 0 <= uid.row < int(rows)):
            return str(source.get("path", "")), use
    return "", ""


def failures_of(note: str, uid: GroupUid) -> dict[str, int]:
    """How many attempts at the group failed, by domain, from the ledger's note of all failures."""
    counts: Mapping[str, Mapping[str, int]] = json.loads(note)
    return {domain: of[str(uid)] for domain, of in sorted(counts.items()) if of.get(str(uid))}


def split_attempts(history: Sequence[Transition]) -> tuple[list[Attempt], list[Transition]]:
    """The leases of a group, each with its end, and what happened to it while it was finished."""
    attempts: list[Attempt] = []
    later: list[Transition] = []
    for line in history:
        if line.after is GroupState.LEASED:
            opened = Attempt(attempt=line.attempt, ticket=line.rollout_id, leased=line.time, opening=line.incarnation)
            attempts.append(opened)
        elif line.before is GroupState.LEASED and attempts:
            attempts[-1].end, attempts[-1].ended, attempts[-1].why = line.after, line.time, line.reason
        else:
            later.append(line)
    return attempts, later


def explain_requeues(life: GroupLife) -> None:
    """Set ``why`` of attempts that went back to the queue without a reason: the ledger counts failures of a group, but
    does not say which attempts these are."""
    unexplained = [a for a in life.attempts if a.end == GroupState.PENDING and not a.why]
    failed = sum(life.failures.values())
    if failed and any(a.end == GroupState.QUARANTINED for a in life.attempts):
        failed -= 1  # the one that put it there
    for attempt in unexplained:
        attempt.why = FAILED if failed >= len(unexplained) else UNKNOWN if failed else ""


def explain_rest(life: GroupLife, events: Callable[[int], Sequence[tuple[GroupUid, Transition]]]) -> None:
    """Set ``why`` of attempts that ended without a failure: the default rollout function gives groups back at the end
    of its rollout, so the rollout of a ticket that leased groups again afterwards was begun again. events: of a
    ticket."""
    for attempt in life.attempts:
        if attempt.end != GroupState.PENDING or attempt.why or attempt.ended is None or attempt.ticket is None:
            continue
        leases = [line.time for _, line in events(attempt.ticket) if line.after is GroupState.LEASED]
        attempt.why = BEGUN_AGAIN if max(leases) > attempt.ended else NOT_NEEDED


def replacements(events: Sequence[tuple[GroupUid, Transition]], uid: GroupUid) -> list[GroupUid]:
    """The groups that a ticket leased in place of one that it dropped: one if the ticket had no other lease to replace
    at that time, else all that it leased until each was replaced. events: of the ticket."""
    places: list[GroupUid] = []
    leased: list[GroupUid] = []
    for other, line in events:
        if line.before is GroupState.LEASED and line.after is not GroupState.FINISHED:
            places.append(other)
        elif line.after is GroupState.LEASED and other in places:
            places.remove(other)  # it went back to the queue, and takes its own place again
        elif line.after is GroupState.LEASED and places:
            leased.append(other)
        if places and len(leased) == len(places):
            if uid in places:
                return leased
            places, leased = [], []
    return leased if uid in places else []


def unknown_uid(records: RunRecords, text: str) -> ConfigError:
    """The error for a uid that the run does not have."""
    near = ", ".join(map(str, nearest([uid for uid, _ in records.audit.states()], text)))
    expected = f"SOURCE:ROW:EPOCH of a group of the run, such as {near}" if near else "SOURCE:ROW:EPOCH"
    return ConfigError(f"the run has no group {text!r:.80}", where="UID", expected=expected, hint=_SPELLING)


def nearest(uids: Sequence[GroupUid], text: str, count: int = 3) -> list[GroupUid]:
    """The uids that differ least from a text: in their source, then in epoch and row."""
    source, _, rest = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in rest.split(":")]
    row, epoch = numbers[0], numbers[1] if len(numbers) > 1 else 0

    def distance(uid: GroupUid) -> tuple[int, int, int]:
        same = next((n for n, (a, b) in enumerate(zip(uid.source, source, strict=False)) if a != b), len(source))
        return -same, abs(uid.epoch - epoch), abs(uid.row - row)

    return sorted(uids, key=distance)[:count]


def sentences(life: GroupLife) -> list[str]:
    """The life as plain sentences, the oldest first."""
    lines = [_origin(life), *(_attempt(attempt, life) for attempt in life.attempts), *map(_later, life.later)]
    if life.failures:
        counted = ", ".join(f"{count} {domain}" for domain, count in life.failures.items())
        lines.append(f"Failed attempts at it, by domain: {counted}.")
    if life.error:
        lines.append(f"The error: {life.error.splitlines()[0]}")
    lines += [_samples(life.record, life.reward_key, "Its samples")] if life.record is not None else []
    lines += [_samples(r, life.reward_key, f"Evaluated with version {r.rollout_id}") for r in life.evaluations]
    lines += _verdict(life)
    return [sentence for sentence in lines if sentence]


def _origin(life: GroupLife) -> str:
    what = f"row {life.uid.row} of {life.row_of}" if life.row_of else f"row {life.uid.row} of source {life.uid.source}"
    if life.kind == "foreign":
        return "It is a foreign group: the rollout function made it, and no data source has it."
    if life.kind == "evaluation":
        return f"It is {what}, a prompt of an evaluation: the ledger has training groups only."
    return f"It is {what}, in epoch {life.uid.epoch}."


def _attempt(attempt: Attempt, life: GroupLife) -> str:
    began = f"Attempt {attempt.attempt}: train_{attempt.ticket} leased it at {shown_time(attempt.leased)}"
    if attempt.ended is None:
        return f"{began}, and has not reported it yet."
    kept = f", kept by the filter {life.filter_name}" if life.filter_name else ""
    ends: dict[str | None, str] = {
        GroupState.FINISHED: f"was finished{kept}",
        GroupState.REJECTED: f"was rejected: {_because(attempt.why, life)}",
        GroupState.QUARANTINED: f"was put into quarantine: {attempt.why}",
    }
    end = ends.get(attempt.end, f"went back to the queue: {_requeued(attempt)}")
    return f"{began}; {attempt.ended - attempt.leased:.3f} s later it {end}."


def _because(reason: str, life: GroupLife) -> str:
    if reason in _REASONS:
        return f"{reason} ({_REASONS[reason]})"
    return f"{reason} (by the filter {life.filter_name})" if life.filter_name else reason


def _requeued(attempt: Attempt) -> str:
    known = _REOPENED | {
        FAILED: "the attempt failed",
        NOT_NEEDED: f"train_{attempt.ticket} leased no group afterwards, so it did not need it any more",
        BEGUN_AGAIN: f"no failure of it is counted, and train_{attempt.ticket} leased groups again afterwards, so its "
        "rollout worker died or the rollout began again",
    }
    return known.get(attempt.why, "it failed, its rollout did not need it, or its rollout worker died")


def _later(line: Transition) -> str:
    at = shown_time(line.time)
    match line.after:
        case GroupState.FINISHED:
            return f"The step of train_{line.rollout_id} selected it at {at}."
        case GroupState.TRAINED:
            trained = f"The step of train_{line.rollout_id} trained on it, and made weight version {line.step}"
            return f"{trained}; committed at {at}."
        case GroupState.REJECTED:
            return f"It was rejected when it was finished, at {at}: {line.reason} ({_REASONS.get(line.reason, '')})."
    why = _REOPENED.get(line.reason, "its step had enough groups, or its selection was given up")
    return f"It went back to the queue when it was finished, at {at}: {why}."


def _samples(record: GroupRecord, reward_key: str | None, what: str) -> str:
    rewards = [r.get(reward_key) if isinstance(r, Mapping) else r for r in record.rewards]
    numbers = [float(r) for r in rewards if isinstance(r, int | float)]
    text = f"{what} ({record.origin}): {len(rewards)} {'row' if len(rewards) == 1 else 'rows'}"
    if numbers:
        spread = f", from {min(numbers):g} to {max(numbers):g}, standard deviation {pstdev(numbers):.4g}"
        text += f", reward {fmean(numbers):.4g} on average{spread if len(numbers) > 1 else ''}"
    if record.versions:
        text += f"; tokens of weight version {' and '.join(map(str, record.versions))}"
    return f"{text}."


def _verdict(life: GroupLife) -> list[str]:
    """Where it is now, unless what happened last says it."""
    if life.kind == "evaluation":
        return []
    lines = []
    if life.replaced_by:
        one_of = "one of " * (len(life.replaced_by) > 1)
        lines.append(f"In its place the ticket leased {one_of}{', '.join(life.replaced_by)}.")
    if not life.attempts:
        return ["It was never leased: no rollout has needed it yet."]
    if life.kind == "foreign" and life.state == GroupState.PENDING:
        return [*lines, "It was lost before its step, or not needed, and no queue has it: it may be imported again."]
    if life.state == GroupState.FINISHED and life.later and life.later[-1].after is GroupState.FINISHED:
        lines.append("It is selected, and the step has not committed it.")
    elif life.state in _NOW:
        lines.append(_NOW[GroupState(life.state)])
    if life.state in _NOW and not life.at_work:
        lines.append("No process of this machine writes the ledger: the run has ended, or is on another machine.")
    return lines


def not_recorded(life: GroupLife) -> list[str]:
    """What the run's folder does not have."""
    if life.kind == "evaluation":
        return [] if life.evaluations else ["its responses (samples.jsonl has --dump-samples groups an evaluation)"]
    missing = []
    if life.attempts and life.num_workers > 1:
        missing.append(f"which of the {life.num_workers} rollout workers leased it")
    unclear = [str(a.attempt) for a in life.attempts if a.end == GroupState.PENDING and a.why in (UNKNOWN, "")]
    if unclear:
        missing.append(f"why attempt {' and '.join(unclear)} went back to the queue (the ledger has no reason)")
    if life.attempts and life.attempts[-1].end is not None and life.record is None:
        kept = "samples.jsonl has finished groups, --dump-samples a rollout"
        kept += "; --save-debug-rollout-data has all of a step"
        missing.append(f"its rewards and the weight versions of its tokens ({kept})")
    return missing
