"""The production of groups: tickets, the selections of steps, and the work of roles on them while they are open.

What is lost before an optimizer step has all of production start again, from that step on: tickets and selections that
are not committed are given up, and the queue of the Buffer comes first (``Production.start_again``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.dispatch import Method, Ts
from buffer_rl.driver.offload import MemoryTurns
from buffer_rl.driver.production_metrics import EndedTicket, ProductionMetrics, joined_metrics
from buffer_rl.driver.tasks import Calls, NoAnswer, Restarts, StepTimes, Task, all_of, is_worker_death
from buffer_rl.errors import BufferRestartedError, BufferRLError, PayloadLostError, RolloutError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.plan.schedule import RunPlan
from buffer_rl.rollout.worker import RolloutWorker
from buffer_rl.trainer.rank import TrainRank
from buffer_rl.trainer.role_worker import RoleWorker

if TYPE_CHECKING:
    from buffer_rl.observe.observer import RunObserver
    from buffer_rl.records.groups import RolloutReport, Ticket

Produced = tuple[dict[str, float], list[dict[str, Any]]]
"""Metrics of a ticket or an evaluation, and samples to show."""


class NothingLeft(Exception):
    """The last tickets ended short by all groups of a step, and no later one makes up for them."""


class Production:
    """Starts tickets as the schedule lets them open, and closes the selections of steps.

    released: the version that the Buffer admits by; None before the first one. lost: the error with which production
    was lost, until it starts again. producing: the tickets that are under way, by number.
    streams: the work of roles on each selection, by step and role, in the order in which it was started.
    """

    def __init__(
        self, plan: RunPlan, calls: Calls, observer: RunObserver, times: StepTimes, memory: MemoryTurns
    ) -> None:
        self._plan, self._calls, self._observer, self._times, self._memory = plan, calls, observer, times, memory
        self._restarts = Restarts(plan.roles, calls.runtime, observer, plan.train_timeout_s)
        self.released: int | None = None
        self.lost: BufferRLError | None = None
        self._next = plan.first_rollout
        self._is_halted = False
        self._tickets: dict[int, Ticket] = {}  # that run
        self.producing: dict[int, asyncio.Task[None]] = {}
        self._ended: dict[int, EndedTicket] = {}  # tickets that are not part of a step's metrics yet
        self.streams: dict[int, dict[str, asyncio.Task[WorkReport]]] = {}
        self._closing: asyncio.Task[RolloutReport] | None = None
        self._metrics = ProductionMetrics(calls.runtime.now)
        self._open_calls: set[Task] = set()  # on rollout workers and roles
        self._incarnation: str | None = None  # of the Buffer that has the tickets
        self._retries = 0
        self._counted: str | None = None  # the newest Buffer whose predecessor's death is among the retries

    @property
    def trainer_streams(self) -> bool:
        """Whether the trainer works on groups of a selection that is open."""
        return any(role in self._plan.roles.trained for streams in self.streams.values() for role in streams)

    # -- tickets -------------------------------------------------------------------------------------

    def release(self, version: int) -> None:
        """The Buffer admits tickets by this version from now on."""
        self.released = version
        self._calls.tell()

    async def admit(self, allows: Callable[[int], bool]) -> None:
        """Start every ticket that the schedule lets open, while the run ``allows`` it. Never ends by itself."""
        while True:
            await self._calls.until(lambda: allows(self._next) and self._may_open())
            await self._memory.generation(evaluation=False)
            if self._is_halted:  # meanwhile
                continue
            number, self._next = self._next, self._next + 1
            self.producing[number] = self._calls.spawn(self._produce(number))

    def _may_open(self) -> bool:
        schedule = self._plan.schedule
        if self._is_halted or self._next >= self._plan.num_rollouts:
            return False
        if self.released is None or not schedule.may_start(self._next, self.released):
            return False
        return schedule.by_window or not self.producing

    async def _produce(self, number: int) -> None:
        """One ticket. If it is lost, *train* has production start again."""
        shown = self._times.shown("rollout", "rollout", number) if self._plan.schedule.max_staleness else nullcontext()
        try:
            with shown:
                ended = await self._produced(number)
        except BufferRLError as error:
            await self._lose(error)
        else:
            self._ended[number] = ended
        del self.producing[number], self._tickets[number]
        self._calls.tell()

    async def _produced(self, number: int) -> EndedTicket:
        schedule = self._plan.schedule
        ticket = self._tickets[number] = await self._calls.buffer(BufferState.generate, number, False)
        self._metrics.begin()
        self._incarnation = ticket.incarnation
        if schedule.streams and not schedule.by_window:
            await self._calls.buffer(BufferState.open_selection, number)
        metrics, samples = await self._run_ticket(ticket)
        if schedule.by_window or schedule.max_staleness:
            report = await self._calls.buffer(BufferState.end_ticket, self._tickets[number])
            return EndedTicket(metrics, samples, report)
        reports = await self._calls.buffer(BufferState.end_and_close, self._tickets[number])
        return EndedTicket(metrics, samples, *reports)

    async def _run_ticket(self, ticket: Ticket) -> Produced:
        """Have rollout workers run a ticket: one, or several that share it."""
        if (num_parts := min(self._plan.workers_per_ticket, ticket.num_groups)) < 2:
            return await self._run_part(ticket)
        parts = await self._calls.buffer(BufferState.share, ticket, num_parts)
        produced = await all_of(self._run_part(part) for part in parts)
        metrics = joined_metrics([part for part, _ in produced], [part.num_groups for part in parts])
        return metrics, [sample for _, samples in produced for sample in samples]

    async def _run_part(self, ticket: Ticket) -> Produced:
        """Have a rollout worker run a ticket, or its part of one, and another one go on with it where it dies."""
        number, schedule = ticket.rollout_id, self._plan.schedule
        while True:
            seen = self._restarts.count("rollout")
            call = self._submit("rollout", RolloutWorker.run, ticket)
            if schedule.streams and not schedule.by_window and number not in self.streams:
                self._start_roles(number, while_open=True)
            try:
                return cast("Produced", await self._answer_while_it_moves(call))
            except BufferRLError as error:
                if not self._plan.passes_on_tickets or not is_worker_death("rollout", error):
                    raise
                await self._restarts.replace("rollout", seen, error)
            passed = await self._calls.buffer(BufferState.pass_on, ticket)
            if self._tickets[number] == ticket:  # else it is a part, and the ticket stays
                self._tickets[number] = passed
            ticket = passed
            missing = ticket.num_groups
            self._observer.notice(f"{ticket.task} goes on: {missing} groups are missing, and its metrics are of these")

    # -- selections ----------------------------------------------------------------------------------

    def can_close(self, rollout_id: int) -> bool:
        """Whether the groups of a step are finished. In an asynchronous run its selection is closed then."""
        return self._close(rollout_id).done() if self._plan.schedule.by_window else rollout_id in self._ended

    async def selected(
        self, rollout_id: int, wait: Callable[[Callable[[], bool]], Awaitable[None]]
    ) -> dict[str, float]:
        """Close the selection of a step, once its groups are finished, and have the roles work on it. Returns its
        metrics, at a staleness of 0 with those of its ticket. wait: for a condition. Raises NothingLeft if the run has
        trained, and RolloutError if it has not, where there is no group."""
        schedule = self._plan.schedule
        if schedule.by_window and schedule.streams and rollout_id not in self.streams:
            await self._calls.buffer(BufferState.open_selection, rollout_id)
            self._start_roles(rollout_id, while_open=True)
        is_of_ticket = not schedule.max_staleness  # so that both have the same metrics
        await wait(lambda: self.can_close(rollout_id) and not (is_of_ticket and rollout_id not in self._ended))
        if self._closing is not None:
            closing, self._closing = self._closing, None
            report = closing.result()
        else:
            if (closed := self._ended[rollout_id].closed) is None:
                closed, _ = await self._calls.buffer(BufferState.close_selection, rollout_id)
            report = cast("RolloutReport", closed)  # its ticket has ended
        if report.num_groups == 0:
            drops = self._drops(rollout_id, report)
            if not is_of_ticket and rollout_id > self._plan.first_rollout and self._next == self._plan.num_rollouts:
                raise NothingLeft(f"the last tickets ended short by all groups of step {rollout_id + 1}; {drops=}")
            what = "no group was finished, so there is nothing to train on"
            hint = f"dropped: {drops}" if drops else "does the rollout function report its groups?"
            raise RolloutError(what, where=f"rollout {rollout_id}", hint=hint)
        if not schedule.streams:
            self._start_roles(rollout_id, while_open=False)
        if not is_of_ticket:
            return self._metrics.of_selection(report)
        ticket = self._ended.pop(rollout_id)
        metrics = self._metrics.of_both(ticket, report)
        self._observer.rollout_ended(rollout_id, False, metrics, ticket.samples)
        return metrics

    def _close(self, rollout_id: int) -> asyncio.Task[RolloutReport]:
        """The closing of a selection of the window; it is begun once."""
        if self._closing is None:
            last = self._plan.num_rollouts - 1
            call = self._calls.runtime.submit("selection", BufferClient.await_selection, rollout_id, last)
            self._closing = asyncio.ensure_future(self._answer_while_it_moves(call))
            self._closing.add_done_callback(lambda _: self._calls.tell())
        return self._closing

    def _drops(self, rollout_id: int, report: RolloutReport) -> dict[str, int]:
        """The groups that a step's tickets dropped, by reason, as far as they have ended."""
        reports = [report, *(self._ended[number].report for number in self._reported_with(rollout_id))]
        return dict(sorted(sum((Counter(each.drops) for each in reports), Counter()).items()))

    def _reported_with(self, rollout_id: int) -> list[int]:
        return sorted(self._ended) if self._plan.schedule.by_window else [rollout_id]

    def report_tickets(self, rollout_id: int) -> dict[str, float]:
        """The metrics of the tickets that ended since this was called before, or of the step's own. The observer gets
        each of them."""
        ended = {number: self._ended.pop(number) for number in self._reported_with(rollout_id)}
        for number, ticket in ended.items():
            self._observer.rollout_ended(number, False, ticket.all_metrics, ticket.samples)
        return self._metrics.of_tickets(list(ended.values()))

    # -- roles ---------------------------------------------------------------------------------------

    def _start_roles(self, step: int, *, while_open: bool) -> None:
        """Have the roles work on a selection; trained ones too, if they are to work while it is open."""
        plan = self._plan.roles
        limit = self._plan.train_timeout_s + (self._plan.rollout_timeout_s if while_open else 0.0)

        def start(role: str, method: Method[*Ts], *work: *Ts) -> asyncio.Task[WorkReport]:
            return self._calls.spawn(self._stream(role, step, limit, method, *work))

        streams = {role: start(role, RoleWorker.stream, step) for role in plan.dedicated_roles}
        for role in plan.trained if while_open else ():
            if (models := plan.models_of(role)) or plan.stream_gradients:
                fields = plan.awaited_by(role)
                streams[role] = start(role, TrainRank.stream, step, models, fields, plan.stream_gradients)
        self.streams[step] = streams

    async def _stream(self, role: str, step: int, limit_s: float, method: Method[*Ts], *work: *Ts) -> WorkReport:
        """The work of a role on a selection. One whose processes die is replaced, and works on what it had not
        written."""
        while True:
            seen = self._restarts.count(role)
            try:
                return cast("WorkReport", await self._answer(self._submit(role, method, *work), limit_s))
            except BufferRLError as error:
                if role not in self._plan.roles.dedicated_roles or not is_worker_death(role, error):
                    await self._lose(error)
                    return WorkReport()
                await self._restarts.replace(role, seen, error)
            await self._calls.buffer(BufferState.requeue_for_readers, f"train_{step}", role)

    # -- evaluations ---------------------------------------------------------------------------------

    async def evaluate(self, version: int) -> Produced:
        """An evaluation of the published ``version``; one that is lost is made again, since its metrics are of all
        groups."""
        await self._memory.generation(evaluation=True)
        while True:
            ticket = await self._calls.buffer(BufferState.generate, version, True)
            try:
                with self._times.of("evaluate", "rollout", version):
                    limit = self._plan.schedule.ticket_limit_s(self._plan.rollout_timeout_s)
                    produced = await self._calls.call("rollout", RolloutWorker.run, ticket, timeout_s=limit)
                await self._calls.buffer(BufferState.end_ticket, ticket)
            except BufferRLError as error:
                await self._count_loss(ticket.task, ticket.incarnation, error)
                await self._calls.buffer(BufferState.clear, ticket.task)
                continue
            await self._calls.buffer(BufferState.clear, ticket.task)
            return cast("Produced", produced)

    # -- losses --------------------------------------------------------------------------------------

    async def _lose(self, error: BufferRLError) -> None:
        """Note that production must start again. Raises ``error`` if nothing was lost that can be produced again."""
        lost = isinstance(error, PayloadLostError | BufferRestartedError) or is_worker_death("rollout", error)
        if not lost and await self._buffer_of_now() == self._incarnation:
            raise error
        self.lost = self.lost or error
        self._calls.tell()

    async def _buffer_of_now(self) -> str:
        return str((await self._calls.buffer(BufferState.get_progress))["incarnation"])

    async def _count_loss(self, what: str, incarnation: str | None, error: BufferRLError) -> None:
        """Count that ``what``, of the Buffer ``incarnation``, is produced again; a dead rollout worker is replaced.
        Raises ``error`` if nothing was lost, or too much was."""
        now = await self._buffer_of_now()
        replaced = now != incarnation or isinstance(error, BufferRestartedError)
        died = is_worker_death("rollout", error)
        if not (replaced or died or isinstance(error, PayloadLostError)):
            raise error
        retries = self._retries + (now != self._counted if replaced else 1)
        if retries > self._plan.max_rollout_retries:
            error.hint = f"--buffer-max-restarts: what was lost was produced again {self._retries} times, and no more"
            raise error
        if died:
            await self._restarts.replace("rollout", self._restarts.count("rollout"), error)
        self._retries, self._counted = retries, now if replaced else self._counted
        self._observer.notice(f"{what} is produced again ({retries} of {self._plan.max_rollout_retries}): {error}")

    async def start_again(self, step: int, error: BufferRLError) -> None:
        """Start production again, from ``step`` on. Raises ``error`` if nothing was lost, or too much was."""
        self._is_halted = True
        newest = max(self._next - 1, step)
        tickets = f"train_{step}" if newest == step else f"train_{step} to train_{newest}"
        await self._count_loss(tickets, self._incarnation, error)
        await self.end(step, waits_for_workers=True)
        await self._calls.on_trained(TrainRank.discard)
        self.lost = None
        self._next = step
        self._is_halted = False
        self._calls.tell()

    async def end(self, step: int, *, waits_for_workers: bool) -> None:
        """Give up all tickets, and every selection from ``step`` on. Returns once no role works on them."""
        self._is_halted = True
        for task in (tasks := self.under_way()):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.streams.clear()
        self._ended.clear()
        self.producing.clear()
        self._tickets.clear()
        self._closing = None
        await self._calls.buffer(BufferState.abandon, step)
        calls, self._open_calls = self._open_calls, set()
        left = [call for call in calls if waits_for_workers or call.role != "rollout"]
        # One behind them on each role, whose processes may not end together.
        left += [self._calls.runtime.submit(role, RoleWorker.ready) for role in self._plan.roles.dedicated_roles]
        for call in left:
            with suppress(BufferRLError):  # errors of work that is given up are not asked for
                await self._calls.runtime.answer(call, self._plan.rollout_timeout_s)

    def under_way(self) -> list[asyncio.Task[Any]]:
        streams = [task for tasks in self.streams.values() for task in tasks.values()]
        return [*self.producing.values(), *streams, *([] if self._closing is None else [self._closing])]

    def _submit(self, role: str, method: Method[*Ts], *args: *Ts) -> Task:
        """Start a call of production."""
        call = self._calls.runtime.submit(role, method, *args)
        self._open_calls.add(call)
        return call

    async def _answer_while_it_moves(self, call: Task) -> Any:
        """The answer of a call that waits for groups. At a staleness of 0 it has the time of a rollout; else (S + 1)
        times as long after the last change in the Buffer, since tickets queue behind each other."""
        limit, before = self._plan.schedule.ticket_limit_s(self._plan.rollout_timeout_s), -1
        while True:
            try:
                return await self._answer(call, limit)
            except NoAnswer:
                progress = await self._calls.buffer(BufferState.get_progress)
                if not self._plan.schedule.target or progress["revision"] == before:
                    raise
                before = progress["revision"]

    async def _answer(self, call: Task, timeout_s: float) -> Any:
        """The answer of a call of production, which is under way until it has one."""
        try:
            answer = await self._calls.runtime.answer(call, timeout_s)
        except BufferRLError as error:
            if not isinstance(error, NoAnswer):
                self._open_calls.discard(call)
            raise
        self._open_calls.discard(call)
        return answer
