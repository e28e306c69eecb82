"""The runtime with processes: calls go to Ray actors, or to local objects on a thread of their own.

Who waits for whom: the driver's thread waits in ``wait_any``, which wakes every ``POLL_S`` to run the
watchers (engine health, progress display); a watcher that raises ends the wait. Nothing waits for the driver.
Watchers ask other processes, so a call that is answered sooner than they are due does not wait for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any, Protocol, cast

from buffer_rl.cluster.actor_group import Call
from buffer_rl.driver.tasks import Task
from buffer_rl.errors import DeadlineError, WorkerError

POLL_S = 1.0
"""Each look is a call or a request to several processes, which does not pay more often."""


class Target(Protocol):
    """Something that a role's calls go to; ``ActorGroup`` is one."""

    def start(self, method: str, *args: Any) -> Call: ...


class LocalTarget:
    """Calls on an object of this process, one after another on one thread.

    A daemon thread rather than an executor's: the interpreter joins executor threads when it ends, and a call may hang.
    """

    def __init__(self, role: str, obj: Any) -> None:
        self._role = role
        self._object = obj
        self._calls: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=role, daemon=True)
        self._thread.start()

    def start(self, method: str, *args: Any) -> Call:
        future: Future[Any] = Future()
        self._calls.put((future, getattr(self._object, method), args))
        return Call(role=self._role, method=method, members=[self._role], futures=[future])

    def stop(self) -> None:
        """End the thread after the calls that were started; they are not waited for."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> bool:
        """After ``stop``: wait for those calls, but not longer than ``timeout_s``. Whether they have ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


def _work(calls: SimpleQueue[_Work | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, args = call
        try:
            future.set_result(function(*args))
        except BaseException as error:  # fault boundary: the error of a call is its answer
            future.set_exception(error)
        del call, future, function, args  # an idle thread must not keep the last answer


class RayRuntime:
    """Implements ``buffer_rl.driver.tasks.Runtime``; its tasks are ``Call``s.

    watchers: called about once a second while the driver waits, over all its calls; what one raises ends the wait.
    rollout_watchers: the same, while the call that it waits for is a rollout, so that the trainer takes no step.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        watchers: Sequence[Callable[[], None]] = (),
        rollout_watchers: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._targets = dict(targets)
        self._watchers = list(watchers)
        self._rollout_watchers = list(rollout_watchers)
        self._watch_at = 0.0

    def submit(self, role: str, method: str, *args: Any) -> Call:
        return self._targets[role].start(method, *args)

    def wait_any(self, tasks: Sequence[Task], timeout_s: float, *, watches: bool = True) -> Task:
        deadline = self.now() + timeout_s
        mine = [cast(Call, task) for task in tasks]
        while True:
            if ended := next((task for task in mine if task.ended()), None):
                return ended
            if watches:
                self._watch(mine[0].role)
            left = deadline - self.now()
            if left <= 0:
                waited_for = ", ".join(f"{task.role}.{task.method}" for task in mine)
                raise DeadlineError(f"no answer within {timeout_s:g} s", where=waited_for)
            pending = [future for task in mine for future in task.futures if not future.done()]
            until_watch = max(0.0, self._watch_at - self.now()) if watches else left
            wait(pending, timeout=min(until_watch, left), return_when=FIRST_COMPLETED)

    def result(self, task: Task) -> Any:
        return cast(Call, task).result()

    def restart(self, role: str) -> None:
        restart = getattr(self._targets[role], "restart", None)
        if restart is None:
            raise WorkerError("the role's processes cannot be replaced", where=role)
        restart()

    def _watch(self, role: str) -> None:
        """Call the watchers, unless they were called less than ``POLL_S`` ago. role: whose call is waited for."""
        if self.now() < self._watch_at:
            return
        for watcher in (*self._watchers, *(self._rollout_watchers if role == "rollout" else ())):
            watcher()
        self._watch_at = self.now() + POLL_S

    def now(self) -> float:
        return time.monotonic()
