"""Runs a plan: coroutines that produce tickets, train steps, and evaluate.

Who waits for whom: *admit* waits until the schedule lets the next ticket open, and starts a *produce* for it, which
waits for a rollout worker. *train* waits for the groups of its next step, then for roles and trainers; before a
publication it waits for an evaluation that is pinned to the version of the engines. *evaluate* waits for a rollout
worker. Every call has a deadline. Rollout workers wait for engines and for the Buffer; trainer ranks wait for the
Buffer and for each other; the publisher waits for the trainer and for the engines.

Order of one step: selected → train → commit → update the reference → save → publish → release → evaluate. A checkpoint
therefore never holds weights whose groups still count as untrained. From the optimizer step to its commit, in a save,
and from a publication to its release, a failure elsewhere does not interrupt *train*; the first one ends the run then.
``buffer_rl.driver.offload`` says who has memory.

What is lost, and what goes on:

- Buffer, storage process: before an optimizer step production starts again, from that step on, with the same groups.
  After it the commit needs only the ledger.
- Rollout worker: its open leases. Another one goes on with each of its tickets; an evaluation is made again, since its
  metrics are of all groups.
- A role's process: what it had not written. The role is replaced, and gets those groups again.
- Trainer rank: all since the newest checkpoint, from which a global restart goes on (``buffer_rl.driver.restart``).

The first Ctrl-C ends the run after the step under way, and saves it. SIGTERM does not wait for production or an
evaluation: their groups are pending again, and the last step is saved, within ``save_on_exit_s`` of the signal.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.environment import StopRequest
from buffer_rl.driver.offload import MemoryTurns
from buffer_rl.driver.tasks import Restarts, Runtime, StepTimes, Task, is_worker_death, role_of, unbroken
from buffer_rl.errors import (
    BufferRLError,
    DeadlineError,
    EndedBySignal,
    PayloadLostError,
    RolloutError,
    WorkerDiedError,
)
from buffer_rl.observe.metrics import DROP_PREFIX, drop_metrics
from buffer_rl.observe.timeline import WorkReport, clock_origin
from buffer_rl.plan.roles import FIELD_OF_MODEL
from buffer_rl.plan.schedule import RunPlan, RunResult
from buffer_rl.rollout.production import task_group

if TYPE_CHECKING:
    from buffer_rl.observe.observer import RunObserver
    from buffer_rl.records.groups import RolloutReport, Ticket

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Produced = tuple[dict[str, float], list[dict[str, Any]]]
"""Metrics of a ticket or an evaluation, and samples to show."""
Ended = tuple[dict[str, float], list[dict[str, Any]], dict[str, int]]
"""The same, and the groups that the ticket dropped, by reason."""


class StopNow(Exception):
    """A signal with a deadline came during production or an evaluation."""


SAVE_AFTER_ERROR_S = 30.0
"""How long a run that ends with an error waits for ranks that write a checkpoint; the rest of it needs none."""


class Driver:
    """Runs a plan. ``runtime`` has the roles buffer, selection, rollout, train, reference, publish, engines, save and
    record, as the plan needs them.

    ``save.save(step)`` takes the state of one checkpoint: weights, optimizer, Buffer and random states after ``step``
    optimizer steps; it is whole once ``save.seal()`` has returned. ``record.save(rollout_id)`` keeps the rows of a
    selection that is closed and not trained on yet. starved: the version that every engine lacks, if there is one.
    """

    def __init__(
        self,
        plan: RunPlan,
        runtime: Runtime,
        observer: RunObserver,
        stop: StopRequest | None = None,
        starved: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._plan, self._runtime, self._observer = plan, runtime, observer
        self._stop = StopRequest() if stop is None else stop
        self._starved = starved
        self._version = plan.first_rollout
        self._published: int | None = None if plan.publish_at_start else plan.first_rollout
        self._released: int | None = None  # the version that the Buffer admits by
        self._next_ticket = plan.first_rollout
        self._tickets: dict[int, Ticket] = {}  # that run
        self._producing: dict[int, asyncio.Task[None]] = {}
        self._produced: dict[int, Ended] = {}  # by tickets that have ended, and are not part of a step's metrics
        self._streams: dict[int, dict[str, asyncio.Task[WorkReport]]] = {}  # of roles, by step
        self._closing: asyncio.Task[RolloutReport] | None = None
        self._calls: set[Task] = set()  # on rollout workers and roles, for production
        self._lost: BufferRLError | None = None
        self._incarnation: str | None = None
        self._is_preparing = self._is_halted = False
        self._evaluating: asyncio.Task[None] | None = None
        self._retries = 0
        self._counted: str | None = None  # the newest Buffer whose predecessor's death is among the retries
        self._compared = False
        self._restarts = Restarts(plan.roles, runtime, observer, plan.train_timeout_s)
        self._times = StepTimes(runtime, observer)
        self._saved: int | None = None
        self._owes_evaluation = False
        self._saving: Task | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._memory = MemoryTurns(plan, self._times.of, self._on_trained, self._call, self._publish)
        self._result = RunResult(steps=plan.first_rollout)

    def run(self) -> RunResult:
        """Run to the end of the plan. Raises the first error of any role, named."""
        return self._runtime.run(self._main, self._look)

    async def _main(self) -> RunResult:
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = loop.create_future()
        self._stop.notify = lambda: loop.call_soon_threadsafe(self._heed_stop)
        try:
            async with task_group() as self._group:
                others = [self._spawn(self._admit()), self._spawn(self._fail())]
                await self._train()
                for task in (*others, *self._under_way()):
                    task.cancel()
        except BufferRLError as error:
            if self._saving is not None and role_of(error) != "save":  # ranks write what they have of a checkpoint
                with suppress(BufferRLError):
                    await self._runtime.answer(self._saving, SAVE_AFTER_ERROR_S)
            raise
        finally:
            self._stop.can_wait, self._stop.notify = False, lambda: None
        await self._memory.trainer()
        return self._result

    # -- production ----------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Start every ticket that the schedule lets open."""
        while True:
            await self._until_changed(self._may_open)
            number, self._next_ticket = self._next_ticket, self._next_ticket + 1
            await self._memory.engines(evaluation=False)
            self._producing[number] = self._spawn(self._produce(number))

    def _may_open(self) -> bool:
        plan, schedule = self._plan, self._plan.schedule
        if (
            self._is_halted
            or self._result.stopped_early
            or self._stop.number is not None
            or self._next_ticket >= plan.num_rollouts
        ):
            return False
        if not schedule.max_staleness and self._evaluating is not None:
            return False
        if self._released is None or not schedule.may_start(self._next_ticket, self._released):
            return False
        return schedule.by_window or not self._producing

    async def _produce(self, number: int) -> None:
        """One ticket. If it is lost, *train* has production start again."""
        schedule = self._plan.schedule
        try:
            ticket = self._tickets[number] = await self._buffer(BufferState.generate, number, False)
            self._incarnation = ticket.incarnation
            if schedule.streams and not schedule.by_window:
                await self._buffer(BufferState.open_selection, number)
            metrics, samples = await self._run_ticket(ticket)
            report = await self._buffer(BufferState.end_ticket, self._tickets[number])
        except BufferRLError as error:
            await self._lose(error)
        else:
            self._produced[number] = {**metrics, **drop_metrics(report.drops)}, samples, report.drops
        del self._producing[number], self._tickets[number]
        self._tell()

    async def _run_ticket(self, ticket: Ticket) -> Produced:
        """Have a rollout worker run a ticket, and another one go on with it where it dies."""
        number, schedule = ticket.rollout_id, self._plan.schedule
        while True:
            seen = self._restarts.count("rollout")
            call = self._submit("rollout", "run", ticket)
            if schedule.streams and not schedule.by_window and number not in self._streams:
                self._start_roles(number, trained_too=True)
            try:
                return cast(Produced, await self._answer(call, self._plan.rollout_timeout_s))
            except BufferRLError as error:
                if not self._plan.passes_on_tickets or not is_worker_death("rollout", error):
                    raise
                await self._restarts.replace("rollout", seen, error)
            ticket = self._tickets[number] = await self._buffer(BufferState.pass_on, ticket)
            missing = ticket.num_groups
            self._observer.notice(f"{ticket.task} goes on: {missing} groups are missing, and its metrics are of these")

    def _start_roles(self, step: int, *, trained_too: bool) -> None:
        """Have the roles work on a selection; trained ones too, if they are to work while it is open."""
        plan = self._plan.roles
        work: dict[str, tuple[Any, ...]] = dict.fromkeys(plan.dedicated_roles, ())
        for role in plan.trained if trained_too else ():
            if (models := plan.models_of(role)) or plan.stream_gradients:
                work[role] = (models, plan.awaited_by(role), plan.stream_gradients)
        limit = self._plan.train_timeout_s + (self._plan.rollout_timeout_s if trained_too else 0.0)
        self._streams[step] = {
            role: self._spawn(self._stream(role, step, *args, limit_s=limit)) for role, args in work.items()
        }
        for stream in self._streams[step].values():
            stream.add_done_callback(lambda _: self._tell())

    async def _stream(self, role: str, step: int, *work: Any, limit_s: float) -> WorkReport:
        """The work of a role on a selection. One whose processes die is replaced, and works on what it had not
        written."""
        while True:
            seen = self._restarts.count(role)
            try:
                return cast(WorkReport, await self._answer(self._submit(role, "stream", step, *work), limit_s))
            except BufferRLError as error:
                if role not in self._plan.roles.dedicated_roles or not is_worker_death(role, error):
                    await self._lose(error)
                    return WorkReport()
                await self._restarts.replace(role, seen, error)
            await self._buffer(BufferState.requeue_for_readers, f"train_{step}", role)

    async def _lose(self, error: BufferRLError) -> None:
        """Note that production must start again. Raises ``error`` if nothing was lost that can be produced again."""
        lost = isinstance(error, PayloadLostError) or is_worker_death("rollout", error)
        if not lost and await self._buffer_of_now() == self._incarnation:
            raise error
        self._lost = self._lost or error
        self._tell()

    async def _buffer_of_now(self) -> str:
        progress = await self._buffer(BufferState.get_progress)
        return str(progress["incarnation"])

    async def _count_loss(self, what: str, incarnation: str | None, error: BufferRLError) -> None:
        """Count that ``what``, of the Buffer ``incarnation``, is produced again; a dead rollout worker is replaced.
        Raises ``error`` if nothing was lost, or too much was."""
        now = await self._buffer_of_now()
        replaced, died = now != incarnation, is_worker_death("rollout", error)
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

    async def _produce_again(self, step: int, error: BufferRLError) -> None:
        """Start production again, from ``step`` on. Raises ``error`` if nothing was lost, or too much was."""
        self._is_halted = True
        newest = max(self._next_ticket - 1, step)
        tickets = f"train_{step}" if newest == step else f"train_{step} to train_{newest}"
        await self._count_loss(tickets, self._incarnation, error)
        await self._end_production(step, waits_for_workers=True)
        if self._is_preparing and self._memory.trainer_is_awake:  # else it has nothing of a step
            await self._on_trained("discard")
        self._lost = None
        self._next_ticket = step
        self._is_halted = False
        self._tell()

    async def _end_production(self, step: int, *, waits_for_workers: bool) -> None:
        """Give up all tickets, and every selection from ``step`` on. Returns once no role works on them."""
        self._is_halted = True
        for task in (tasks := self._under_way()):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._streams.clear()
        self._produced.clear()
        self._producing.clear()
        self._tickets.clear()
        self._closing = None
        await self._buffer(BufferState.abandon, step)
        calls, self._calls = self._calls, set()
        left = [call for call in calls if waits_for_workers or call.role != "rollout"]
        # One behind them on each role, whose processes may not end together.
        left += [self._runtime.submit(role, "ready") for role in self._plan.roles.dedicated_roles]
        for call in left:
            with suppress(BufferRLError):  # errors of work that is given up are not asked for
                await self._runtime.answer(call, self._plan.rollout_timeout_s)

    def _under_way(self) -> list[asyncio.Task[Any]]:
        streams = [task for tasks in self._streams.values() for task in tasks.values()]
        return [*self._producing.values(), *streams, *([] if self._closing is None else [self._closing])]

    # -- steps ---------------------------------------------------------------------------------------

    async def _train(self) -> None:
        plan = self._plan
        # The seconds of the start belong to no step.
        self._times.of_buffer(await self._buffer(BufferState.release, self._version))
        evaluates = plan.evaluates_at(self._version)
        if self._published is None and (plan.publish_each_step or evaluates):
            await self._publish()
        self._stop.can_wait = plan.num_rollouts > plan.first_rollout
        try:
            if evaluates:
                await self._evaluate()
            self._released = self._version
            while self._result.steps < plan.num_rollouts and not self._result.stopped_early:
                self._times.begin()
                self._tell()
                if self._stop.number is not None:
                    return await self._save_at_exit()
                await self._step(self._result.steps)
            await self._evaluated()
            if self._result.stopped_early and plan.saves_at(self._result.steps, stopped_early=True):
                await self._memory.trainer()
                await self._save(self._result.steps)
            await self._end_save()
        except StopNow:
            await self._save_at_exit()

    async def _step(self, rollout_id: int) -> None:
        metrics = await self._prepared(rollout_id)
        step = rollout_id + 1
        metrics |= await unbroken(self._train_and_commit(rollout_id, step))
        self._version = self._result.steps = step
        await self._update_reference(step)
        if self._plan.saves_at(step, stopped_early=False):
            await self._save(step)
        self._owes_evaluation |= self._plan.evaluates_at(step)
        try:
            if publishes := await self._may_publish(step):
                metrics |= await unbroken(self._publish_and_release(step))
        finally:  # a restart does not take a step again that is in a checkpoint
            metrics |= self._times.metrics(metrics.get("rollout/generated_tokens"))
            self._observer.step(rollout_id, metrics)
        if publishes and self._owes_evaluation:
            await self._evaluate()
        if publishes:
            self._released = step

    async def _prepared(self, rollout_id: int) -> dict[str, float]:
        """Wait for the groups of a step and all fields that the optimizer step needs; what is lost is produced again."""
        while True:
            self._is_preparing = True
            try:
                with self._times.of("rollout", "rollout", rollout_id):
                    self._observer.phase("generate")
                    metrics = await self._selected(rollout_id)
                if self._plan.roles.trained:
                    await self._memory.trainer()
                    with self._times.of("train"):
                        self._observer.phase("train")
                        await self._prepare_update(rollout_id)
                        await self._compare_log_probs(rollout_id)
            except BufferRLError as error:
                await self._produce_again(rollout_id, error)
                continue
            self._is_preparing = False
            return metrics

    async def _selected(self, rollout_id: int) -> dict[str, float]:
        """Wait until the selection of a step is closed. Returns the metrics of production until then."""
        schedule = self._plan.schedule
        if not schedule.by_window:
            await self._until(lambda: rollout_id in self._produced)
            report, _ = await self._buffer(BufferState.close_selection, rollout_id)
            assert report is not None, "its ticket has ended"
        else:
            if schedule.streams and rollout_id not in self._streams:
                await self._buffer(BufferState.open_selection, rollout_id)
                self._start_roles(rollout_id, trained_too=True)
            closing = self._close(rollout_id)
            await self._until(closing.done)
            self._closing = None
            report = closing.result()
        drops = Counter(report.drops)
        for *_, dropped in self._produced.values():
            drops.update(dropped)
        metrics = self._production_metrics(report)
        if report.num_groups == 0:
            raise RolloutError(
                "no group was finished, so there is nothing to train on",
                where=f"rollout {rollout_id}",
                hint=f"dropped: {dict(drops)}" if drops else "does the rollout function report its groups?",
            )
        if self._plan.records:
            await self._call("record", "save", rollout_id, timeout_s=self._plan.save_timeout_s)
        return metrics

    def _close(self, rollout_id: int) -> asyncio.Task[RolloutReport]:
        """The closing of a selection of the window; it is begun once."""
        if self._closing is None:
            limit = (self._plan.schedule.target + 1) * self._plan.rollout_timeout_s
            call = self._runtime.submit("selection", "close", rollout_id, self._plan.num_rollouts - 1, limit)
            self._closing = asyncio.ensure_future(self._answer(call, limit))
            self._closing.add_done_callback(lambda _: self._tell())
        return self._closing

    def _production_metrics(self, report: RolloutReport) -> dict[str, float]:
        """Of the tickets that ended since the step before, and of the groups of this one."""
        ended, self._produced = self._produced, {}
        metrics = joined_metrics([metrics for metrics, *_ in ended.values()])
        metrics |= drop_metrics(report.drops)
        metrics["rollout/num_groups"] = float(report.num_groups)
        for number, (own, samples, _) in ended.items():
            self._observer.rollout_ended(number, False, metrics if len(ended) == 1 else own, samples)
        if self._plan.schedule.max_staleness and (staleness := report.staleness):
            metrics |= {"staleness/mean": sum(staleness) / len(staleness), "staleness/max": float(max(staleness))}
        return metrics

    async def _train_and_commit(self, rollout_id: int, step: int) -> dict[str, float]:
        trained: dict[str, float] = {}
        if self._plan.roles.trained:
            with self._times.of("train"):
                trained = await self._update(rollout_id)
        await self._buffer(BufferState.commit, rollout_id, step)  # so that the Buffer drops the groups
        if self._plan.roles.trained:
            self._observer.trained(rollout_id, step, trained)
        return trained

    async def _prepare_update(self, rollout_id: int) -> None:
        """The trainer's work before the optimizer step, with all of its calls to the Buffer."""
        plan, limit = self._plan, self._plan.train_timeout_s
        if not plan.schedule.streams:
            self._start_roles(rollout_id, trained_too=False)
        with self._times.of("roles"):
            for role, stream in self._streams.get(rollout_id, {}).items():
                await self._until(stream.done, of_production=False)
                self._observer.worked(role, stream.result().spans_on(clock_origin()))
        self._streams.pop(rollout_id, None)
        if plan.roles.stream_gradients:
            return
        passes = () if plan.schedule.streams else plan.roles.passes
        if passes:
            await self._on_trained("fetch", rollout_id)
        for role, model in passes:
            with self._times.of(FIELD_OF_MODEL[model], role, rollout_id):
                await self._call(role, "log_probs", model, timeout_s=limit)
        if plan.roles.estimates:
            with self._times.of("advantages", "train", rollout_id):
                await self._call(plan.roles.trained[0], "estimate", rollout_id, timeout_s=limit)
        if plan.roles.estimates or not passes:
            await self._on_trained("fetch", rollout_id)

    async def _compare_log_probs(self, rollout_id: int) -> None:
        """Before the first optimizer step: end the run if the engine sampled from other weights than are trained."""
        if self._plan.compare_log_probs and not self._compared:
            limit = self._plan.train_timeout_s
            actor = self._plan.roles.trained[0]
            self._observer.notice(str(await self._call(actor, "compare_log_probs", rollout_id, timeout_s=limit)))
            self._compared = True

    async def _update(self, rollout_id: int) -> dict[str, float]:
        """The optimizer step of each trained role that takes one. It reads nothing from the Buffer, so it cannot fail
        with PayloadLostError; it is never retried."""
        plan = self._plan.roles
        method = "finish_stream" if plan.stream_gradients else "train"
        with self._times.of("update", "train", rollout_id):
            steps = plan.steps_on(rollout_id)
            await self._on_trained("discard", roles=[role for role in plan.trained if role not in steps])
            answers = await self._on_trained(method, roles=steps)
            return {name: value for metrics in answers for name, value in metrics.items()}

    async def _update_reference(self, step: int) -> None:
        """Before the checkpoint, which holds the reference, and before the next rollout, which may be streamed."""
        interval = self._plan.ref_update_interval
        if interval is not None and step % interval == 0:
            with self._times.of("ref_update"):
                await self._call("reference", "update", step, timeout_s=self._plan.publish_timeout_s)

    async def _may_publish(self, step: int) -> bool:
        """Whether the step is published. While an evaluation is pinned to an earlier version, the next selection is
        trained on without it if it can be closed; else the publication waits."""
        schedule = self._plan.schedule

        def is_free() -> bool:
            return self._evaluating is None and (schedule.by_window or not self._producing)

        def can_go_on() -> bool:
            if self._evaluating is None or step >= self._plan.num_rollouts:
                return False
            return self._close(step).done() if schedule.by_window else step in self._produced

        await self._until_undisturbed(lambda: is_free() or can_go_on())
        return is_free()

    async def _publish_and_release(self, step: int) -> dict[str, float]:
        if self._plan.publish_each_step or self._owes_evaluation:
            await self._publish()
        return self._times.of_buffer(await self._buffer(BufferState.release, step))

    async def _publish(self) -> None:
        is_there = self._published == self._version and not self._memory.engines_lack_weights
        if not is_there and self._plan.roles.trained:
            await self._memory.publication()
            await self._send_weights()

    async def _send_weights(self) -> None:
        version = self._version
        with self._times.of("publish", "publish", version):
            self._observer.phase("publish")
            times = await self._call("publish", "publish", version, timeout_s=self._plan.publish_timeout_s)
        self._published = version
        self._observer.published(version, times)

    async def _feed_engines(self, version: int) -> None:
        """Every engine that is left is a replacement without weights: publish the newest ones again."""
        roles = self._plan.roles
        streams = self._streams and (roles.stream_gradients or roles.models_of(roles.trained[0]))
        if streams or self._plan.offload_train:
            what = f"no engine has the weights of version {version}, and the trainer cannot send them during a rollout"
            raise WorkerDiedError(what, where="engine", hint="--weight-sync-mode disk has them for replacements")
        self._observer.notice(f"version {self._version} is published again, as every engine that had {version} is gone")
        await unbroken(self._send_weights())

    # -- waiting and calling -------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """A coroutine beside the caller, whose failure ends the run."""
        return self._group.create_task(work)

    def _look(self, error: BaseException | None) -> None:
        """What is watched beside calls was looked at, or failed."""
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
        self._tell()

    async def _fail(self) -> None:
        await self._failed

    def _heed_stop(self) -> None:
        """A signal asks the run to end."""
        number = cast(int, self._stop.number)
        limit = self._plan.save_on_exit_s
        when = "after this step" if self._stop.after_step else f"within {limit:g} s"
        name = signal.Signals(number).name
        self._observer.notice(f"{name}: the run ends {when}; another signal ends it at once")
        if not self._stop.after_step:
            left = max(0.0, self._stop.at + limit - time.monotonic())
            asyncio.get_running_loop().call_later(left, _end, number)
        self._tell()

    def _tell(self) -> None:
        """Something changed that a coroutine may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_changed(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def _until(self, condition: Callable[[], bool], *, of_production: bool = True) -> None:
        """Wait until ``condition`` holds. Raises the error with which production was lost; in a wait for production or
        an evaluation StopNow, if a signal with a deadline came."""
        while not condition():
            changed = self._changed
            if self._lost is not None:
                raise self._lost
            if of_production:
                if self._stop.number is not None and not self._stop.after_step:
                    raise StopNow
                if (version := self._starved()) is not None:
                    await self._feed_engines(version)
            await changed.wait()

    async def _until_undisturbed(self, condition: Callable[[], bool]) -> None:
        """The same between steps; production that is lost starts again."""
        while True:
            try:
                return await self._until(condition)
            except BufferRLError as error:
                await self._produce_again(self._result.steps, error)

    def _submit(self, role: str, method: str, *args: Any) -> Task:
        """Start a call of production."""
        call = self._runtime.submit(role, method, *args)
        self._calls.add(call)
        return call

    async def _answer(self, call: Task, timeout_s: float) -> Any:
        """The answer of a call of production, which is under way until it has one."""
        try:
            answer = await self._runtime.answer(call, timeout_s)
        except BufferRLError:
            self._calls.discard(call)
            raise
        self._calls.discard(call)
        return answer

    async def _buffer(self, operation: Callable[[Any, *Ts], R], *args: *Ts) -> R:
        """The answer of an operation of the Buffer, which comes soon."""
        return cast(R, await self._call("buffer", operation.__name__, *args, timeout_s=self._plan.buffer_timeout_s))

    async def _on_trained(self, method: str, *args: Any, roles: Sequence[str] | None = None) -> list[Any]:
        """The answers of trained roles, of all where none are named, which work at the same time."""
        chosen = self._plan.roles.trained if roles is None else roles
        calls = [self._runtime.submit(role, method, *args) for role in chosen]
        return await asyncio.gather(*(self._runtime.answer(call, self._plan.train_timeout_s) for call in calls))

    async def _call(self, role: str, method: str, *args: Any, timeout_s: float) -> Any:
        return await self._runtime.answer(self._runtime.submit(role, method, *args), timeout_s)

    # -- evaluations ---------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        """Start an evaluation of the published version. If every step trains on the current version, nothing else
        runs meanwhile."""
        self._owes_evaluation = False
        self._evaluating = self._spawn(self._evaluation(self._version))
        if not self._plan.schedule.max_staleness:
            self._observer.phase("evaluate")
            await self._evaluated()

    async def _evaluated(self) -> None:
        await self._until_undisturbed(lambda: self._evaluating is None)

    async def _evaluation(self, version: int) -> None:
        await self._memory.engines(evaluation=True)
        while True:
            ticket = await self._buffer(BufferState.generate, version, True)
            try:
                with self._times.of("evaluate", "rollout", version):
                    call = self._runtime.submit("rollout", "run", ticket)
                    metrics, samples = await self._answer(call, self._plan.rollout_timeout_s)
                await self._buffer(BufferState.end_ticket, ticket)
                break
            except BufferRLError as error:
                await self._count_loss(ticket.task, ticket.incarnation, error)
                await self._buffer(BufferState.clear, ticket.task)
        await self._buffer(BufferState.clear, ticket.task)
        if lag := self._version - version:
            metrics = {**metrics, "eval/lag_steps": float(lag)}
        self._result.evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        self._observer.rollout_ended(version, True, metrics, samples)
        self._observer.evaluation(version, metrics)
        stop = self._plan.early_stop
        if stop is not None and stop.met(metrics):
            self._result.stopped_early = True
            found = f"{stop.metric} is {metrics[stop.metric]:g}"
            self._observer.notice(
                f"--early-stop: the run ends after {self._version} steps: {found}, and the condition is {stop}"
            )
        self._evaluating = None
        self._tell()

    # -- checkpoints ---------------------------------------------------------------------------------

    async def _save(self, step: int, owes_evaluation: bool = False) -> None:
        if self._saved == step:
            return
        with self._times.of("save", "save", step):
            self._observer.phase("save")
            await self._end_save()
            await unbroken(self._write(step, owes_evaluation))
        self._saved = step

    async def _write(self, step: int, owes_evaluation: bool) -> None:
        await self._save_call("save", step, *[True] * owes_evaluation)
        if self._plan.async_save:
            self._sealing = self._spawn(self._save_call("seal"))
        else:
            await self._save_call("seal")

    async def _end_save(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one."""
        if self._sealing is not None:
            await self._sealing
            self._sealing = None

    async def _save_call(self, method: str, *args: Any) -> None:
        self._saving = self._runtime.submit("save", method, *args)
        try:
            await self._runtime.answer(self._saving, self._plan.save_timeout_s)
        except DeadlineError as error:
            error.hint = error.hint or "raise --save-timeout-s if it is only slow; it covers the upload too"
            raise
        self._saving = None

    async def _save_at_exit(self) -> None:
        """Save the last step, if it is newer than the checkpoint that the run continued from."""
        self._result.signal = self._stop.number
        owes = self._evaluating is not None or self._owes_evaluation
        if self._evaluating is not None:
            self._evaluating.cancel()
            self._evaluating = None
        await self._end_production(self._result.steps, waits_for_workers=False)
        if self._plan.saves and self._result.steps > self._plan.first_rollout:
            await self._memory.trainer()
            await self._save(self._result.steps, owes)
        await self._end_save()


def joined_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several tickets: sums of tokens and of dropped groups, else means over those that have them."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        counts = name == "rollout/generated_tokens" or name.startswith(DROP_PREFIX)
        joined[name] = sum(values) if counts else sum(values) / len(values)
    return joined


def _end(number: int) -> None:
    raise EndedBySignal(number)
