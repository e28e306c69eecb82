"""Handles a group whose attempt failed: requeues it, puts it into quarantine, or ends the run.

Failures of the infrastructure and of the data have separate budgets, counted by the Buffer over all workers of a run.
A requeued group keeps its place in the order of admission, so it is leased again before newer groups: a run with
failures has the same groups, in the same order, as a run without.

A prompt may look like a failure of the infrastructure: an engine answers it with HTTP 500, or never. Such a group goes
into quarantine, too, but only while the engines are healthy: they answered the prompt of another group before and after
its last failure (``Canary``).

The report on groups in quarantine has one line of JSON each, in ``quarantine.jsonl`` of the run's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.observe.run_folder import QUARANTINE_FILE as QUARANTINE_FILE
from buffer_rl.observe.run_folder import SURROGATES
from buffer_rl.options.redaction import mask_secrets
from buffer_rl.records.groups import GroupUid, RowId, SampleGroup, Ticket
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.failures import CONVERSION_FAILED, STALE_WEIGHTS, AttemptFailure, Domain
from buffer_rl.rollout.stats import RolloutStats

if TYPE_CHECKING:
    from buffer_rl.engines.client import EngineClient

_log = logging.getLogger(__name__)
DATA_ATTEMPTS = 2
INFRA_ATTEMPTS = 4  # of one group in one rollout, while the engines answer others
GIVE_UP_AFTER = 8  # groups in quarantine, while nothing succeeded
GIVE_UP_AFTER_COSTLY = 2  # groups, where all failures are time-outs and crashes, which take long
FAILURES_PER_GROUP = 4  # times --rollout-batch-size, where no budget is set
LEAST_BUDGET = 16
FIRST_PAUSE_S = 0.1  # doubled with each failure of the infrastructure in a row
LONGEST_PAUSE_S = 5.0
CANARY_DEADLINE_S = 30.0
"""Longer than the client's own retries take. Engines that need more time count as not healthy."""
EXCERPT_CHARS = 400
ERROR_CHARS = 4000
_CAUSES = {Domain.INFRA: "of the engines or the network", Domain.DATA: "of the data"}


