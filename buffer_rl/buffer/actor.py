"""The Buffer's process: one thread at a time works on the state, others answer health checks; and its watcher.

Ray starts it again when it dies. The new process reads the ledger: what was leased is pending again, the rollouts under
way are lost (their calls raise BufferRestartedError), and the driver has them produced again. ``watch_buffer`` ends
a process that hangs.

Blocking: callers wait for the state with a deadline; the thread that holds the state lock never waits. Large payloads
are written to the object store before the lock is taken. User code never runs here.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffer_rl.buffer.calls import CallLog, NumberedCall, changes_state, mutates, reads
from buffer_rl.buffer.feed import DeliveredFeed
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import PID, process_note
from buffer_rl.buffer.ledger_file import FILE_NAME, LedgerPlace, new_ledger
from buffer_rl.buffer.queue import RequeueRule, json_text
from buffer_rl.buffer.state import BufferState
from buffer_rl.buffer.storage import MAX_REPORTS, owned_payloads
from buffer_rl.cluster.hangs import ReplacementWatch
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.errors import BufferRLError, BufferStateError, CheckpointError, raised_as
from buffer_rl.observe.memory import take_peaks
from buffer_rl.options.section import load_args
from buffer_rl.plan.schedule import Schedule
from buffer_rl.records.groups import Column

if TYPE_CHECKING:
    from buffer_rl.args import Args


MAX_WAITERS = 64
"""Readers that can wait for rows at one time; more would wait for each other."""

STATE_FILE = "buffer.json"


class BufferActor:
    """Hosts one ``BufferState``. Called through ``buffer_rl.buffer.client.BufferClient``."""

    def __init__(self, args_text: str, place: LedgerPlace) -> None:
        args = load_args(args_text)
        source: PromptDataSource | DeliveredFeed | None = None
        if args.data_source_path:  # it may read --prompt-data in its own way, and is not to be second-guessed
            source = DeliveredFeed(args.data_source_path)
        elif args.prompt_data:
            source = PromptDataSource(args)
        # A trainer may have taken the step of what was selected: its commit comes, or the rollout's next ``generate``.
        self._ledger = Ledger(place.path, run=place.run, keep_selected=True)
        restarted = self._ledger.recall(PID) is not None
        self._state = BufferState(
            source,
            ledger=self._ledger,
            groups_per_step=args.rollout_batch_size,
            eval_groups=EvalSource(args).all_groups,
            rule=RequeueRule.from_args(args),
            schedule=None if args.debug_rollout_only else Schedule.of(args),  # that mode publishes no weights
            restarted=restarted,
        )
        for dataset in source.datasets if isinstance(source, PromptDataSource) else ():
            self._ledger.set_num_rows(dataset.source_hash, len(dataset))
        self._calls = CallLog()
        self._busy_since: float | None = None
        self._work_s = 0.0
        self._changed = threading.Condition()
        # Ray sends an answer when the lock is free again. What another thread may do by then is ``finish``, which
        # alters nothing that was answered: it adds a group, and marks its lease.
        self._state_lock = threading.Lock()
        self._sign()  # from here on it answers health checks

    def execute(self, caller: str, calls: Sequence[NumberedCall]) -> list[Any]:
        """Execute operations, in order; one that changes state once per ``(caller, sequence)`` (see ``CallLog.once``).
        Returns for each its answer, or the error of ``buffer_rl.errors`` that it raised.

        ``calls`` are one argument, since Ray serializes each argument by itself."""
        return [self._executed(caller, *call) for call in calls]

    def _executed(self, caller: str, sequence: int, open_from: int, method: str, args: Sequence[Any]) -> Any:
        try:
            operation = self._operation(method)
            with self._state_lock:
                if not changes_state(operation):
                    return operation(*args)
                with self._counted():
                    return self._calls.once(caller, sequence, open_from, operation, args)
        except BufferRLError as error:
            error.where = error.where or f"buffer.{method}"
            return error

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """A change is under way in the block."""
        revision = self._state.revision
        self._busy_since = started = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None
            self._work_s += time.monotonic() - started
            if self._state.revision != revision:
                with self._changed:
                    self._changed.notify_all()

    def _operation(self, name: str) -> Callable[..., Any]:
        for owner in (self, self._state):
            operation = getattr(owner, name, None)
            if changes_state(operation) is not None:
                return cast("Callable[..., Any]", operation)
        raise BufferStateError(f"the Buffer has no operation {name!r}")

    @ray.method(concurrency_group="health")
    def get_progress(self) -> dict[str, Any]:
        """Counts for a display, answered even while the state is worked on. Best effort: the counts may be
        of two moments. ``busy_s``: seconds that a thread has worked on the change of now; ``work_s``: on
        all changes so far, of which ``ledger_s`` in the ledger's transactions; ``pid``: of this process."""
        return self._counts()

    def _counts(self) -> dict[str, Any]:
        since = self._busy_since
        health = {
            "busy_s": 0.0 if since is None else time.monotonic() - since,
            "work_s": self._work_s,
            "ledger_s": self._ledger.tables.seconds,
            "pid": os.getpid(),
        }
        try:
            return health | self._state.get_progress()
        except (RuntimeError, BufferStateError):  # a task began or ended while it was read: the next poll will do
            return health | {"incarnation": self._ledger.fencing_token}

    @mutates
    def release(self, version: int) -> dict[str, Any]:
        """``BufferState.release``, with the times of ``get_progress`` before it, and ``peak``: this process's memory
        since the release before (see ``take_peaks``)."""
        self._state.release(version)
        return self._counts() | {"peak": take_peaks()}

    @ray.method(concurrency_group="wait")
    def wait_change(self, revision: int, timeout_s: float) -> None:
        """Returns once rows may be ready that were not at ``revision``, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.revision != revision, timeout_s)

    @ray.method(concurrency_group="storage")
    def execute_with_payloads(self, caller: str, call: NumberedCall, payloads: dict[str, Column]) -> list[Any]:
        """``execute`` of one call with large columns, which this process then owns: there are no storage processes
        (see ``StorageActor.execute_with_payloads``)."""
        with owned_payloads(call.args, payloads, "buffer"):
            return self.execute(caller, [call])

    @reads
    def save(self, folder: str) -> None:
        """Write the Buffer's state and ledger into ``folder``, which is then sealed: all files of it are synced."""
        self._ledger.backup(Path(folder) / FILE_NAME)
        path = Path(folder) / STATE_FILE
        with raised_as(CheckpointError, "the Buffer's state cannot be written", OSError, where=str(path)):
            path.write_bytes(json_text(self._state.state_dict()))

    @mutates
    def load(self, folder: str) -> None:
        """Continue from the state in ``folder``."""
        path = Path(folder) / STATE_FILE
        with raised_as(CheckpointError, "the Buffer's state cannot be read", (OSError, ValueError), where=str(path)):
            state = json.loads(path.read_bytes())
        self._state.load_state_dict(state, lambda: self._ledger.restore(Path(folder) / FILE_NAME))
        self._sign()

    def _sign(self) -> None:
        self._ledger.remember(PID, process_note(os.getpid()) or str(os.getpid()))


