"""Watches the engines of a fleet: finds those that hang, takes the dead off the router's list, replaces them.

Who waits for whom: no caller waits for a replacement. Each has a thread, which ends what is left of the engine before
it, starts it, brings it to the newest weights where they are on disk, and else leaves it for the next publication. Then
the router sends it requests. The supervisor's own thread waits for none of this, and for the router a moment.

A router lists the engines that serve. A suspect one is off the list while another one serves: what it works on goes on,
and it is listed again once it answers a probe.

An engine that hangs lives, and its connections are open, but nothing is answered. A thread of the heartbeat asks every
engine that has answered once, again and again; no other thread waits for it. An engine whose probe fails is suspect at
once, and dead when none was answered for long enough.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_rl.args import Args
from buffer_rl.cluster.process import NO_ANSWER, STOP_TIMEOUT_S, fetch
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.protocol import MODEL_INFO, SERVER_INFO
from buffer_rl.engines.registry import PROBED, SERVES, EngineEvent, EngineRegistry, EngineState, Replica
from buffer_rl.errors import BufferRLError, DeadlineError, EngineError
from buffer_rl.kinds.engine import EngineProcess, RouterProcess

INTERVAL_S = 0.25
LIST_TIMEOUT_S = 5.0
"""For the router to list an engine. One that it does not is asked for again."""
JOIN_TIMEOUT_S = 2 * STOP_TIMEOUT_S
SCHEDULER_PROBE = SERVER_INFO
"""Answered by the scheduler that decodes, of SGLang and of the embedded engine, in every mode of a pause. SGLang
answers ``/health`` while its scheduler is stopped, and ``/ready`` and ``/health_generate`` not while it is paused."""
SERVER_PROBE = "/health"
"""For engines that may be loading weights, which keeps the scheduler as long as it takes."""
LONGEST_INTERVAL_S = 5.0
LONGEST_PROBE_S = 10.0
SHORTEST_PROBE_S = 1.0
PROBES_AT_ONCE = 16
PROBES_JOIN_TIMEOUT_S = 1.0


@dataclass(eq=False)
class Supervisor:
    """Supervises ``registry``, whose engines ``router`` lists.

    launch: starts engine ``index`` with the log of a name. say: called with one line, from any thread, when an engine
    is lost or replaced.
    """

    _args: Args
    _registry: EngineRegistry
    _router: RouterProcess
    _launch: Callable[[int, str], EngineProcess]
    _say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._listed = {replica.url for replica in self._wanted()}
        self._back = set(self._registry.all())
        # The run starts none of those that run elsewhere: it waits for them, however often.
        self._limit = math.inf if self._args.rollout_external_engine_addrs else self._args.engine_max_restarts
        self._restarts = 0
        self._replacing = 0
        self._last_death: BufferRLError | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._watch, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Start no engine any more. Those that were started are left to the caller, and ``join``."""
        with self._lock:  # what a launch under way starts is in the registry then, or ended by its thread
            self._end.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def join(self) -> None:
        """Wait for the threads of replacements, once these have been stopped."""
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        try:
            while not self._end.wait(INTERVAL_S):
                self._look()
        except Exception as error:  # fault boundary: without this thread no engine would be replaced
            self._registry.over = EngineError(f"{type(error).__name__}: {error}", where="the engines' supervisor")

    def _look(self) -> None:
        for replica in self._registry.all():
            if (death := replica.error()) is not None:
                self._replace(replica, death)
        self._list()
        if self._last_death is not None and not self._replacing and not self._registry.all():
            what, where = f"no engine is left: {self._last_death.what}", self._last_death.where
            hint = "read the log; fleet.log beside it says what came before"
            self._registry.over = EngineError(what, where=where, hint=hint)

    # ------------------------------------------------------------------ the router's list

    def _wanted(self) -> list[Replica]:
        """The engines that get new requests."""
        return self._registry.in_state(EngineState.SERVING) or self._registry.in_state(*SERVES)

    def _list(self) -> None:
        """Have the router list what is wanted. What it is too busy for is done at the next look: it finds out by its
        own health checks too, and clients try again elsewhere."""
        wanted = {replica.url: replica for replica in self._wanted()}
        for url in wanted.keys() ^ self._listed:
            try:
                if url in wanted:
                    self._router.add(url, timeout_s=LIST_TIMEOUT_S)
                    self._listed.add(url)
                    self._say_back(wanted[url])
                else:
                    self._router.remove(url)
                    self._listed.remove(url)
            except BufferRLError as error:
                verb = "does not list" if url in wanted else "still lists"
                self._say(f"the router {verb} {url}: {_without_log(error)} ({error.where})")

    def _say_back(self, replica: Replica) -> None:
        if replica in self._back:  # it was suspect
            return
        self._back.add(replica)
        published = self._registry.published
        weights = f"the weights of version {published.version}" if published else "the initial weights"
        self._say(f"engine {replica.index} is back, with {weights}")

    # ------------------------------------------------------------------ replacement

    def _replace(self, lost: Replica, death: BufferRLError) -> None:
        self._last_death = death
        self._registry.remove(lost)
        restarts = self._used_restart()
        left = len(self._registry.in_state(*SERVES))
        goes_on = f"{_without_log(death)} ({death.where}); the run goes on with {left} engine{'s' if left != 1 else ''}"
        limit = self._args.engine_max_restarts
        if restarts is None:
            self._say(f"{goes_on}, and none is started in its place (--engine-max-restarts {limit})")
        elif self._limit == math.inf:
            self._say(f"{goes_on} until it answers again")
        else:
            self._say(f"{goes_on} while another one starts in its place ({restarts} of at most {limit} restarts)")
        name = f"engine-{lost.index}-restart"
        thread = threading.Thread(target=self._bring_up, args=(lost, restarts), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _used_restart(self) -> int | None:
        """The number of one more restart; None if there were enough."""
        with self._lock:
            if self._restarts >= self._limit:
                return None
            self._restarts += 1
            self._replacing += 1
            return self._restarts

    def _bring_up(self, lost: Replica, restart: int | None) -> None:
        """What a replacement's thread does; the supervisor finds the failure."""
        try:
            lost.engine.stop()  # what is left of its process group
        except Exception as error:  # fault boundary: launchers are plugins
            self._say(f"engine {lost.index} could not be ended: {type(error).__name__}: {error}")
        if restart is None:
            return
        while not self._registry.begin_start():
            if self._end.wait(INTERVAL_S):
                return
        try:
            self._start(lost, restart)
        finally:
            self._registry.end_start()

    def _start(self, lost: Replica, restart: int) -> None:
        if (replica := self._started(lost.index, restart, lost.on_change)) is None:
            return
        try:
            replica.engine.wait_ready(self._args.engine_start_timeout_s)
            replica.note(EngineEvent.ANSWERED)
            self._catch_up(replica)
        except BufferRLError as error:
            replica.end(error)
        except Exception as error:  # fault boundary: launchers are plugins
            replica.end(EngineError(f"{type(error).__name__}: {error}", where=f"engine {replica.index}"))

    def _started(self, index: int, restart: int, on_change: Any) -> Replica | None:
        """A replacement, in the registry; None if all restarts were used for launches that failed, or at the end."""
        number: int | None = restart
        while number is not None:
            if self._end.is_set():
                return None
            try:
                engine = self._launch(index, f"engine_{index}_restart_{number}.log")
            except Exception as error:  # fault boundary: launchers are plugins
                self._say(f"engine {index} could not be started again: {error}")
                number = self._used_restart()
                with self._lock:
                    self._replacing -= 1
                continue
            replica = Replica(index=index, engine=engine, state=EngineState.RESTARTING, on_change=on_change)
            with self._lock:
                if not self._end.is_set():
                    self._registry.add(replica)
                    self._replacing -= 1  # last: some engine is expected until then
                    return replica
            engine.stop()  # the run ended meanwhile
        return None

    def _catch_up(self, replica: Replica) -> None:
        """Bring the engine to the weights of the others, or leave it for the next publication."""
        limit = self._args.update_weights_timeout_s
        if not self._registry.publication.acquire(timeout=limit):
            raise DeadlineError(f"a publication took longer than {limit:g} s", where=f"engine {replica.index}")
        try:
            published, key = self._registry.published, self._args.engine_api_key
            if published is not None:
                if published.folder is None or not Path(published.folder).is_dir():
                    replica.note(EngineEvent.NEEDS_WEIGHTS)
                    return
                # A publication waits ``limit`` for the lock: the engine must be done, or have failed, before.
                with EngineControlClient([replica.url], timeout_s=limit / 2, api_key=key) as control:
                    # There is one where a publication failed, and no new process.
                    with contextlib.suppress(EngineError):
                        control.end_weight_update()
                    if published.adapter is not None:
                        control.load_adapter(published.adapter, published.folder, int(published.version))
                    else:
                        control.update_weights_from_disk(published.folder, int(published.version))
                    if (found := control.versions()[replica.url]) != published.version:
                        what = f"its weights are of version {found}"
                        raise EngineError(what, where=replica.url, expected=published.version)
                    control.resume()
            replica.note(EngineEvent.HAS_WEIGHTS)
        finally:
            self._registry.publication.release()


def _without_log(error: BufferRLError) -> str:
    """What is wrong, in one line, without the end of a process's log."""
    return error.what.splitlines()[0].partition("; ")[0]


@dataclass(eq=False)
class Heartbeat:
    """Watches the replicas of ``registry`` that serve, or will as soon as they have the weights.

    timeout_s: an engine is dead once it answered no probe for so long (``Replica.probed``). api_key: of the engines.
    """

    _registry: EngineRegistry
    timeout_s: float
    api_key: str | None = None

    def __post_init__(self) -> None:
        self._interval_s = min(self.timeout_s / 6, LONGEST_INTERVAL_S)
        self._probe_s = max(SHORTEST_PROBE_S, min(self.timeout_s / 6, LONGEST_PROBE_S))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a probe under way is not waited for."""
        self._end.set()
        self._thread.join(PROBES_JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        pool = concurrent.futures.ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="engine-probe")
        try:
            while not self._end.wait(self._interval_s):
                replicas = self._registry.in_state(*PROBED)
                for replica, answered in zip(replicas, pool.map(self._answers, replicas), strict=True):
                    self._note(replica, answered)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _note(self, replica: Replica, answered: bool) -> None:
        if answered and replica.state is EngineState.SUSPECT and (found := self._other_version(replica)):
            what = f"engine {replica.index} is another one: its weights are of version {found}"
            replica.end(EngineError(what, where=replica.url, hint="it was started again by who runs it"))
            return
        if replica.probed(answered, time.monotonic()) >= self.timeout_s:
            what = f"engine {replica.index} hangs: no answer to {self._path(replica)} for {self.timeout_s:g} s"
            hint = "its log says what it did last; raise --rollout-health-check-timeout if it is only slow"
            replica.end(EngineError(what, where=replica.url, hint=hint))

    def _other_version(self, replica: Replica) -> str:
        """The version of the engine's weights if it is not what was published: behind one address another process may
        answer. Empty if it is, or is unknown now."""
        published = self._registry.published
        if published is None or self._registry.publication.locked():
            return ""
        try:
            found = str(json.loads(self._fetch(replica, MODEL_INFO)[1])["weight_version"])
        except (*NO_ANSWER, KeyError, TypeError):
            return ""
        changed = self._registry.publication.locked() or self._registry.published is not published
        return "" if changed or found == published.version else found

    def _path(self, replica: Replica) -> str:
        loads = replica.state is EngineState.LOADING or self._registry.publication.locked()
        return SERVER_PROBE if loads else SCHEDULER_PROBE

    def _answers(self, replica: Replica) -> bool:
        with contextlib.suppress(*NO_ANSWER):
            return self._fetch(replica, self._path(replica))[0] < 500  # an engine of a plugin may not have the path
        return False

    def _fetch(self, replica: Replica, path: str) -> tuple[int, bytes]:
        return fetch(replica.url + path, self._probe_s, key=self.api_key)