class FailurePolicy:
    """The failures of one rollout, counted in ``stats``. stop: set when the rollout needs no more groups."""

    def __init__(
        self, context: RolloutContext, buffer: RolloutBuffer, stats: RolloutStats, stop: asyncio.Event | None = None
    ) -> None:
        self._context = context
        self._buffer = buffer
        self._stats = stats
        self._first_failures: dict[Domain, AttemptFailure] = {}
        self._num_succeeded = 0
        self._infra_in_a_row = 0  # failures of the infrastructure since the last success
        self._failed: dict[GroupUid, AttemptFailure] = {}
        self._quarantined: list[GroupUid] = []
        self._canary = Canary(context, buffer.ticket, stop or asyncio.Event())
        self._infra_failures: Counter[GroupUid] = Counter()  # failures that may be the prompt's
        self._engines_healthy: set[GroupUid] = set()  # after the last one of these

    def succeeded(self, group: SampleGroup) -> None:
        """A group was generated and scored."""
        self._num_succeeded += 1
        self._infra_in_a_row = 0
        self._canary.remember(group)

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt; 0 while the infrastructure is healthy."""
        if not self._infra_in_a_row:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** (self._infra_in_a_row - 1), LONGEST_PAUSE_S)

    async def handle(self, group: SampleGroup, failure: AttemptFailure) -> bool:
        """Requeue a leased group whose attempt failed, or put it into quarantine. Returns whether it is in quarantine.

        Raises RolloutError, or the error of the infrastructure, if the run must end: a budget is spent, nothing
        succeeds, or ``--on-reward-error abort``."""
        total, of_group = await self.count(group, failure)
        self._failed[group.uid] = failure
        policy = self._context.args.on_reward_error if failure.reward is not None else "retry"
        is_final = failure.domain is Domain.DATA and (
            not failure.repeatable or of_group >= DATA_ATTEMPTS or policy != "retry"
        )
        if policy == "abort":
            raise self._run_error(failure, "a reward could not be computed, and --on-reward-error is abort.")
        if failure.domain is Domain.INFRA and await self._is_fault_of_group(group.uid, failure):
            is_final, failure = True, replace(failure, reason=f"{Domain.INFRA}:{failure.reason}")
        if is_final:
            await self._quarantine(group, failure, of_group)
        else:
            await self._buffer.aadd_samples([group.as_prompts()])
        self._check_success(failure)
        self.check_budget(failure, total)
        return is_final

    async def count(self, group: SampleGroup, failure: AttemptFailure) -> tuple[int, int]:
        """Count the failure. Returns how many of its domain the run had, and how many of these the group."""
        if failure.domain not in self._first_failures:
            self._first_failures[failure.domain] = failure
            what = f"{self._buffer.ticket.task}: the first attempt that failed for reasons {_CAUSES[failure.domain]}"
            _log.warning("%s, at %s: %s", what, group.uid, failure.error)
        self._stats.failures[failure.domain] += 1
        if failure.domain is Domain.INFRA:
            self._infra_in_a_row += 1
        return await self._buffer.acount_failure(group, failure.domain.value)

    def check_budget(self, failure: AttemptFailure, total: int) -> None:
        """Raises if the run had more failures of this domain than its budget allows."""
        name = f"max_{failure.domain}_failures"
        limit = getattr(self._context.args, name)
        if limit is None:
            limit = max(LEAST_BUDGET, FAILURES_PER_GROUP * self._context.args.rollout_batch_size)
        if total > limit:
            flag = f"--{name.replace('_', '-')}"
            raise self._run_error(
                self._first_failures[failure.domain],
                f"{total} attempts at groups failed for reasons {_CAUSES[failure.domain]}, and {flag} is {limit}.",
            )

    async def _is_fault_of_group(self, uid: GroupUid, failure: AttemptFailure) -> bool:
        """Whether the group causes what looks like a failure of the infrastructure."""
        if failure.reason == STALE_WEIGHTS:
            return False
        self._infra_failures[uid] += 1
        if self._infra_failures[uid] < INFRA_ATTEMPTS - 1:
            return False
        if not await self._canary.is_answered():
            self._engines_healthy.discard(uid)
            return False
        if uid in self._engines_healthy:
            return True
        self._engines_healthy.add(uid)
        return False

    async def _quarantine(self, group: SampleGroup, failure: AttemptFailure, attempts: int) -> None:
        await self._buffer.aquarantine(group, failure.reason)
        self._quarantined.append(group.uid)
        self._stats.num_quarantined += 1
        if self._context.run_dir is not None:
            write_record(self._context.run_dir, group, self._buffer.ticket.task, failure, attempts)

    def _check_success(self, failure: AttemptFailure) -> None:
        """Raises if no group succeeds: a function that always fails ends the run before the budget is spent."""
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
            raise self._run_error(
                self._first_failures[Domain.DATA],
                f"{what} {count} groups could not be computed, and those of no group could.",
            )

    def _run_error(self, first: AttemptFailure, what: str) -> Exception:
        """The error that ends the run: it names the first failure."""
        error: Any = first.error
        if first.domain is Domain.INFRA:
            ending: Any = type(error)(f"{what} The first: {error.what}", expected=error.expected, hint=error.hint)
            ending.where = error.where
        else:
            hint = "what the functions print is in the logs of the run: logs/rollout_*"
            if self._quarantined and self._context.run_dir is not None:
                hint += "; quarantine.jsonl has the groups"
            text = f"{what} The first failure ({first.reward or first.reason}):\n{error}"
            see = "docs/troubleshooting.md#groups-are-put-into-quarantine"
            ending = RolloutError(text, where=self._buffer.ticket.task, hint=hint, see=see)
        ending.__cause__ = error
        return ending  # type: ignore[no-any-return]


class Canary:
    """Checks whether the engines are healthy: asks them for a prompt that they answered before.

    Belongs to one rollout. stop: set when the rollout needs no answers any more.
    """

    def __init__(self, context: RolloutContext, ticket: Ticket, stop: asyncio.Event) -> None:
        self.engine = context.engine
        self._ticket = ticket
        self._stop = stop
        self._row: RowId | None = None
        self._prompt: list[int] = []

    def remember(self, group: SampleGroup) -> None:
        """Take the prompt of a generated group as the one to ask for, if its tokens are a list of integers: the samples
        of a group that a filter drops are not checked."""
        tokens, length = group[0].tokens, group[0].response_length
        if isinstance(tokens, list) and isinstance(length, int) and 0 <= length < len(tokens):
            prompt = tokens[: len(tokens) - length]
            if all(isinstance(token, int) for token in prompt):
                self._row, self._prompt = group[0].row_id, prompt

    async def is_answered(self) -> bool:
        """Whether the engines answer now; False, too, where no prompt is known, and after ``CANARY_DEADLINE_S``."""
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
        """Whether the engine answers with one token; the request id is new."""
        rid = f"{self._ticket.task}:{row}:canary:{uuid.uuid4().hex}"
        params = {"temperature": 0.0, "max_new_tokens": 1, "sampling_seed": 0}
        try:
            await engine.agenerate(rid, self._prompt, params)
        except BufferRLError:
            return False
        return True


def write_record(run_dir: Path, group: SampleGroup, task: str, failure: AttemptFailure, attempts: int) -> None:
    """Append the line of one group: uid, the beginning of its prompt, and the end of its error. Several workers may
    write one file.

    attempts: how many attempts at it failed in this domain."""
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
    line = json.dumps(mask_secrets(record), ensure_ascii=False) + "\n"
    with (run_dir / QUARANTINE_FILE).open("ab") as file:
        file.write(line.encode("utf-8", errors=SURROGATES))
