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

The first Ctrl-C ends the run after the step under way, and saves it. Its publication, if it drains, then waits for no
ticket of a later step. SIGTERM does not wait for production or an evaluation: their groups are pending again, and the
last step is saved, within ``save_on_exit_s`` of the signal.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.dispatch import Method, Ts
from buffer_rl.cluster.environment import StopRequest
from buffer_rl.driver.local_roles import RolloutRecorder, RunCheckpoints
from buffer_rl.driver.offload import MemoryTurns, Phase
from buffer_rl.driver.production import NothingLeft, Production
from buffer_rl.driver.tasks import Calls, Runtime, StepTimes, Task, role_of, unbroken
from buffer_rl.errors import BufferRLError, DeadlineError, WorkerDiedError
from buffer_rl.observe.timeline import WorkSpan, clock_origin
from buffer_rl.plan.roles import ACTOR, FIELD_OF_MODEL
from buffer_rl.plan.schedule import RunPlan, RunResult
from buffer_rl.rollout.production import task_group
from buffer_rl.trainer.rank import TrainRank
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.role_weights import FolderUpdates

if TYPE_CHECKING:
    from buffer_rl.observe.observer import RunObserver

R = TypeVar("R")


class StopNow(Exception):
    """A signal with a deadline came during production or an evaluation, or an evaluation ended the run."""


SAVE_AFTER_ERROR_S = 30.0
"""How long a run that ends with an error waits for ranks that write a checkpoint; the rest of it needs none."""


