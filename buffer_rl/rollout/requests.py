"""What a rollout asks of the engines: request ids, seeds, samples that share one request, and the stop of all of them.

The first responses of a group's samples are asked for in the same moment, for one prompt and with equal sampling
parameters. They go as one request of several rows (``buffer_rl.engines.protocol``): sixteen samples, those of indices 0
to 15, 16 to 31, …, cost little more than one. A sample's seed is mixed from the seed of its sixteen and its place in
them, as the embedded engine mixes those of rows, so a sample has the same tokens whether it is asked for alone or with
others.

Alone go: continued samples, further turns and further responses, whose requests differ or must not wait for others, and
samples whose sampling parameters name a seed. At engines that draw under no seed (``RowSeeds``) a request of several
rows has none; at those that give all rows the request's, samples go alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buffer_rl.engines.protocol import ROWS, RowSeeds, row_rid, row_seeds, seed_of
from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.records.groups import GroupUid, Sample, tile
from buffer_rl.records.sample import STATUS_OF_REASON
from buffer_rl.rollout.lease import Lease, current_lease

if TYPE_CHECKING:
    from buffer_rl.engines.client import EngineClient, GenerateResult

REPEAT_S = 0.5
"""A request may reach its engine after the abort did, so the abort is repeated until every answer is here."""
GRACE_S = 30.0
"""An abort is answered at once; a generate function of the user that takes longer than this to end is cancelled."""
Asked = tuple[list[int], dict[str, Any], str]
"""What a row asks for: the ids of its prompt, its sampling parameters, and its ``routing_key``."""


def shared_seed(run_seed: int, uid: GroupUid, sample_index: int, part: int = 0, number: int = 0) -> int:
    """The seed of the request that the samples around ``sample_index`` share, ``0 <= seed < 2**31``: a function of its
    arguments alone, equal on every machine.

    number: how many responses this part of the sample requested before (``RequestNumbers``)."""
    further = f"|{part}|{number}" if part or number else ""
    return seed_of(f"{run_seed}|{uid}|{sample_index // ROWS}{further}")


def sampling_seed(run_seed: int, uid: GroupUid, sample_index: int, part: int = 0, number: int = 0) -> int:
    """The seed of one response, ``0 <= seed < 2**31``; the arguments are those of ``shared_seed``."""
    row = sample_index % ROWS
    return row_seeds(shared_seed(run_seed, uid, sample_index, part, number), row + 1)[row]


def request_id(lease: Lease, sample: Sample, number: int = 0) -> str:
    """The ``rid`` of response ``number``: different for every other lease, response and turn.

    No id of a running request is a prefix of one of another request: SGLang aborts by prefix."""
    further = f"#{number}" if number else ""
    turn = f"+{sample.response_length}" if sample.response_length else ""
    return f"{lease.request_id(str(sample.row_id) + further)}{turn}"


def shared_request_id(lease: Lease, sample: Sample) -> str:
    """The ``rid`` of the request that the sample may share with others."""
    row = sample.row_id
    return lease.request_id(f"{row.uid}/{row.sample_index // ROWS}x.{row.part}")


def routing_key(sample: Sample) -> str:
    """What the router may choose the sample's engine by, which has what the requests of a session, or of a prompt
    group, have in common: its ``session_id``, else its group, for all its turns."""
    return str(sample.session_id or sample.row_id.uid)


async def answer_for(
    sample: Sample,
    input_ids: list[int],
    sampling_params: dict[str, Any],
    *,
    gather: bool = False,
    lease: Lease | None = None,
    experts_start: int = 0,
) -> GenerateResult:
    """The engine's answer to ``input_ids``, checked; it may be aborted as soon as the rollout does not need the sample.

    The seed is the ``sampling_seed`` of ``sampling_params``, where they have one; else the sample's own, and for each
    further response of the sample another one. gather: the answer may wait for those of other samples of the group
    that are asked for in the same moment. lease: the current one if it is left out. experts_start: of so many tokens
    the experts are known (``--replay-routed-experts``).

    Raises RolloutError without an engine, EngineError, naming the row, if the engine refuses or its answer breaks the
    protocol."""
    with _naming(sample):
        result = await _result(lease or current_lease(), sample, input_ids, sampling_params, gather, experts_start)
    return _checked(sample, result)


def are_first_rows(samples: Sequence[Sample]) -> bool:
    """Whether they are several, and the rows from 0 on of one shared request."""
    first = samples[0]
    return (
        len(samples) > 1
        and first.sample_index % ROWS == 0
        and all(
            (s.sample_index, s.part, s.session_id) == (at, first.part, first.session_id)
            for at, s in enumerate(samples, first.sample_index)
        )
    )


async def answers_for(
    samples: Sequence[Sample], input_ids: list[int], sampling_params: dict[str, Any], lease: Lease
) -> list[GenerateResult]:
    """The engine's answers to one request for the new samples, which ``are_first_rows``, checked; none if rows of one
    request would get equal tokens. Raises as ``answer_for``, naming the first row."""
    first = samples[0]
    engine = _engine_of(lease, first)
    shared = SharedRequest(lease.requests or Requests(), lease, engine, first)
    with _naming(first):
        results = await shared.results((input_ids, sampling_params, routing_key(first)), len(samples))
    return [_checked(sample, result) for sample, result in zip(samples, results, strict=False)]


@contextlib.contextmanager
def _naming(sample: Sample) -> Iterator[None]:
    """An EngineError of the block names the engine; here the row is added."""
    try:
        yield
    except EngineError as error:
        where = f"row {sample.row_id}, {error.where}".removesuffix(", ")
        named = EngineError(error.what, where=where, expected=error.expected, hint=error.hint)
        named.status = error.status
        raise named from error


def _checked(sample: Sample, result: GenerateResult) -> GenerateResult:
    if len(result.log_probs) != len(result.output_ids):
        what = f"{len(result.output_ids)} tokens came with {len(result.log_probs)} log-probabilities"
        raise EngineError(what, where=f"row {sample.row_id}")
    if not tile(result.spans, len(result.output_ids)):
        raise EngineError(
            f"the version spans {list(result.spans)} are of {len(result.output_ids)} tokens",
            where=f"row {sample.row_id}",
            expected="spans that cover every token once, in order",
        )
    if result.finish_reason not in STATUS_OF_REASON:
        where, expected = f"row {sample.row_id}", ", ".join(STATUS_OF_REASON)
        raise EngineError(f"unknown finish reason {result.finish_reason!r}", where=where, expected=expected)
    return result


async def _result(
    lease: Lease, sample: Sample, input_ids: list[int], params: dict[str, Any], gather: bool, experts_start: int
) -> GenerateResult:
    engine, requests, key = _engine_of(lease, sample), lease.requests or Requests(), routing_key(sample)
    number = lease.numbers.number(sample) if lease.numbers is not None else 0
    if params.get("sampling_seed") is None:
        if gather and number == 0:
            shared = requests.shared(lease, engine, sample)
            if (result := await shared.join(sample.sample_index % ROWS, (input_ids, params, key))) is not None:
                return result
        seed = sampling_seed(lease.context.seed, sample.row_id.uid, sample.sample_index, sample.part, number)
        params = {**params, "sampling_seed": seed}
    rid = request_id(lease, sample, number)
    known: dict[str, int] = {"experts_start": experts_start} if experts_start else {}
    with requests.running(rid):
        return await engine.agenerate(rid, input_ids, params, routing_key=key, **known)


def _engine_of(lease: Lease, sample: Sample) -> EngineClient:
    if (engine := lease.context.engine) is None:
        hint = "remove uses_engine = False from the rollout function"
        raise RolloutError("this rollout has no engine", where=f"row {sample.row_id}", hint=hint)
    return engine


class Requests:
    """The running requests of one rollout. Belongs to one event loop. ``stopped``: generation must end."""

    grace_s = GRACE_S

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[str] = set()
        self._joinable: dict[tuple[Lease, GroupUid | None, int, int], SharedRequest] = {}

    @contextlib.contextmanager
    def running(self, *rids: str) -> Iterator[None]:
        """For the length of the block these are running requests, or rows of one, which ``stop`` aborts."""
        self._running.update(rids)
        try:
            yield
        finally:
            self._running.difference_update(rids)

    def shared(self, lease: Lease, engine: EngineClient, sample: Sample) -> SharedRequest:
        """The request of the sixteen samples of ``lease`` to which ``sample`` belongs. They may join it until the tasks
        that are ready now have run."""
        key = lease, sample.uid, sample.sample_index // ROWS, sample.part
        shared = self._joinable.get(key)
        if shared is None:
            shared = self._joinable[key] = SharedRequest(self, lease, engine, sample)
            asyncio.get_running_loop().call_soon(lambda: self._joinable.pop(key).send())
        return shared

    async def stop(self, engine: EngineClient | None, tasks: Callable[[], Sequence[asyncio.Task[Any]]]) -> None:
        """Abort these requests and no others, and wait until ``tasks()``, the tasks that still generate, is empty.

        Tasks left after ``grace_s`` are cancelled and awaited. An engine that cannot be reached has nothing to abort.
        """
        self.stopped = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                while pending := tasks():
                    if self._running and engine is not None:
                        with contextlib.suppress(EngineError):
                            await engine.abort(sorted(self._running))
                    await asyncio.wait(pending, timeout=REPEAT_S)
        late = tasks()
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


@dataclass(slots=True, kw_only=True, eq=False)
class _Joined:
    """A sample that asks for a place in a shared request. answer: None where it has to ask alone."""

    position: int
    asked: Asked
    answer: asyncio.Future[GenerateResult | None]


class SharedRequest:
    """One request for several samples. A sample that is cancelled ends no other; without any left, it is cancelled.

    sample: one of them. It gives the request's id, and the seed for engines that mix the seeds of rows from it.
    """

    def __init__(self, requests: Requests, lease: Lease, engine: EngineClient, sample: Sample) -> None:
        self._requests, self._engine = requests, engine
        self._rid = shared_request_id(lease, sample)
        row = sample.row_id
        self._seed = shared_seed(lease.context.seed, row.uid, row.sample_index, row.part)
        self._joined: list[_Joined] = []
        self._task: asyncio.Task[None] | None = None

    async def join(self, position: int, asked: Asked) -> GenerateResult | None:
        """The answer to row ``position``; None if it has no place in the request. Raises what the request raised."""
        answer: asyncio.Future[GenerateResult | None] = asyncio.get_running_loop().create_future()
        self._joined.append(_Joined(position=position, asked=asked, answer=answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if self._task is not None and all(joined.answer.cancelled() for joined in self._joined):
                self._task.cancel()
                await asyncio.wait([self._task])
            raise

    def send(self) -> None:
        """Ask for the positions from 0 on, without a gap, whose prompt and parameters are those of position 0."""
        rows: list[_Joined] = []
        try:
            for joined in sorted(self._joined, key=lambda joined: joined.position):
                first = rows[0] if rows else joined
                if joined.position == len(rows) and joined.asked == first.asked and not joined.answer.done():
                    rows.append(joined)
        except Exception:  # fault boundary: parameters are the user's, and may not compare; each shows its error alone
            rows = []
        if len(rows) < 2:
            rows = []
        for joined in self._joined if len(rows) < len(self._joined) else ():
            if joined not in rows and not joined.answer.done():
                joined.answer.set_result(None)
        self._joined = rows
        if rows:
            self._task = asyncio.create_task(self._ask(rows))

    async def _ask(self, rows: list[_Joined]) -> None:
        waiting = [row.answer for row in rows]
        results: Sequence[GenerateResult | None]
        try:
            results = await self.results(rows[0].asked, len(rows)) or [None] * len(rows)
        except Exception as error:  # fault boundary: every row raises it where it is awaited
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for answer, result in zip(waiting, results, strict=True):
                if not answer.done():
                    answer.set_result(result)
        finally:
            for answer in waiting:  # what is not answered yet: this task is cancelled
                answer.cancel()

    async def results(self, asked: Asked, num_rows: int) -> list[GenerateResult]:
        """The answers to the rows; none if rows of one request would get equal tokens."""
        input_ids, params, key = asked
        draw = await self._engine.row_seeds()
        if draw is RowSeeds.SHARED:
            return []
        if draw is RowSeeds.OWN:
            params = {**params, "sampling_seed": self._seed}
        with self._requests.running(*(row_rid(self._rid, row) for row in range(num_rows))):
            return await self._engine.agenerate_rows(self._rid, input_ids, num_rows, params, routing_key=key)
