"""Finds engines that hang: their process lives, their connections open, and nothing is answered.

Who waits for whom: a thread of its own asks every engine that has answered once for ``/health``, again and again;
nobody waits for it. What it finds is the member's failure, and ``EngineFleet.check`` replaces the engine as one that
died.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import threading
import time
import urllib.request

from buffer_rl.engine.roster import Member, MemberState, Roster
from buffer_rl.errors import EngineError

LONGEST_INTERVAL_S = 5.0
LONGEST_PROBE_S = 10.0
SHORTEST_PROBE_S = 1.0
PROBES_AT_ONCE = 16
JOIN_TIMEOUT_S = 1.0
WATCHED = (MemberState.SERVING, MemberState.WAITING, MemberState.LOADING)
"""Of one that starts, the deadline is ``--engine-start-timeout-s``."""


class Heartbeat:
    """Watches the members of ``roster`` that serve, or will as soon as they have the weights.

    timeout_s: an engine has failed once it answered no probe for so long. The time counts from the first probe that
    failed, not from the last that succeeded: a machine that slept finds its engines well.
    """

    def __init__(self, roster: Roster, timeout_s: float) -> None:
        self._roster = roster
        self._timeout_s = timeout_s
        self._interval_s = min(timeout_s / 6, LONGEST_INTERVAL_S)
        self._probe_s = max(SHORTEST_PROBE_S, min(timeout_s / 6, LONGEST_PROBE_S))
        self._failing_since: dict[Member, float] = {}
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
                members = self._roster.in_state(*WATCHED)
                for member, healthy in zip(members, pool.map(self._answers, members), strict=True):
                    self._note(member, healthy)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _note(self, member: Member, healthy: bool) -> None:
        if healthy:
            self._failing_since.pop(member, None)
            return
        now = time.monotonic()
        since = self._failing_since.setdefault(member, now)
        if now - since >= self._timeout_s and member.failure is None:
            del self._failing_since[member]
            member.failure = EngineError(
                f"engine {member.index} hangs: no answer to /health for {self._timeout_s:g} s",
                where=member.url,
                hint="its log says what it did last; raise --rollout-health-check-timeout if it is only slow",
            )

    def _answers(self, member: Member) -> bool:
        try:
            with self._opener.open(f"{member.url}/health", timeout=self._probe_s) as response:
                return bool(response.status == 200)
        except (http.client.HTTPException, OSError, ValueError):  # urllib's errors are OSErrors
            return False
