"""Finds engines that hang: their process lives, their connections open, and nothing is answered.

Who waits for whom: a thread of its own asks every engine that has answered once, again and again; no other thread waits
for it. An engine whose probe fails is suspect at once, and dead when none was answered for long enough.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import threading
import time
import urllib.error
import urllib.request

from buffer_rl.cluster.process import auth_headers
from buffer_rl.engines.registry import EngineRegistry
from buffer_rl.engines.replica import PROBED, EngineState, Replica
from buffer_rl.errors import EngineError

SCHEDULER_PROBE = "/server_info"
"""Answered by the scheduler that decodes, of SGLang and of the embedded engine, in every mode of a pause. SGLang
answers ``/health`` while its scheduler is stopped, and ``/ready`` and ``/health_generate`` not while it is paused."""
SERVER_PROBE = "/health"
"""For engines that may be loading weights, which keeps the scheduler as long as it takes."""
LONGEST_INTERVAL_S = 5.0
LONGEST_PROBE_S = 10.0
SHORTEST_PROBE_S = 1.0
PROBES_AT_ONCE = 16
JOIN_TIMEOUT_S = 1.0


class Heartbeat:
    """Watches the replicas of ``registry`` that serve, or will as soon as they have the weights.

    timeout_s: an engine is dead once it answered no probe for so long (``Replica.probed``). api_key: of the engines.
    """

    def __init__(self, registry: EngineRegistry, timeout_s: float, api_key: str | None = None) -> None:
        self._registry = registry
        self._headers = auth_headers(api_key)
        self._timeout_s = timeout_s
        self._interval_s = min(timeout_s / 6, LONGEST_INTERVAL_S)
        self._probe_s = max(SHORTEST_PROBE_S, min(timeout_s / 6, LONGEST_PROBE_S))
        self._end = threading.Event()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
        self._thread = threading.Thread(target=self._watch, name="engine-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a probe under way is not waited for."""
        self._end.set()
        self._thread.join(JOIN_TIMEOUT_S)

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
        if replica.probed(answered, time.monotonic()) >= self._timeout_s:
            error = EngineError(
                f"engine {replica.index} hangs: no answer to {self._path(replica)} for {self._timeout_s:g} s",
                where=replica.url,
                hint="its log says what it did last; raise --rollout-health-check-timeout if it is only slow",
            )
            replica.end(error)

    def _other_version(self, replica: Replica) -> str:
        """The version of the engine's weights if it is not what was published: behind one address another process may
        answer. Empty if it is, or is unknown now."""
        published = self._registry.published
        if published is None or self._registry.publication.locked():
            return ""
        request = urllib.request.Request(replica.url + "/model_info", headers=self._headers)
        try:
            with self._opener.open(request, timeout=self._probe_s) as response:
                found = str(json.loads(response.read())["weight_version"])
        except (http.client.HTTPException, OSError, ValueError, KeyError, TypeError):
            return ""
        changed = self._registry.publication.locked() or self._registry.published is not published
        return "" if changed or found == published.version else found

    def _path(self, replica: Replica) -> str:
        loads = replica.state is EngineState.LOADING or self._registry.publication.locked()
        return SERVER_PROBE if loads else SCHEDULER_PROBE

    def _answers(self, replica: Replica) -> bool:
        request = urllib.request.Request(replica.url + self._path(replica), headers=self._headers)
        try:
            with self._opener.open(request, timeout=self._probe_s) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError as error:  # an engine of a plugin may not have the path
            with error:
                return error.code < 500
        except (http.client.HTTPException, OSError, ValueError):  # urllib's other errors are OSErrors
            return False
