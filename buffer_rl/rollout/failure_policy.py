"""What becomes of a group whose attempt failed: back to the queue, into quarantine, or the end of the run.

Failures of the infrastructure and of the data have separate budgets, counted by the Buffer over all workers of a run.
A group that goes back keeps its place in the order of admission, so it is leased again before anything newer, and a
run in which something failed has the same groups, in the same order, as one in which nothing did.

A prompt may show as a failure of the infrastructure: one that an engine answers with HTTP 500, or never. Such a group
goes into quarantine, too, but only when the engines are known to be well: they answered the prompt of another group
before and after the failure that was one too many (``Canary``).

The report on groups in quarantine has one line of JSON each, in ``quarantine.jsonl`` of the run's folder.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_rl.contracts import RolloutBuffer
from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.redaction import mask_secrets
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.failures import CONVERSION_FAILED, STALE_WEIGHTS, AttemptFailure, Domain
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.types import GroupUid, RowId, SampleGroup, Ticket

if TYPE_CHECKING:
    from buffer_rl.engine.client import EngineClient

DATA_ATTEMPTS = 2
INFRA_ATTEMPTS = 4  # of one group in one rollout, while the engines answer others
GIVE_UP_AFTER = 8  # groups in quarantine, while nothing succeeded
GIVE_UP_AFTER_COSTLY = 2  # groups, where there are only time-outs and crashes: such attempts take long
FAILURES_PER_GROUP = 4  # of --rollout-batch-size, where a budget is absent
LEAST_BUDGET = 16
FIRST_PAUSE_S = 0.1  # doubled with each failure of the infrastructure in a row
LONGEST_PAUSE_S = 5.0
CANARY_DEADLINE_S = 30.0
"""More than the client's own retries take. Engines that are busy for longer say nothing."""
QUARANTINE_FILE = "quarantine.jsonl"
EXCERPT_CHARS = 400
ERROR_CHARS = 4000
_WHOSE = {Domain.INFRA: "of the engines or the network", Domain.DATA: "of the data"}


class FailurePolicy:
    """Belongs to one rollout, whose failures ``stats`` counts. stop: set when it needs no more groups."""

    def __init__(
        self,
        context: RolloutContext,
        buffer: RolloutBuffer,
        stats: RolloutStats,
        stop: asyncio.Event | None = None,
    ) -> None:
        self._context = context
        self._buffer = buffer
        self._stats = stats
        self._first: dict[Domain, AttemptFailure] = {}
        self._num_succeeded = 0
        self._in_a_row = 0  # failures of the infrastructure since the last success
        self._failed: dict[GroupUid, AttemptFailure] = {}
        self._quarantined: list[GroupUid] = []
        self._canary = Canary(context, buffer.ticket, stop or asyncio.Event())
        self._infra: Counter[GroupUid] = Counter()  # failures that may be the prompt's
        self._engines_were_well: set[GroupUid] = set()  # after the last one of these

    def succeeded(self, group: SampleGroup) -> None:
        """A group was generated and scored."""
        self._num_succeeded += 1
        self._in_a_row = 0
        self._canary.remember(group)

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt; 0 where the infrastructure is well."""
        if not self._in_a_row:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** (self._in_a_row - 1), LONGEST_PAUSE_S)

    async def settle(self, group: SampleGroup, failure: AttemptFailure) -> bool:
        """Report a leased group whose attempt failed; whether it is in quarantine now, else it is in the queue.

        Raises RolloutError, or what the infrastructure failed with, if the run is to end: a budget is spent, nothing
        succeeds, or ``--on-reward-error abort``."""
        total, of_group = await self.count(group, failure)
        self._failed[group.uid] = failure
        policy = self._context.args.on_reward_error if failure.reward is not None else "retry"
        for_good = failure.domain is Domain.DATA and (
            not failure.repeatable or of_group >= DATA_ATTEMPTS or policy != "retry"
        )
        if policy == "abort":
            raise self._ended(failure, "a reward could not be computed, and --on-reward-error is abort.")
        if failure.domain is Domain.INFRA and await self._is_the_groups_own(group.uid, failure):
            for_good, failure = True, replace(failure, reason=f"{Domain.INFRA}:{failure.reason}")
        if for_good:
            await self._quarantine(group, failure, of_group)
        else:
            await self._buffer.aadd_samples([group.as_prompts()])
        self._check_hope(failure)
        self.check_budget(failure, total)
        return for_good

    async def count(self, group: SampleGroup, failure: AttemptFailure) -> tuple[int, int]:
        """Count the failure. Returns how many of its domain the run had, and how many of these the group."""
        self._first.setdefault(failure.domain, failure)
        self._stats.failures[failure.domain] += 1
        if failure.domain is Domain.INFRA:
            self._in_a_row += 1
        return await self._buffer.acount_failure(group, failure.domain.value)

    def check_budget(self, failure: AttemptFailure, total: int) -> None:
        """Raises if the run had more failures of this domain than it may."""
        name = f"max_{failure.domain}_failures"
        limit = getattr(self._context.args, name)
        if limit is None:
            limit = max(LEAST_BUDGET, FAILURES_PER_GROUP * self._context.args.rollout_batch_size)
        if total > limit:
            flag = f"--{name.replace('_', '-')}"
            raise self._ended(
                self._first[failure.domain],
                f"{total} attempts at groups failed for reasons {_WHOSE[failure.domain]}, and {flag} is {limit}.",
            )

    async def _is_the_groups_own(self, uid: GroupUid, failure: AttemptFailure) -> bool:
        """Whether what shows as a failure of the infrastructure is the group's."""
        if failure.reason == STALE_WEIGHTS:
            return False
        self._infra[uid] += 1
        if self._infra[uid] < INFRA_ATTEMPTS - 1:
            return False
        if not await self._canary.is_answered():
            self._engines_were_well.discard(uid)
            return False
        if uid in self._engines_were_well:
            return True
        self._engines_were_well.add(uid)
        return False

    async def _quarantine(self, group: SampleGroup, failure: AttemptFailure, attempts: int) -> None:
        await self._buffer.aquarantine(group, failure.reason)
        self._quarantined.append(group.uid)
        self._stats.num_quarantined += 1
        if self._context.run_dir is not None:
            write_record(self._context.run_dir, group, self._buffer.ticket.task, failure, attempts)

    def _check_hope(self, failure: AttemptFailure) -> None:
        """A function that always fails is found out before the budget is spent."""
        if failure.domain is Domain.INFRA or self._num_succeeded:
            return
        enough = max(2, min(GIVE_UP_AFTER, self._buffer.ticket.num_groups))
        count = len(self._quarantined)
        data = [seen for seen in self._failed.values() if seen.domain is Domain.DATA]
        if all(seen.is_costly for seen in data):
            enough, count = GIVE_UP_AFTER_COSTLY, len(data)
        if count >= enough:
            what = "the rewards of" if failure.reward is not None else "the responses of"
            if failure.reason == CONVERSION_FAILED:
                what = "the training rows of"
            raise self._ended(
                self._first[Domain.DATA], f"{what} {count} groups could not be computed, and those of no group could."
            )

    def _ended(self, first: AttemptFailure, what: str) -> Exception:
        """The error that ends the run."""
        error: Any = first.error
        if first.domain is Domain.INFRA:
            ending: Any = type(error)(f"{what} The first: {error.what}", expected=error.expected, hint=error.hint)
            ending.where = error.where
        else:
            hint = "what the functions print is in the logs of the run: logs/rollout_*"
            if self._quarantined and self._context.run_dir is not None:
                hint += "; quarantine.jsonl has the groups"
            text = f"{what} The first failure ({first.reward or first.reason}):\n{error}"
            ending = RolloutError(text, where=self._buffer.ticket.task, hint=hint)
        ending.__cause__ = error
        return ending  # type: ignore[no-any-return]