class Driver:
    """Runs a plan. ``runtime`` has the roles buffer, selection, rollout, train, reference, publish, engines, save and
    record, as the plan needs them.

    ``save.save(step)`` takes the state of one checkpoint: weights, optimizer, Buffer and random states after ``step``
    optimizer steps, and ``save.save_next()`` what other trained roles than the actor have of it; it is whole once
    ``save.seal()`` has returned. ``record.save(rollout_id)`` keeps the rows of a
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
        self._evaluating: asyncio.Task[None] | None = None
        self._owes_evaluation = self._compared = False
        self._saved: int | None = None
        self._saving: Task | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._result = RunResult(steps=plan.first_rollout)
        self._step_under_way = plan.first_rollout
        self._times = StepTimes(runtime, observer)
        self._calls = calls = Calls(plan, runtime)
        self._memory = MemoryTurns(plan, self._times.of, calls.call, self._send_weights)
        self._production = Production(plan, calls, observer, self._times, self._memory)

    def run(self) -> RunResult:
        """Run to the end of the plan. Raises the first error of any role, named."""
        return self._runtime.run(self._main, self._look)

    async def _main(self) -> RunResult:
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = loop.create_future()
        self._stop.notify = lambda: loop.call_soon_threadsafe(self._heed_stop)
        try:
            async with task_group() as group:
                self._calls.begin(group)
                others = [self._calls.spawn(self._production.admit(self._admits)), self._calls.spawn(self._fail())]
                await self._train()
                if self._plan.schedule.by_window:  # what no step trained on
                    self._production.report_tickets(self._result.steps)
                for task in (*others, *self._production.under_way()):
                    task.cancel()
        except BufferRLError as error:
            if self._saving is not None and role_of(error) != "save":  # ranks write what they have of a checkpoint
                with suppress(BufferRLError):
                    await self._runtime.answer(self._saving, SAVE_AFTER_ERROR_S)
            raise
        finally:
            self._stop.can_wait, self._stop.notify = False, lambda: None
        await self._memory.weights()
        return self._result

    def _admits(self, number: int) -> bool:
        """Whether ticket ``number`` may open: not once the run stopped early, nor while an evaluation is alone. After a
        signal only if the step under way trains on it; those of the window opened with the publication before."""
        schedule = self._plan.schedule
        alone = self._evaluating is not None and not schedule.max_staleness
        is_needed = self._stop.number is None or schedule.by_window or number <= self._step_under_way
        return is_needed and not (alone or self._result.stopped_early)

    # -- steps ---------------------------------------------------------------------------------------

    async def _train(self) -> None:
        plan = self._plan
        # The seconds of the start belong to no step.
        self._times.of_buffer(await self._calls.buffer(BufferState.release, self._version))
        evaluates = plan.evaluates_at(self._version)
        if self._published is None and (plan.publish_each_step or evaluates):
            await self._publish()
        self._stop.can_wait = plan.num_rollouts > plan.first_rollout
        try:
            if evaluates:
                await self._evaluate()
            self._production.release(self._version)
            while self._result.steps < plan.num_rollouts and not self._result.stopped_early:
                if self._stop.number is not None:
                    return await self._save_at_exit()
                self._times.begin()
                self._calls.tell()
                try:
                    await self._step(self._result.steps)
                except NothingLeft as why:
                    await self._end_short(why)
            await self._evaluated()
            if self._result.stopped_early and plan.saves_at(self._result.steps, stopped_early=True):
                await self._save(self._result.steps)
            await self._end_save()
        except StopNow:
            await self._save_at_exit()

    async def _step(self, rollout_id: int) -> None:
        self._step_under_way = rollout_id
        metrics = await self._prepared(rollout_id)
        step = rollout_id + 1
        metrics |= await unbroken(self._train_and_commit(rollout_id, step))
        self._version = self._result.steps = step
        await self._update_reference(step)
        if self._plan.schedule.max_staleness:
            metrics |= self._production.report_tickets(rollout_id)
        if self._plan.saves_at(step, stopped_early=False):
            self._observer.known(rollout_id, metrics)
            await self._save(step)
        self._owes_evaluation |= self._plan.evaluates_at(step)
        try:
            if publishes := await self._may_publish(step):
                metrics |= await unbroken(self._publish_and_release(step))
        finally:  # a restart does not take a step again that is in a checkpoint
            metrics |= self._times.metrics(metrics.get("rollout/generated_tokens"))
            if self._plan.schedule.max_staleness:
                self._observer.under_way(self._times.under_way())
            self._observer.step(rollout_id, metrics)
        if publishes and self._owes_evaluation:
            await self._evaluate()
        if publishes:
            self._production.release(step)

    async def _end_short(self, why: NothingLeft) -> None:
        """End with the step before; its weights are published and evaluated, as those of the last step are."""
        self._observer.notice(f"the run ends after {self._version} steps: {why}")
        await self._evaluated()
        if self._production.released != self._version:
            await unbroken(self._publish_and_release(self._version))
        if self._owes_evaluation or (self._plan.evaluate and not self._plan.evaluates_at(self._version)):
            await self._publish()
            await self._evaluate()
            await self._evaluated()
        self._result.stopped_early, self._result.why = True, str(why)

    async def _prepared(self, rollout_id: int) -> dict[str, float]:
        """Wait for the groups of a step and for all fields of its optimizer step. What is lost is produced again."""
        while True:
            try:
                # At a staleness of 0 the step waits for as long as its ticket runs; else tickets are shown.
                shown = () if self._plan.schedule.max_staleness else ("rollout", rollout_id)
                with self._times.of("rollout", *shown):
                    self._observer.phase("generate")
                    metrics = await self._production.selected(rollout_id, self._until)
                    if self._plan.records:
                        limit = self._plan.save_timeout_s
                        await self._calls.call("record", RolloutRecorder.save, rollout_id, timeout_s=limit)
                if trained := self._plan.roles.trained:
                    await self._memory.enter(Phase.LOG_PROBS, trained)
                    with self._times.of("train"):
                        self._observer.phase("train")
                        await self._prepare_update(rollout_id)
                        await self._compare_log_probs(rollout_id)
            except BufferRLError as error:
                await self._production.start_again(rollout_id, error)
                if self._production.released != rollout_id:  # its publication was passed over; tickets need it now
                    await self._evaluated()
                    await unbroken(self._publish_and_release(rollout_id))
                    self._production.release(rollout_id)
                continue
            return metrics

    async def _train_and_commit(self, rollout_id: int, step: int) -> dict[str, float]:
        trained: dict[str, float] = {}
        if self._plan.roles.trained:
            with self._times.of("train"):
                trained = await self._update(rollout_id)
        await self._calls.buffer(BufferState.commit, rollout_id, step)  # so that the Buffer drops the groups
        if self._plan.roles.trained:
            self._observer.trained(rollout_id, step, trained)
        return trained

    async def _prepare_update(self, rollout_id: int) -> None:
        """The trainer's work before the optimizer step, with all of its calls to the Buffer."""
        plan, limit = self._plan, self._plan.train_timeout_s
        with self._times.of("roles"):
            for role, stream in self._production.streams.get(rollout_id, {}).items():
                await self._until(stream.done, of_production=False)
                self._observer.worked(role, stream.result().spans_on(clock_origin()))
        self._production.streams.pop(rollout_id, None)
        if plan.roles.stream_gradients:
            return
        passes = () if plan.schedule.streams else plan.roles.passes
        missing = list(plan.roles.trained)
        for role, model in passes:
            fetched = rollout_id if role in missing else None
            with self._times.of(FIELD_OF_MODEL[model], role, rollout_id):
                work = model, fetched, plan.roles.estimates
                await self._calls.call(role, TrainRank.log_probs, *work, timeout_s=limit)
            missing = [other for other in missing if other != role]
        if plan.roles.estimates:
            with self._times.of("advantages", "train", rollout_id):
                await self._calls.call(plan.roles.trained[0], TrainRank.estimate, rollout_id, timeout_s=limit)
            missing = list(plan.roles.trained)
        await self._calls.on_trained(TrainRank.fetch, rollout_id, roles=missing)

    async def _compare_log_probs(self, rollout_id: int) -> None:
        """Before the first optimizer step: end the run if the engine sampled from other weights than are trained."""
        if self._plan.compare_log_probs and not self._compared:
            limit = self._plan.train_timeout_s
            actor = self._plan.roles.trained[0]
            gap = await self._calls.call(actor, TrainRank.compare_log_probs, rollout_id, timeout_s=limit)
            self._observer.notice(str(gap))
            self._compared = True

    async def _update(self, rollout_id: int) -> dict[str, float]:
        """The optimizer step of each trained role that takes one. It reads nothing from the Buffer, so it cannot fail
        with PayloadLostError; it is never retried."""
        plan = self._plan.roles
        method = TrainRank.finish_stream if plan.stream_gradients else TrainRank.train
        steps = plan.steps_on(rollout_id)
        found: dict[str, float] = {}
        await self._calls.on_trained(TrainRank.discard, roles=[role for role in plan.trained if role not in steps])
        for roles in self._memory.in_turn(steps):
            await self._memory.enter(Phase.TRAIN, roles)
            with self._times.of("update", "train", rollout_id):
                for metrics in await self._calls.on_trained(method, roles=roles):
                    found |= metrics
        return found

    async def _update_reference(self, step: int) -> None:
        """Before the checkpoint, which holds the reference, and before the next rollout, which may be streamed."""
        interval = self._plan.ref_update_interval
        if interval is not None and step % interval == 0:
            await self._memory.enter(Phase.LOG_PROBS, [ACTOR])
            with self._times.of("ref_update"):
                await self._calls.call("reference", FolderUpdates.update, step, timeout_s=self._plan.publish_timeout_s)

    async def _may_publish(self, step: int) -> bool:
        """Whether the step is published. While an evaluation is pinned to an earlier version, the next selection is
        trained on without it if it can be closed; else the publication waits."""
        by_window = self._plan.schedule.by_window

        def is_free() -> bool:
            return self._evaluating is None and (by_window or not self._production.producing)

        def can_go_on() -> bool:
            has_next = self._evaluating is not None and step < self._plan.num_rollouts
            # A role with the actor's weights must have those of the step that it works on.
            needs_weights = "actor_fwd" in self._plan.roles.dedicated_roles
            return has_next and not needs_weights and self._production.can_close(step)

        await self._until_undisturbed(lambda: is_free() or can_go_on())
        return is_free()

    async def _publish_and_release(self, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._plan.publish_each_step or self._owes_evaluation:
            found = await self._publish()
        return found | self._times.of_buffer(await self._calls.buffer(BufferState.release, step))

    async def _publish(self) -> dict[str, float]:
        if self._published == self._version or not self._plan.roles.trained:
            return {}
        await self._memory.enter(Phase.PUBLISH, [ACTOR])
        return await self._send_weights()

    async def _send_weights(self) -> dict[str, float]:
        """Returns the metrics of the publication."""
        version = self._version
        with self._times.of("publish", "publish", version):
            self._observer.phase("publish")
            limit = self._plan.publish_timeout_s
            times = await self._calls.call("publish", Publisher.publish, version, timeout_s=limit)
        self._published = version
        if self._plan.schedule.max_staleness and (paused := times.get("perf/publish_pause")):
            # The last part of a publication, in which tickets run and engines do not.
            ended = self._runtime.now()
            span = WorkSpan(name="pause", rollout_id=version, start=ended - paused, end=ended)
            self._observer.worked("publish", [span])
        self._observer.published(version, times)
        return cast("dict[str, float]", times)

    async def _feed_engines(self, version: int) -> None:
        """Every engine that is left is a replacement without weights: publish the newest ones again."""
        if self._production.trainer_streams or self._plan.offload_train:
            what = f"no engine has the weights of version {version}, and the trainer cannot send them during a rollout"
            raise WorkerDiedError(what, where="engine", hint="--weight-sync-mode disk has them for replacements")
        self._observer.notice(f"version {self._version} is published again, as every engine that had {version} is gone")
        await unbroken(self._send_weights())

    # -- waiting and calling -------------------------------------------------------------------------

    def _look(self, error: BaseException | None) -> None:
        """What is watched beside calls was looked at, or failed."""
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
        self._calls.tell()

    async def _fail(self) -> None:
        await self._failed

    def _heed_stop(self) -> None:
        """A signal asks the run to end."""
        number = cast("int", self._stop.number)
        limit = self._plan.save_on_exit_s
        when = "after this step" if self._stop.after_step else f"within {limit:g} s"
        name = signal.Signals(number).name
        self._observer.notice(f"{name}: the run ends {when}; another signal ends it at once")
        if not self._stop.after_step:
            left = max(0.0, self._stop.at + limit - time.monotonic())
            asyncio.get_running_loop().call_later(left, self._stop.take, number)  # the second one ends it
        self._calls.tell()

    async def _until(self, condition: Callable[[], bool], *, of_production: bool = True) -> None:
        """Wait until ``condition`` holds. Raises the error with which production was lost; in a wait for production or
        an evaluation StopNow, if a signal with a deadline came or the run stops early."""
        while not condition():
            changed = self._calls.changed
            if self._production.lost is not None:
                raise self._production.lost
            if of_production:
                if self._result.stopped_early or (self._stop.number is not None and not self._stop.after_step):
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
                await self._production.start_again(self._result.steps, error)

    # -- evaluations ---------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        """Start an evaluation of the published version. If every step trains on the current version, nothing else
        runs meanwhile."""
        self._owes_evaluation = False
        self._evaluating = self._calls.spawn(self._evaluation(self._version))
        if not self._plan.schedule.max_staleness:
            self._observer.phase("evaluate")
            await self._evaluated()

    async def _evaluated(self) -> None:
        await self._until_undisturbed(lambda: self._evaluating is None)

    async def _evaluation(self, version: int) -> None:
        metrics, samples = await self._production.evaluate(version)
        if lag := self._version - version:
            metrics = {**metrics, "perf/evaluation_lag_steps": float(lag)}
        self._result.evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        self._observer.rollout_ended(version, True, metrics, samples)
        self._observer.evaluation(version, metrics)
        stop = self._plan.early_stop
        if stop is not None and stop.met(metrics):
            found = f"{stop.metric} is {metrics[stop.metric]:g}"
            self._result.stopped_early, self._result.why = True, f"--early-stop {stop}: {found}"
            end = f"the run ends after {self._version} steps: {found}, and the condition is {stop}"
            self._observer.notice(f"--early-stop: {end}")
        self._evaluating = None
        self._calls.tell()

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
        first, *others = self._plan.roles.trained
        await self._memory.enter(Phase.TRAIN, [first])
        await self._save_call(RunCheckpoints.save, step, owes_evaluation)
        for role in others:
            await self._memory.enter(Phase.TRAIN, [role])
            await self._save_call(RunCheckpoints.save_next)
        if self._plan.async_save:
            self._sealing = self._calls.spawn(self._save_call(RunCheckpoints.seal))
        else:
            await self._save_call(RunCheckpoints.seal)

    async def _end_save(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one."""
        if self._sealing is not None:
            await self._sealing
            self._sealing = None

    async def _save_call(self, method: Method[*Ts], *args: *Ts) -> None:
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
        await self._production.end(self._result.steps, waits_for_workers=False)
        if self._plan.saves and self._result.steps > self._plan.first_rollout:
            await self._save(self._result.steps, owes)
        await self._end_save()
