"""The global restart inside a run: all of its processes are ended and started again from its newest checkpoint.

It is a resume without leaving the driver's process: weights, optimizer, ledger and position in the data go back
together, so that a deterministic run ends with the parameters of an undisturbed one. What stays is the driver's: the
locks of the folders, the observer with its loggers, the connection to Ray, the engines behind ``--router-url``.

It follows the death of a process that is not replaced in place (see ``buffer_rl.plan.roles.Restart``), or not any more.
Errors that code raised, deadlines and signals end the run.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from buffer_rl.args import Args
from buffer_rl.buffer.ledger_audit import process_note
from buffer_rl.cluster.actor_group import ActorGroup, is_dead
from buffer_rl.cluster.dispatch import Method
from buffer_rl.cluster.locality import machine_id
from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.folders import LINEAGE, START, later_checkpoint
from buffer_rl.driver.local_roles import OWES_EVALUATION
from buffer_rl.driver.provenance import changed_plugins, collect_user_code, resume_notices, ships_code
from buffer_rl.driver.runtime import LocalTarget, Target
from buffer_rl.driver.tasks import role_of
from buffer_rl.errors import BufferRLError, CheckpointError, WorkerDiedError
from buffer_rl.files.checkpoint import Checkpoint, opened_checkpoint
from buffer_rl.observe.metrics import METRICS_FILE
from buffer_rl.observe.observer import RunObserver, set_aside_other_run
from buffer_rl.observe.run_folder import records_in
from buffer_rl.observe.startup import StartUp
from buffer_rl.plan.schedule import RunResult
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.context import RunStart

END_TIMEOUT_S = 10.0
"""How long the processes of a run may take to end."""


class RunSession:
    """What stays: what the run is made of, its observer, the connection to Ray. Opened on ``stack``, which closes it.

    loaded: the checkpoint of ``--load``."""

    def __init__(
        self,
        args: Args,
        registry: PluginRegistry,
        loaded: Checkpoint | None,
        provenance: dict[str, Any],
        stack: ExitStack,
        startup: StartUp | None = None,
    ) -> None:
        self.provenance = provenance
        step = loaded.step if loaded else None
        found = loaded.facts.get(LINEAGE) if loaded else None
        if found is not None:
            set_aside_other_run(args.run_dir, found)
        self.lineage = found or uuid4().hex
        facts = provenance | {LINEAGE: self.lineage}
        self.observer = stack.enter_context(RunObserver(args, registry, step, facts, startup))
        if loaded is not None:
            resumed = resume_notices(loaded.facts, loaded.step, args)
            for line in (*changed_plugins(loaded.facts, provenance), *resumed):
                self.observer.notice(line)
        before = records_in(args.run_dir, METRICS_FILE)
        self.observer.evaluated = max((line["step"] for line in before if line["kind"] == "eval"), default=-1)
        if loaded is not None and not before:  # its earlier parts were in another folder, and evaluated there
            self.observer.evaluated = loaded.step - bool(loaded.facts.get(OWES_EVALUATION))
        self._code = collect_user_code(args, registry) if ships_code(args) else None
        self.args = args
        self._stack = stack
        self._is_connected = False

    def began(self, checkpoint: Checkpoint | None) -> RunStart:
        """A start of the run's processes from ``checkpoint``. What an earlier start noted of the same weights may be
        used: a checkpoint names the start that wrote it, and without one they are those that this session began with.
        """
        name, version = uuid4().hex, checkpoint.step if checkpoint is not None else 0
        of = self.lineage if checkpoint is None else checkpoint.facts.get(START, name)  # of an older one: unknown
        driver = process_note(os.getpid()) or ""
        return RunStart(name=name, version=version, origin=f"{of}:{version}", machine=machine_id(), driver=driver)

    def connect(self) -> None:
        """Connect to Ray, unless it was done before. Raises as ``ray_session``."""
        if not self._is_connected:
            store_bytes = round(self.args.object_store_gb * 1e9)
            self._stack.enter_context(ray_session(self.args.ray_address, self._code, store_bytes))
            self._is_connected = True
            self.observer.ready("Ray")


class Processes(ExitStack):
    """What one start of the run has to take down again, the last first.

    targets: where the calls of each role go. watchers: looks that the driver repeats, as ``RayRuntime`` says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[str, Target] = {}
        self.watchers: list[Callable[[], None]] = []
        self._groups: list[ActorGroup] = []
        self._locals: list[tuple[LocalTarget, Callable[[], float], Callable[[], object]]] = []

    def stops(self, group: ActorGroup, close: Method[()] | None = None, timeout_s: float = 0.0) -> ActorGroup:
        """Stop ``group`` (see ``ActorGroup.stop``), which has the calls of its role, and return it now."""
        self._groups.append(group)
        self.targets[group.role] = group
        self.callback(group.stop, close, timeout_s)
        return group

    def local(
        self,
        role: str,
        obj: object,
        *,
        call: Callable[..., Any] | None = None,
        end_s: Callable[[], float] = lambda: 0.0,
        then: Callable[[], object] = lambda: None,
    ) -> LocalTarget:
        """Have ``obj`` of this process take the calls of a role. call: see ``LocalTarget``. end_s: how long a call that
        is under way may take to end, once the processes that it waits for are gone; ``END_TIMEOUT_S`` at most if the
        run is interrupted. then: called if it did."""
        self.targets[role] = target = LocalTarget(role, obj, call)
        self.callback(target.stop)
        self._locals.append((target, end_s, then))
        return target

    def __exit__(self, *raised: Any) -> bool:
        try:
            return bool(super().__exit__(*raised))
        finally:
            interrupted = not isinstance(raised[1], BufferRLError | None)
            for target, end_s, then in reversed(self._locals):  # those that others use come first
                limit = min(end_s(), END_TIMEOUT_S) if interrupted else end_s()
                if limit and target.join(limit):
                    then()

    def remaining(self) -> list[str]:
        """After the end: which roles still have a process, or a call in this process, after ``END_TIMEOUT_S``."""
        deadline = time.monotonic() + END_TIMEOUT_S
        left = [target.role for target, _, _ in self._locals if not target.join(max(0.0, deadline - time.monotonic()))]
        return left + [group.role for group in self._groups if not _are_gone(group, deadline)]