class Canary:
    """Belongs to one rollout. stop: set when the rollout needs no answers any more."""

    def __init__(self, context: RolloutContext, ticket: Ticket, stop: asyncio.Event) -> None:
        self.engine = context.engine
        self._ticket = ticket
        self._stop = stop
        self._row: RowId | None = None
        self._prompt: list[int] = []

    def remember(self, group: SampleGroup) -> None:
        """A group that was generated: its prompt is the one to ask for. Passed over where it is not plain numbers,
        which nobody checked of a group that is dropped."""
        tokens, length = group[0].tokens, group[0].response_length
        if isinstance(tokens, list) and isinstance(length, int) and 0 <= length < len(tokens):
            prompt = tokens[: len(tokens) - length]
            if all(isinstance(token, int) for token in prompt):
                self._row, self._prompt = group[0].row_id, prompt

    async def is_answered(self) -> bool:
        """Whether the engines answer now; False, too, where no prompt is known, or they need too long."""
        if self.engine is None or self._row is None:
            return False
        ask = asyncio.create_task(self._ask(self.engine, self._row))
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({ask, stop}, timeout=CANARY_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            return ask in done and ask.result()
        finally:
            for task in (ask, stop):
                task.cancel()
            await asyncio.gather(ask, stop, return_exceptions=True)

    async def _ask(self, engine: EngineClient, row: RowId) -> bool:
        """One token, under a request id that was never used."""
        rid = f"{self._ticket.task}:{row}:canary:{uuid.uuid4().hex}"
        params = {"temperature": 0.0, "max_new_tokens": 1, "sampling_seed": 0}
        try:
            await engine.agenerate(rid, self._prompt, params)
        except BufferRLError:
            return False
        return True


def quarantine_record(group: SampleGroup, task: str, failure: AttemptFailure, attempts: int) -> dict[str, Any]:
    """What is written down of one group: who it is, the beginning of its prompt, and the end of its error.

    attempts: how many of them failed for reasons of this domain."""
    prompt = group[0].prompt
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    record = {
        "uid": str(group.uid),
        "task": task,
        "time": time.time(),
        "reason": failure.reason,
        "attempts": attempts,
        "prompt": text[:EXCERPT_CHARS],
        "error": str(failure.error)[-ERROR_CHARS:],
    }
    masked: dict[str, Any] = mask_secrets(record)
    return masked


def write_record(run_dir: Path, group: SampleGroup, task: str, failure: AttemptFailure, attempts: int) -> None:
    """Append the group's line; several workers may write one file."""
    line = json.dumps(quarantine_record(group, task, failure, attempts), ensure_ascii=False) + "\n"
    with (run_dir / QUARANTINE_FILE).open("ab") as file:
        file.write(line.encode("utf-8", errors="replace"))
