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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from buffer_rl.engines.protocol import ROWS, SEED_BITS, RowSeeds, row_rid, row_seeds
from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.records.groups import GroupUid, RowId, Sample, Status, tile
from buffer_rl.records.sample import STATUS_OF_REASON
from buffer_rl.rollout.context import RolloutContext, current_context

if TYPE_CHECKING:
    from buffer_rl.engines.client import EngineClient, GenerateResult

REPEAT_S = 0.5
"""A request may reach its engine after the abort did, so the abort is repeated until every answer is here."""
GRACE_S = 30.0
"""An abort is answered at once; a generate function of the user that takes longer than this to end is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseScope:
    """Which lease the running code works on; part of every request id.

    task: the pool (``train_3``, ``eval_3``); incarnation and attempt: those of the group's lease. A repeated
    lease of one row gets new request ids, so that an engine never answers it from an earlier request.
    requests: those of the rollout; None outside one.
    numbers: of the responses that were requested during this attempt; None outside one.
    """

    task: str = ""
    incarnation: str = ""
    attempt: int = 1
    requests: Requests | None = None
    numbers: RequestNumbers | None = None


_SCOPE: ContextVar[LeaseScope] = ContextVar("buffer_rl_lease_scope", default=LeaseScope())  # noqa: B039 (frozen)


def current_scope() -> LeaseScope:
    """The lease that the running code works on; an empty scope outside a rollout."""
    return _SCOPE.get()


@contextlib.contextmanager
def lease_scope(scope: LeaseScope) -> Iterator[None]:
    """Make ``scope`` the one that ``current_scope()`` returns, here and in tasks started from here."""
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def shared_seed(run_seed: int, uid: GroupUid, sample_index: int, part: int = 0, number: int = 0) -> int:
    """The seed of the request that the samples around ``sample_index`` share, ``0 <= seed < 2**31``: a function of its
    arguments alone, equal on every machine.

    number: how many responses this part of the sample requested before (``RequestNumbers``)."""
    further = f"|{part}|{number}" if part or number else ""
    digest = blake2b(f"{run_seed}|{uid}|{sample_index // ROWS}{further}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def sampling_seed(run_seed: int, uid: GroupUid, sample_index: int, part: int = 0, number: int = 0) -> int:
    """The seed of one response, ``0 <= seed < 2**31``; the arguments are those of ``shared_seed``."""
    row = sample_index % ROWS
    return row_seeds(shared_seed(run_seed, uid, sample_index, part, number), row + 1)[row]


def request_id(sample: Sample, number: int = 0) -> str:
    """The ``rid`` of response ``number``: different for every other lease, response and turn.

    No id of a running request is a prefix of one of another request: SGLang aborts by prefix."""
    further = f"#{number}" if number else ""
    turn = f"+{sample.response_length}" if sample.response_length else ""
    return f"{_lease_id(str(sample.row_id) + further)}{turn}"


def shared_request_id(sample: Sample) -> str:
    """The ``rid`` of the request that the sample may share with others."""
    row = sample.row_id
    return _lease_id(f"{row.uid}/{row.sample_index // ROWS}x.{row.part}")


def routing_key(sample: Sample) -> str:
    """What the router may choose the sample's engine by, which has what the requests of a session, or of a prompt
    group, have in common: its ``session_id``, else its group, for all its turns."""
    return str(sample.session_id or sample.row_id.uid)


def _lease_id(name: str) -> str:
    scope = current_scope()
    return f"{scope.task}:{name}:{scope.attempt}:{scope.incarnation}"


def is_stopped() -> bool:
    """Whether the rollout has enough groups: what is not generated yet must end as ``aborted``."""
    requests = current_scope().requests
    return requests is not None and requests.stopped


async def answer_for(
    sample: Sample, input_ids: list[int], sampling_params: dict[str, Any], *, gather: bool = False
) -> GenerateResult:
    """The engine's answer to ``input_ids``, checked; it may be aborted as soon as the rollout does not need the sample.

    The seed is the ``sampling_seed`` of ``sampling_params``, where they have one; else the sample's own, and for each
    further response of the sample another one. gather: the answer may wait for those of other samples of the group
    that are asked for in the same moment.

    Raises RolloutError without an engine, EngineError, naming the row, if the engine refuses or its answer breaks the
    protocol."""
    context = current_context()
    with _naming(sample):
        engine = _engine(context, sample)
        result = await _result(context, engine, current_scope(), sample, input_ids, sampling_params, gather)
    return _checked(sample, result)


async def num_sharing(context: RolloutContext, samples: Sequence[Sample]) -> int:
    """How many of ``samples``, from the first on, can share a request: first responses to one prompt, at the places
    that rows have. 0 where that is one alone. Raises EngineError if no engine says how rows draw."""
    count = 0
    try:
        first = _common(samples[0])
        for sample in samples[:ROWS]:
            fresh = sample.status is Status.PENDING and sample.sample_index % ROWS == count
            if not fresh or _common(sample) != first:
                break
            count += 1
    except Exception:  # fault boundary: values of the user's may not compare; each sample shows its error alone
        return 0
    if count < 2 or (context.engine is not None and await context.engine.row_seeds() is RowSeeds.SHARED):
        return 0
    return count


def _common(sample: Sample) -> tuple[Any, ...]:
    """What is equal in samples that share a request: what the tokens of the prompt are made of, and the engine."""
    return sample.prompt, sample.metadata.get("tools"), routing_key(sample)


async def shared_answers(
    samples: Sequence[Sample], input_ids: list[int], sampling_params: dict[str, Any]
) -> list[GenerateResult]:
    """The answers to ``input_ids`` for ``samples``, which can share a request (``num_sharing``). Raises what
    ``answer_for`` raises, for the first of them."""
    context, scope, first = current_context(), current_scope(), samples[0]
    requests = scope.requests or Requests()
    with _naming(first):
        engine, seed = _engine(context, first), None
        if await engine.row_seeds() is RowSeeds.OWN:
            seed = shared_seed(context.seed, first.row_id.uid, first.sample_index, first.part)
        rid, key = shared_request_id(first), routing_key(first)
        results = await requests.ask(engine, rid, input_ids, len(samples), sampling_params, seed, key)
    return [_checked(sample, result) for sample, result in zip(samples, results, strict=True)]


def _engine(context: RolloutContext, sample: Sample) -> EngineClient:
    if context.engine is None:
        raise RolloutError(
            "this rollout has no engine",
            where=f"row {sample.row_id}",
            hint="remove uses_engine = False from the rollout function",
        )
    return context.engine


@contextlib.contextmanager
def _naming(sample: Sample) -> Iterator[None]:
    """An EngineError names the engine; here the row is added."""
    try:
        yield
    except EngineError as error:
        where = f"row {sample.row_id}, {error.where}".removesuffix(", ")
        named = EngineError(error.what, where=where, expected=error.expected, hint=error.hint)
        named.status = error.status
        raise named from error


def _checked(sample: Sample, result: GenerateResult) -> GenerateResult:
    if len(result.log_probs) != len(result.output_ids):
        raise EngineError(
            f"{len(result.output_ids)} tokens came with {len(result.log_probs)} log-probabilities",
            where=f"row {sample.row_id}",
        )
    if not tile(result.spans, len(result.output_ids)):
        raise EngineError(
            f"the version spans {list(result.spans)} are of {len(result.output_ids)} tokens",
            where=f"row {sample.row_id}",
            expected="spans that cover every token once, in order",
        )
    if result.finish_reason not in STATUS_OF_REASON:
        raise EngineError(
            f"unknown finish reason {result.finish_reason!r}",
            where=f"row {sample.row_id}",
            expected=", ".join(STATUS_OF_REASON),
        )
    return result


async def _result(
    context: RolloutContext,
    engine: EngineClient,
    scope: LeaseScope,
    sample: Sample,
    input_ids: list[int],
    params: dict[str, Any],
    gather: bool,
) -> GenerateResult:
    requests = scope.requests or Requests()
    number = scope.numbers.number(sample) if scope.numbers is not None else 0
    key = routing_key(sample)
    if params.get("sampling_seed") is None:
        identity = (context.seed, sample.row_id.uid, sample.sample_index, sample.part, number)
        if gather and number == 0 and (draw := await engine.row_seeds()) is not RowSeeds.SHARED:
            seed = shared_seed(*identity) if draw is RowSeeds.OWN else None
            shared = requests.shared(engine, shared_request_id(sample), seed)
            if (result := await shared.join(sample.sample_index % ROWS, input_ids, params, key)) is not None:
                return result
        params = {**params, "sampling_seed": sampling_seed(*identity)}
    rid = request_id(sample, number)
    with requests.running(rid):
        return await engine.agenerate(rid, input_ids, params, routing_key=key)


class RequestNumbers:
    """Numbers the responses that are requested during one attempt at a group, for their seeds and request ids.

    Each row counts from 0, in the order of the calls. A response that continues, for example with its next turn, keeps
    its number: its request starts at a later position.
    """

    def __init__(self) -> None:
        self._next: Counter[RowId] = Counter()
        # By id(sample); holding the sample keeps the id unique. The last entry is the position of its last request.
        self._last: dict[int, tuple[Sample, RowId, int, int]] = {}

    def number(self, sample: Sample) -> int:
        """The number of the response that ``sample`` requests now."""
        row_id, position = sample.row_id, sample.response_length
        _, last_row_id, last_position, number = self._last.get(id(sample), (None, None, 0, 0))
        if row_id != last_row_id or position <= last_position:
            number = self._next[row_id]
            self._next[row_id] += 1
        self._last[id(sample)] = (sample, row_id, position, number)
        return number


class Requests:
    """The running requests of one rollout. Belongs to one event loop. ``stopped``: generation must end."""

    grace_s = GRACE_S

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[str] = set()
        self._joinable: dict[str, SharedRequest] = {}

    @contextlib.contextmanager
    def running(self, *rids: str) -> Iterator[None]:
        """For the length of the block these are running requests, or rows of one, which ``stop`` aborts."""
        self._running.update(rids)
        try:
            yield
        finally:
            self._running.difference_update(rids)

    def shared(self, engine: EngineClient, rid: str, seed: int | None) -> SharedRequest:
        """The request ``rid``, which samples may join until the tasks that are ready now have run."""
        shared = self._joinable.get(rid)
        if shared is None:
            shared = self._joinable[rid] = SharedRequest(self, engine, rid, seed)
            asyncio.get_running_loop().call_soon(lambda: self._joinable.pop(rid).send())
        return shared

    async def ask(
        self,
        engine: EngineClient,
        rid: str,
        input_ids: list[int],
        num_rows: int,
        params: dict[str, Any],
        seed: int | None,
        key: str,
    ) -> list[GenerateResult]:
        """The answers to one request of several rows, which ``stop`` aborts. seed: see ``SharedRequest``."""
        seeded = {} if seed is None else {"sampling_seed": seed}
        with self.running(*(row_rid(rid, row) for row in range(num_rows))):
            return await engine.agenerate_rows(rid, input_ids, num_rows, {**params, **seeded}, routing_key=key)

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
    input_ids: list[int]
    params: dict[str, Any]
    key: str
    answer: asyncio.Future[GenerateResult | None]


class SharedRequest:
    """One request for several samples. A sample that is cancelled ends no other; without any left, it is cancelled.

    seed: its ``sampling_seed``, of which engines make those of the rows; None where they do not.
    """

    def __init__(self, requests: Requests, engine: EngineClient, rid: str, seed: int | None) -> None:
        self._requests, self._engine, self._rid, self._seed = requests, engine, rid, seed
        self._joined: list[_Joined] = []
        self._task: asyncio.Task[None] | None = None

    async def join(
        self, position: int, input_ids: list[int], params: dict[str, Any], key: str
    ) -> GenerateResult | None:
        """The answer to row ``position``; None if it has no place in the request. Raises what the request raised.
        key: see ``routing_key``."""
        answer: asyncio.Future[GenerateResult | None] = asyncio.get_running_loop().create_future()
        self._joined.append(_Joined(position=position, input_ids=input_ids, params=params, key=key, answer=answer))
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
                is_equal = (joined.input_ids, joined.params, joined.key) == (first.input_ids, first.params, first.key)
                if joined.position == len(rows) and is_equal and not joined.answer.done():
                    rows.append(joined)
        except Exception:  # fault boundary: parameters are the user's, and may not compare; each shows its error alone
            rows = []
        if len(rows) < 2:
            rows = []
        for joined in self._joined:
            if joined not in rows and not joined.answer.done():
                joined.answer.set_result(None)
        self._joined = rows
        if rows:
            self._task = asyncio.create_task(self._ask(rows))

    async def _ask(self, rows: list[_Joined]) -> None:
        first, waiting = rows[0], [row.answer for row in rows]
        try:
            results = await self._requests.ask(
                self._engine, self._rid, first.input_ids, len(rows), first.params, self._seed, first.key
            )
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