def start_buffer(args_text: str) -> Any:
    """Start the Buffer's process on this node, where its ledger is. Returns its handle, for ``BufferClient``.

    Raises ConfigError if the ledger cannot be where the options say."""
    args = load_args(args_text)
    place = new_ledger(args)
    node = ray.get_runtime_context().get_node_id()
    remote = cast("Any", ray.remote)(
        num_cpus=0,
        max_restarts=args.buffer_max_restarts if can_restart(args) else 0,
        concurrency_groups={"health": 1, "wait": MAX_WAITERS, "storage": MAX_REPORTS},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    )
    return remote(BufferActor).remote(args_text, place)


def can_restart(args: Args) -> bool:
    """Whether a Buffer that died is replaced. Its groups are made again from the data files, so not where they come
    from a data source of the user's own or from recorded rollouts: its death is then a global restart."""
    recorded = args.debug_train_only or args.load_debug_rollout_data is not None
    return args.data_source_path is None and not recorded


PATIENCE_S = 0.1
"""Longest time that one look waits for an answer; a healthy Buffer's takes milliseconds."""


def watch_buffer(
    actor: Any,
    args: Args,
    process: Callable[[], int | None],
    shown: Callable[[dict[str, Any]], None],
    notice: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
) -> ReplacementWatch[dict[str, Any]]:
    """A watcher of the driver: a health check of the Buffer. One whose process runs, and did not answer or has worked
    on one change for too long, is ended, and so is one that is not there again after ``--buffer-timeout-s``.

    process: the id of the Buffer's process on this machine; None while there is none.
    shown: called with the Buffer's counts. notice: called with a line when the Buffer was, or will be, replaced.
    """

    # Noticed, ended and started again before its callers reach their deadlines.
    hang_s, start_s = min(args.buffer_hang_timeout_s, args.buffer_timeout_s / 2), args.buffer_timeout_s

    def end(why: str) -> None:
        notice(f"the Buffer {why}: its process is ended")
        if (pid := process()) is None:
            ray.kill(actor, no_restart=False)
            return
        with suppress(ProcessLookupError):  # as ray.kill, which takes seconds to end a stopped process
            os.kill(pid, signal.SIGKILL)

    def silent(_: int, seconds: float) -> bool:
        is_hung = seconds > hang_s and (process() is not None or seconds > start_s)
        if is_hung:
            end(f"did not answer for {seconds:.0f} s")
        return is_hung

    def pid_of(answer: dict[str, Any]) -> int:
        if answer["busy_s"] > hang_s:
            end(f"has worked on one change for {answer['busy_s']:.0f} s")
        shown(answer)
        return int(answer["pid"])

    return ReplacementWatch(
        [actor],
        cast("Any", BufferActor.get_progress),
        replaced=lambda _, pid: notice(f"the Buffer died and was replaced (process {pid})"),
        pid_of=pid_of,
        silent=silent,
        patience_s=PATIENCE_S,
        now=now,
    )
