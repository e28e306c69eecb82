"""The one loop.

Who waits for whom: the driver waits for rollouts and for the trainer, each with a deadline; rollout workers wait
for engines and for the Buffer; trainer ranks wait for the Buffer and for each other; the publisher waits for the
trainer and for the engines. Only the Buffer's slots wait for the driver, until ``release`` frees them.

Order of one step: train → commit → update the reference → save → publish → release → evaluate. A checkpoint
therefore never holds weights whose groups still count as untrained. ``buffer_rl.driver.offload`` says who has memory.

What is lost, and what goes on:

- Buffer: it is replaced, and reads from its ledger which groups are trained. The payloads of every selection are lost:
  before its optimizer step each is produced again, with the same groups; after it the commit needs only the ledger.
- Storage process: the selection whose payloads it had is produced again, while others go on.
- Rollout worker: its open leases. Another one goes on with its ticket; an evaluation is made again, since its metrics
  are of all groups.
- A role's process: what it had not written. The role is replaced, and gets those groups again.
- Trainer rank: all since the newest checkpoint, from which a global restart goes on (``buffer_rl.driver.restart``).

The first Ctrl-C ends the run after the step under way, and saves it. SIGTERM does not wait for a rollout or an
evaluation: their groups are pending again, and the last step is saved, within ``save_on_exit_s`` of the signal.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.environment import StopRequest
from buffer_rl.driver.offload import MemoryTurns
from buffer_rl.driver.tasks import RoleCalls, Runtime, StepTimes, Task, is_worker_death, role_of
from buffer_rl.errors import BufferRLError, DeadlineError, EndedBySignal, PayloadLostError, RolloutError
from buffer_rl.observe.metrics import drop_metrics
from buffer_rl.observe.timeline import clock_origin
from buffer_rl.plan.roles import FIELD_OF_MODEL
from buffer_rl.plan.schedule import RunPlan, RunResult

if TYPE_CHECKING:
    from buffer_rl.observe.observer import RunObserver
    from buffer_rl.records.groups import Ticket

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class StopNow(Exception):
    """A signal with a deadline came during a rollout or an evaluation."""


SAVE_AFTER_ERROR_S = 30.0
"""How long a run that ends with an error waits for ranks that write a checkpoint; the rest of it needs none."""


class Driver:
    """Runs a plan. ``runtime`` has the roles buffer, rollout, train, reference, publish, engines, save and record, as
    the plan needs them.

    ``save.save(step)`` takes the state of one checkpoint: weights, optimizer, Buffer and random states after ``step``
    optimizer steps; it is whole once ``save.seal()`` has returned. ``record.save(rollout_id)`` keeps the rows of a
    rollout that is closed and not trained on yet.
    """

    def __init__(self, plan: RunPlan, runtime: Runtime, observer: RunObserver, stop: StopRequest | None = None) -> None:
        self._stop = StopRequest() if stop is None else stop
        self._is_told = False
        self._plan = plan
        self._runtime = runtime
        self._observer = observer
        self._version = plan.first_rollout
        self._published: int | None = None if plan.publish_at_start else plan.first_rollout
        self._next_rollout = plan.first_rollout
        self._generating: dict[int, Task] = {}
        self._tickets: dict[int, Ticket] = {}  # of rollouts that may still be produced again
        self._prepares: int | None = None
        self._evaluating: Ticket | None = None
        self._retries = 0
        self._counted: str | None = None  # the newest Buffer whose predecessor's death is among the retries
        self._compared = False
        self._roles = RoleCalls(plan.roles, runtime, observer)
        self._times = StepTimes(runtime, observer)
        self._saved: int | None = None
        self._saving: Task | None = None
        self._memory = MemoryTurns(plan, self._times.of, self._on_trained, self._call, self._publish)
        self._result = RunResult(steps=plan.first_rollout)

    def run(self) -> RunResult:
        """Run to the end of the plan. Raises the first error of any role, named."""
        plan = self._plan
        self._times.of_buffer(self._buffer(BufferState.release, self._version))  # those of the start belong to no step
        evaluates = self._plan.evaluates_at(self._version)
        if self._published is None and (plan.publish_each_step or evaluates):
            self._publish()
        self._stop.can_wait = plan.num_rollouts > plan.first_rollout
        try:
            if evaluates:
                self._evaluate()
            while self._result.steps < plan.num_rollouts and not self._result.stopped_early and self._goes_on():
                self._times.begin()
                self._admit()
                self._step(self._result.steps)
            self._end_save()
        except StopNow:
            self._save_at_exit()
        except BufferRLError as error:
            if self._saving is not None and role_of(error) != "save":  # ranks write what they have of a checkpoint
                with suppress(BufferRLError):
                    self._runtime.wait_any([self._saving], SAVE_AFTER_ERROR_S, watches=False)
            raise
        finally:
            self._stop.can_wait = False
        self._memory.trainer()
        return self._result

    def watch_stop(self, *, in_rollout: bool) -> None:
        """Called about once a second during a wait. Raises StopNow in one for a rollout, if the signal has a deadline,
        and EndedBySignal after it."""
        if (number := self._stop.number) is None:
            return
        if not self._is_told:
            self._is_told = True
            when = "after this step" if self._stop.after_step else f"within {self._plan.save_on_exit_s:g} s"
            name = signal.Signals(number).name
            self._observer.notice(f"{name}: the run ends {when}; another signal ends it at once")
        if not self._stop.after_step:
            if in_rollout:
                raise StopNow
            if time.monotonic() > self._stop.at + self._plan.save_on_exit_s:
                raise EndedBySignal(number)

    def _goes_on(self) -> bool:
        """Whether no signal asks the run to end; it is saved if one does."""
        if self._stop.number is None:
            return True
        self.watch_stop(in_rollout=False)
        self._save_at_exit()
        return False

    def _save_at_exit(self) -> None:
        """Save the last step, if it is newer than the checkpoint that the run continued from."""
        self._result.signal = self._stop.number
        owes = self._evaluating is not None
        self._evaluating = None
        self._reset_rollouts(sorted(self._tickets), again=False)
        if self._plan.saves and self._result.steps > self._plan.first_rollout:
            self._memory.trainer()
            self._save(self._result.steps, owes)
        self._end_save()

    def _admit(self) -> None:
        """Start every rollout that the schedule lets start. Where no weights are published for rollouts, they wait for
        those that are trained."""
        plan = self._plan
        version = self._published if plan.publish_each_step else self._version
        while version is not None and self._next_rollout < plan.num_rollouts:
            if not plan.schedule.may_start(self._next_rollout, version):
                return
            self._start_rollout(self._next_rollout)
            self._next_rollout += 1

    def _start_rollout(self, rollout_id: int) -> None:
        self._memory.engines(evaluation=False)
        ticket = self._tickets[rollout_id] = self._buffer(BufferState.generate, rollout_id, False)
        self._generating[rollout_id] = self._runtime.submit("rollout", "run", ticket)
        if self._plan.schedule.streams:
            self._roles.start(rollout_id, trainer_too=True)

    def _step(self, rollout_id: int) -> None:
        metrics = self._prepared(rollout_id)
        step = rollout_id + 1
        metrics |= self._train_and_commit(rollout_id, step)
        self._version = self._result.steps = step
        self._update_reference(step)
        if self._plan.saves_at(step, stopped_early=False):
            self._save(step)
        try:
            if self._plan.publish_each_step or self._plan.evaluates_at(step):
                self._publish()
            metrics |= self._times.of_buffer(self._buffer(BufferState.release, step))
        finally:  # a restart does not take a step again that is in a checkpoint
            metrics |= self._times.metrics(metrics.get("rollout/generated_tokens"))
            self._observer.step(rollout_id, metrics)
        if self._plan.evaluates_at(step):
            self._evaluate()
        if self._result.stopped_early and self._plan.saves_at(step, stopped_early=True):
            self._memory.trainer()
            self._save(step)

    def _prepared(self, rollout_id: int) -> dict[str, float]:
        """Wait for the rollout and all fields that the optimizer step needs; a lost rollout is produced again."""
        while True:
            self._prepares = rollout_id
            try:
                with self._times.of("rollout", "rollout", rollout_id):
                    self._observer.phase("generate")
                    metrics = self._finished_rollout(rollout_id)
                if self._plan.roles.trained:
                    self._memory.trainer()
                    with self._times.of("train"):
                        self._observer.phase("train")
                        self._prepare_update(rollout_id)
                        self._compare_log_probs(rollout_id)
            except BufferRLError as error:
                self._produce_again(self._tickets[rollout_id], error)
                continue
            self._prepares = None
            del self._tickets[rollout_id]
            return metrics

    def _produce_again(self, ticket: Ticket, error: BufferRLError) -> None:
        """Start a rollout again, whose selection or worker was lost; after the Buffer was replaced, each that it held.
        Those of evaluations are left to the caller.

        Raises ``error`` if the rollout was not lost, too many were, or the one that is being prepared is lost too,
        which ends its waits first. Any error after the Buffer was replaced may come from that: user code may wrap it.
        """
        incarnation = self._buffer(BufferState.get_progress)["incarnation"]
        replaced, worker_died = ticket.incarnation != incarnation, is_worker_death("rollout", error)
        lost = [t for t in self._tickets.values() if t is ticket or t.incarnation != incarnation]
        retries = self._retries + (incarnation != self._counted if replaced else 1)
        if not (replaced or worker_died or isinstance(error, PayloadLostError)):
            raise error
        if retries > self._plan.max_rollout_retries:
            error.hint = f"--buffer-max-restarts: what was lost was produced again {self._retries} times, and no more"
            raise error
        if any(t.rollout_id == self._prepares for t in lost if t is not ticket):
            raise error
        if worker_died:
            self._roles.restart("rollout", error)
        self._retries, self._counted = retries, incarnation if replaced else self._counted
        for task in dict.fromkeys(t.task for t in (ticket, *lost)):
            self._observer.notice(f"{task} is produced again ({retries} of {self._plan.max_rollout_retries}): {error}")
        self._reset_rollouts(sorted(t.rollout_id for t in lost))

    def _reset_rollouts(self, lost: Sequence[int], *, again: bool = True) -> None:
        """Requeue the groups of rollouts, wait until no task works on them, and start them again. Not ``again``: it
        waits for the roles alone, as the worker's process ends with the run."""
        running = [self._generating.pop(rollout_id, None) for rollout_id in lost]
        tasks = [*(task for task in running if task is not None and again), *self._roles.forget(lost)]
        for rollout_id in lost:
            del self._tickets[rollout_id]
            self._buffer(BufferState.abandon, rollout_id)
        for task in tasks:
            with suppress(DeadlineError):  # errors of a rollout that is gone are not asked for
                self._runtime.wait_any([task], self._plan.rollout_timeout_s)
        if self._prepares in lost and self._memory.trainer_is_awake:  # else it has nothing of a step
            self._on_trained("discard")
        for rollout_id in lost if again else ():
            self._start_rollout(rollout_id)

    def _finished_rollout(self, rollout_id: int) -> dict[str, float]:
        metrics, samples = self._wait(self._generating[rollout_id], self._plan.rollout_timeout_s)
        del self._generating[rollout_id]
        report = self._buffer(BufferState.close_rollout, self._tickets[rollout_id])
        metrics = dict(metrics)
        metrics |= drop_metrics(report.drops)
        metrics["rollout/num_groups"] = float(report.num_groups)
        self._observer.rollout_ended(rollout_id, False, metrics, samples)
        if report.num_groups == 0:
            raise RolloutError(
                "no group was finished, so there is nothing to train on",
                where=f"rollout {rollout_id}",
                hint=f"dropped: {report.drops}" if report.drops else "does the rollout function report its groups?",
            )
        if self._plan.records:
            self._call("record", "save", rollout_id, timeout_s=self._plan.save_timeout_s)
        return metrics

    def _train_and_commit(self, rollout_id: int, step: int) -> dict[str, float]:
        if not self._plan.roles.trained:
            self._buffer(BufferState.commit, rollout_id, step)  # so that the Buffer drops the groups
            return {}
        with self._times.of("train"):
            trained = self._update(rollout_id)
        self._buffer(BufferState.commit, rollout_id, step)
        self._observer.trained(rollout_id, step, trained)
        return trained

    def _prepare_update(self, rollout_id: int) -> None:
        """The trainer's work before the optimizer step, with all of its calls to the Buffer."""
        plan, limit = self._plan, self._plan.train_timeout_s
        if not plan.schedule.streams:
            self._roles.start(rollout_id, trainer_too=False)
        with self._times.of("roles"):
            for role, task in self._roles.tasks(rollout_id):
                self._observer.worked(role, self._wait(task, limit).spans_on(clock_origin()))
        if plan.roles.stream_gradients:
            return
        passes = () if plan.schedule.streams else plan.roles.passes
        if passes:
            self._on_trained("fetch", rollout_id)
        for role, model in passes:
            with self._times.of(FIELD_OF_MODEL[model], role, rollout_id):
                self._call(role, "log_probs", model, timeout_s=limit)
        if plan.roles.estimates:
            with self._times.of("advantages", "train", rollout_id):
                self._call(plan.roles.trained[0], "estimate", rollout_id, timeout_s=limit)
        if plan.roles.estimates or not passes:
            self._on_trained("fetch", rollout_id)

    def _compare_log_probs(self, rollout_id: int) -> None:
        """Before the first optimizer step: end the run if the engine sampled from other weights than are trained."""
        if self._plan.compare_log_probs and not self._compared:
            limit = self._plan.train_timeout_s
            actor = self._plan.roles.trained[0]
            self._observer.notice(str(self._call(actor, "compare_log_probs", rollout_id, timeout_s=limit)))
            self._compared = True

    def _update(self, rollout_id: int) -> dict[str, float]:
        """The optimizer step of each trained role that takes one. It reads nothing from the Buffer, so it cannot fail
        with PayloadLostError; it is never retried."""
        plan = self._plan.roles
        method = "finish_stream" if plan.stream_gradients else "train"
        with self._times.of("update", "train", rollout_id):
            steps = plan.steps_on(rollout_id)
            self._on_trained("discard", roles=[role for role in plan.trained if role not in steps])
            answers = self._on_trained(method, roles=steps)
            return {name: value for metrics in answers for name, value in metrics.items()}

    def _update_reference(self, step: int) -> None:
        """Before the checkpoint, which holds the reference, and before the next rollout, which may be streamed."""
        interval = self._plan.ref_update_interval
        if interval is not None and step % interval == 0:
            with self._times.of("ref_update"):
                self._call("reference", "update", step, timeout_s=self._plan.publish_timeout_s)

    def _publish(self) -> None:
        is_there = self._published == self._version and not self._memory.engines_lack_weights
        if is_there or not self._plan.roles.trained:
            return
        self._memory.publication()
        with self._times.of("publish", "publish", self._version):
            self._observer.phase("publish")
            times = self._call("publish", "publish", self._version, timeout_s=self._plan.publish_timeout_s)
        self._published = self._version
        self._observer.published(self._version, times)

    def _evaluate(self) -> None:
        self._observer.phase("evaluate")
        metrics, samples = self._evaluated()
        self._result.evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        self._observer.rollout_ended(self._version, True, metrics, samples)
        self._observer.evaluation(self._version, metrics)
        stop = self._plan.early_stop
        if stop is not None and stop.met(metrics):
            self._result.stopped_early = True
            found = f"{stop.metric} is {metrics[stop.metric]:g}"
            self._observer.notice(
                f"--early-stop: the run ends after {self._version} steps: {found}, and the condition is {stop}"
            )

    def _evaluated(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        self._memory.engines(evaluation=True)
        while True:
            ticket = self._evaluating = self._buffer(BufferState.generate, self._version, True)
            try:
                with self._times.of("evaluate", "rollout", self._version):
                    task = self._runtime.submit("rollout", "run", ticket)
                    metrics, samples = self._wait(task, self._plan.rollout_timeout_s)
                self._buffer(BufferState.close_rollout, ticket)
            except BufferRLError as error:
                self._produce_again(ticket, error)
                self._buffer(BufferState.clear, ticket.task)
                continue
            self._buffer(BufferState.clear, ticket.task)
            self._evaluating = None
            return dict(metrics), samples

    def _save(self, step: int, owes_evaluation: bool = False) -> None:
        if self._saved == step:
            return
        with self._times.of("save", "save", step):
            self._observer.phase("save")
            self._end_save()
            self._saving = self._runtime.submit("save", "save", step, *[True] * owes_evaluation)
            self._end_save()
            self._saving = self._runtime.submit("save", "seal")
            if not self._plan.async_save:
                self._end_save()
        self._saved = step

    def _end_save(self) -> None:
        """Wait for the call that saves, if there is one."""
        if self._saving is None:
            return
        try:
            self._wait(self._saving, self._plan.save_timeout_s)
        except DeadlineError as error:
            error.hint = error.hint or "raise --save-timeout-s if it is only slow; it covers the upload too"
            raise
        self._saving = None

    def _buffer(self, operation: Callable[[Any, *Ts], R], *args: *Ts) -> R:
        """The answer of an operation of the Buffer. It comes soon, so other calls that fail are seen after it."""
        task = self._runtime.submit("buffer", operation.__name__, *args)
        self._runtime.wait_any([task], self._plan.buffer_timeout_s)
        return cast(R, self._runtime.result(task))

    def _on_trained(self, method: str, *args: Any, roles: Sequence[str] | None = None) -> list[Any]:
        """The answers of trained roles, of all where none are named, which work at the same time."""
        chosen = self._plan.roles.trained if roles is None else roles
        tasks = [self._runtime.submit(role, method, *args) for role in chosen]
        return [self._wait(task, self._plan.train_timeout_s, beside=tasks) for task in tasks]

    def _call(self, role: str, method: str, *args: Any, timeout_s: float) -> Any:
        return self._wait(self._runtime.submit(role, method, *args), timeout_s)

    def _wait(self, task: Task, timeout_s: float, beside: Sequence[Task] = ()) -> Any:
        """The task's answer. A rollout, a role, or a task ``beside`` it that fails meanwhile ends the run at once, not
        when its turn comes. A role that can be replaced is replaced, and its work goes on; a rollout that is lost is
        produced again, if it is not the one that is being prepared."""
        deadline = self._runtime.now() + timeout_s
        ended_well: set[Task] = set()
        while (left := deadline - self._runtime.now()) > 0:
            others = [*self._generating.values(), *self._roles.all_tasks(), *beside]
            others += [] if self._saving is None else [self._saving]
            watched = [other for other in others if other is not task and other not in ended_well]
            ended = self._runtime.wait_any([task, *watched], left)
            try:
                answer = self._runtime.result(ended)
            except BufferRLError as error:
                failed_at = self._runtime.now()
                successor = self._mended(ended, error)
                deadline += self._runtime.now() - failed_at  # the task may have been answered long ago
                if ended is task and successor is not task:  # which has a deadline of its own
                    task, deadline = successor, self._runtime.now() + timeout_s
                continue
            if ended is task:
                return answer
            ended_well.add(ended)  # its answer is asked for again when its turn comes
        raise DeadlineError(f"no answer within {timeout_s:g} s", where=f"{task.role}.{task.method}")

    def _mended(self, failed: Task, error: BufferRLError) -> Task:
        """Replace the process of a call that failed, or produce its rollout again. Returns the new call; the failed one
        where a rollout was started again, which has other calls. Raises the error where neither can be done, and for
        the rollout that is being prepared."""
        generating = (rollout_id for rollout_id, task in self._generating.items() if task is failed)
        rollout_id = next(generating, self._roles.rollout_of(failed))
        ticket = None if rollout_id is None else self._tickets.get(rollout_id)
        requeue = BufferState.requeue_for_readers
        try:
            if ticket is not None and self._plan.passes_on_tickets and is_worker_death("rollout", error):
                return self._pass_on(ticket, error)
            return self._roles.replace(failed, error, lambda task, reader: self._buffer(requeue, task, reader))
        except BufferRLError as lasting:
            if ticket is None or rollout_id == self._prepares:
                raise
            self._produce_again(ticket, lasting)
            return failed

    def _pass_on(self, ticket: Ticket, error: BufferRLError) -> Task:
        """Have another rollout worker go on with the ticket of one that died. Returns its call."""
        self._roles.restart("rollout", error)
        passed = self._tickets[ticket.rollout_id] = self._buffer(BufferState.pass_on, ticket)
        missing = passed.num_groups
        self._observer.notice(f"{ticket.task} goes on: {missing} groups are missing, and its metrics are of these")
        task = self._generating[ticket.rollout_id] = self._runtime.submit("rollout", "run", passed)
        return task