def _are_gone(group: ActorGroup, deadline: float) -> bool:
    waiting = list(group.actors)
    while waiting := [actor for actor in waiting if not is_dead(actor)]:
        if time.monotonic() >= deadline:
            return False
    return True


def run_with_restarts(
    args: Args,
    loaded: Checkpoint | None,
    observer: RunObserver,
    attempt: Callable[[Checkpoint | None, Processes], RunResult],
) -> RunResult:
    """The result of ``attempt``, which starts the run's processes and runs them to the end of the run. After a death
    that nothing mends it is called again, from the newest checkpoint that this run wrote, else from ``loaded``, else
    from the start.

    Raises what ``attempt`` raised otherwise; the death that follows the last of ``--max-global-restarts``, or after
    which a process of the run did not end; CheckpointError if the newest checkpoint is damaged."""
    limit = args.max_global_restarts
    death: WorkerDiedError | None = None
    for restarts in itertools.count():
        processes = Processes()
        try:
            with processes:
                checkpoint = loaded
                if death is not None:
                    checkpoint = _newest(args, loaded, processes, death)
                    _tell(observer, death, checkpoint, f"{restarts} of {limit}")
                return attempt(checkpoint, processes)
        except WorkerDiedError as error:
            if role_of(error) in ("", "data_source") or limit == 0:  # the latter ends of the user's own code
                raise
            if restarts == limit:
                obstacle = f"--max-global-restarts: {limit} of {limit} were used; --load goes on from a checkpoint"
            elif remaining := processes.remaining():
                obstacle = f"not restarted: {', '.join(remaining)} did not end within {END_TIMEOUT_S:g} s"
            else:
                death = error.with_traceback(None)  # whose frames hold the processes that have ended
                continue
            error.hint = f"{error.hint}; {obstacle}" if error.hint else obstacle
            raise
    raise AssertionError("unreachable")


def _newest(args: Args, loaded: Checkpoint | None, processes: ExitStack, death: WorkerDiedError) -> Checkpoint | None:
    try:
        if later_checkpoint(args, loaded.step if loaded is not None else 0) is None:
            return loaded
        return processes.enter_context(opened_checkpoint(str(args.save), args.run_dir))
    except CheckpointError as error:
        raise error from death


def _tell(observer: Any, death: WorkerDiedError, checkpoint: Checkpoint | None, count: str) -> None:
    place = "the start" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
    observer.notice(f"{death.where}: {death.what}")
    observer.notice(f"all processes of the run are started again, from {place} (global restart {count})")
    observer.went_back(None if checkpoint is None else checkpoint.step)
