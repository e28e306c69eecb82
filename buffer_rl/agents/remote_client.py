"""Leases samples of a run with ``--agent-path remote``. One file of the standard library: copy it to any machine.

    for episode in leases("runs/game/agents/worker_0.json"):  # or leases("http://host:port", key)
        with episode:
            episode.finish(play(episode.sample, episode.base_url, episode.api_key))

``base_url`` and ``api_key`` are of an OpenAI endpoint that is this episode's alone. What the block raises is a failure
of the episode, with its reason; a block that ends without ``finish`` has the run's reward. A thread sends heartbeats.
For several episodes at a time, start several processes, or threads with a loop each.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 30.0
"""Of one request, beyond what it asks the run to wait."""
PAUSE_S = 1.0
"""Between two tries to reach the run."""
HEARTBEATS = 3
"""How many are sent in the time after which a lease is lost."""
LOOPBACK = ("127.", "localhost", "::1")


class Episode:
    """One lease of one sample. sample: ``row_id``, ``prompt``, ``label``, ``metadata``, ``evaluation``. ended: set once
    the run takes nothing more of it, as at its deadline."""

    def __init__(self, lease: dict[str, Any]) -> None:
        self.base_url: str = lease.pop("base_url")
        self.api_key: str = lease.pop("api_key")
        self._interval_s = lease.pop("heartbeat_s") / HEARTBEATS
        self.sample = lease
        self.ended = threading.Event()
        self._is_finished = False
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def finish(self, reward: Any = None, *, answer: str = "") -> bool:
        """The end: a reward (a number or a mapping), or None for the run's. answer: the id of the completion that the
        run's reward is about. Returns False if the episode had ended before. Raises ValueError for no reward."""
        return self._finish({"reward": reward} | ({"answer": answer} if answer else {}))

    def give_up(self, reason: str) -> bool:
        """The sample cannot be judged: it is masked."""
        return self._finish({"give_up": reason})

    def fail(self, reason: str) -> bool:
        """The agent has failed: the sample is played once more."""
        return self._finish({"failed": reason})

    def abandon(self) -> None:
        """Send no more heartbeats."""
        self.ended.set()

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            if not self._is_finished:
                self.finish()
            return False
        if not isinstance(error, Exception):
            self.abandon()
            return False
        if not self._is_finished and not self.ended.is_set():
            self.fail("".join(traceback.format_exception(error))[-4000:])
        print("".join(traceback.format_exception(error)), file=sys.stderr)
        return True

    def _finish(self, report: dict[str, Any]) -> bool:
        until = time.monotonic() + TIMEOUT_S
        while True:  # sent again, it counts once
            status, answer = _post(f"{self.base_url}/finish", self.api_key, report)
            if status or self.ended.is_set() or time.monotonic() > until:
                break
            time.sleep(PAUSE_S)
        self._is_finished = True  # what is no JSON has told nothing
        self.ended.set()
        if status in (400, 409):
            raise ValueError(answer.get("error", {}).get("message", answer))
        return status == 200

    def _beat(self) -> None:
        heard = time.monotonic()
        while not self.ended.wait(self._interval_s):
            status, now = _post(f"{self.base_url}/heartbeat", self.api_key, {})[0], time.monotonic()
            heard = now if status == 200 else heard
            if status in (401, 404, 410) or now - heard > HEARTBEATS * self._interval_s:  # the lease is lost
                self.ended.set()


def leases(source: str, key: str = "", *, wait_s: float = 30.0, patience_s: float = 600.0) -> Iterator[Episode]:
    """Samples, one after another, as long as the run goes on.

    source: the file that a rollout worker writes, ``RUN/agents/worker_0.json``, or its address, with its key. Ends if
    the file is removed, as at the end of the run, or if nothing has answered for ``patience_s``. Raises ValueError if
    the run refuses the key."""
    is_file, was_there = not source.startswith(("http://", "https://")), False
    heard = time.monotonic()
    while time.monotonic() - heard < patience_s:
        url, own_key = source, key
        if is_file:
            try:
                with open(source, encoding="utf-8") as file:
                    address = json.load(file)
            except FileNotFoundError:
                if was_there:
                    return
                time.sleep(PAUSE_S)
                continue
            url, own_key, was_there = address["url"], address["key"], True
        status, answer = _post(f"{url.rstrip('/')}/lease", own_key, {"wait_s": wait_s}, wait_s)
        if status in (200, 204):
            heard = time.monotonic()
        elif 400 <= status < 500 and not is_file:
            raise ValueError(f"{url} answers {status}: {answer}")
        else:
            time.sleep(PAUSE_S)
        if status == 200:
            episode = Episode(answer)
            try:
                yield episode
                if not episode._is_finished and not episode.ended.is_set():
                    episode.fail("its loop went on without a finish")
            finally:
                episode.abandon()
            heard = time.monotonic()


def _post(url: str, key: str, body: dict[str, Any], more_s: float = 0.0) -> tuple[int, dict[str, Any]]:
    """Status and answer; status 0 if nothing answered. Loopback is reached without a proxy."""
    host = urllib.parse.urlsplit(url).hostname or ""
    proxies = [urllib.request.ProxyHandler({})] if host.startswith(LOOPBACK) else []
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.build_opener(*proxies).open(request, timeout=TIMEOUT_S + more_s) as response:
            return response.status, _read(response.read())
    except urllib.error.HTTPError as error:
        return error.code, _read(error.read())
    except (OSError, http.client.HTTPException):  # urllib's errors are OSErrors
        return 0, {}


def _read(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body or b"{}")
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {"answer": answer}
