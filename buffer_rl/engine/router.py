"""The real ``sglang-router`` as a child process, and its list of workers."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from buffer_rl.engine.process import (
    POLL_INTERVAL_S,
    ChildProcess,
    auth_headers,
    base_url,
    key_environment,
    listening_socket,
    wait_until_ready,
)
from buffer_rl.errors import DeadlineError, EngineError

LOOPBACK = "127.0.0.1"
START_ATTEMPTS = 3
CALL_TIMEOUT_S = 10.0
"""Deadline of one change of the worker list; the router answers at once and does the work in the background."""


class Router:
    """The router in front of ``worker_urls``, which answer already, on a free port of the address ``host``.

    Raises EngineError with the end of its log if it ends, DeadlineError if it is not ready before ``deadline`` (of
    ``time.monotonic``). request_timeout_s: after which it gives up on a generation. api_key: what clients must send,
    and what the workers ask for.
    """

    def __init__(
        self,
        worker_urls: Sequence[str],
        log_path: str,
        *,
        request_timeout_s: int,
        deadline: float,
        api_key: str | None = None,
        host: str = LOOPBACK,
    ) -> None:
        command = partial(_command, worker_urls, request_timeout_s, host)
        self._api_key = api_key
        self.process, self.url = _start(host, command, log_path, key_environment(api_key), deadline)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy

    @property
    def pid(self) -> int:
        """Process id, and the id of its process group."""
        return self.process.pid

    def check(self) -> None:
        """Raises EngineError, with the end of the log, if the router has ended."""
        self.process.check()

    def stop(self) -> None:
        """End the process; returns when it is gone."""
        self.process.stop()

    def workers(self) -> dict[str, str]:
        """The router's own id of each worker, by URL. Raises EngineError."""
        answer = self._call("GET", "/workers")
        return {worker["url"]: worker["id"] for worker in answer["workers"]}

    def add(self, url: str) -> None:
        """Send requests to ``url`` as well, which answers already; returns once it is listed. Raises EngineError and
        DeadlineError."""
        own_key = {"api_key": self._api_key} if self._api_key else {}  # later workers do not inherit the router's
        self._call("POST", "/workers", {"url": url, **own_key})
        self._wait_for(url, listed=True)

    def remove(self, url: str) -> None:
        """Send nothing to ``url`` any more; returns once it is off the list. Raises EngineError and DeadlineError."""
        worker = self.workers().get(url)
        if worker is not None:
            self._call("DELETE", f"/workers/{worker}")
            self._wait_for(url, listed=False)

    def _wait_for(self, url: str, *, listed: bool) -> None:
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while (url in self.workers()) is not listed:
            if time.monotonic() > deadline:
                what = "list" if listed else "drop"
                raise DeadlineError(f"the router did not {what} {url} within {CALL_TIMEOUT_S:g} s", where=self.url)
            time.sleep(POLL_INTERVAL_S)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **auth_headers(self._api_key)},
        )
        try:
            with self._opener.open(request, timeout=CALL_TIMEOUT_S) as response:
                return json.loads(response.read())
        except (http.client.HTTPException, OSError, ValueError) as error:  # urllib's errors are OSErrors
            raise EngineError(f"{type(error).__name__}: {error}", where=f"{method} {self.url}{path}") from error


def _start(
    host: str, command: Callable[[int, int], list[str]], log_path: str, env: Mapping[str, str], deadline: float
) -> tuple[ChildProcess, str]:
    """The router takes no inherited socket, so another process may take its port first: try again then."""
    for attempt in range(START_ATTEMPTS):
        port, metrics_port = free_ports(host, LOOPBACK)
        url = base_url(host, port)
        process = ChildProcess("sglang-router", command(port, metrics_port), log_path, env=env)
        try:
            wait_until_ready(f"{url}/readiness", process, max(deadline - time.monotonic(), 0.0))
            process.check()
        except DeadlineError:
            process.stop()
            raise
        except EngineError:
            process.stop()
            if attempt + 1 < START_ATTEMPTS and "in use" in process.log_tail():
                continue
            raise
        except BaseException:
            process.stop()
            raise
        return process, url
    raise AssertionError("the last attempt returns or raises")


def _command(worker_urls: Sequence[str], request_timeout_s: int, host: str, port: int, metrics_port: int) -> list[str]:
    """The policy ``manual`` sends equal routing keys to one engine, so that the samples of a prompt share its
    prefill; a new key goes to the engine with the fewest requests. Retries and the circuit breaker are off: the
    client retries by ``rid``, and a bad request (400) must not count against an engine."""
    return [
        sys.executable,
        "-m",
        "buffer_rl.engine.router_process",
        *("--host", host, "--port", str(port)),
        *("--worker-urls", *worker_urls),
        *("--policy", "manual", "--assignment-mode", "min_load"),
        "--disable-retries",
        "--disable-circuit-breaker",
        *("--worker-startup-check-interval", "1"),
        *("--health-check-interval-secs", "5", "--health-check-timeout-secs", "20"),
        *("--request-timeout-secs", str(request_timeout_s)),
        *("--shutdown-grace-period-secs", "1"),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)),
        *("--log-level", "warn"),
    ]


def free_ports(*hosts: str) -> list[int]:
    """A port of each address that is free now, all different. Raises EngineError if this machine lacks an address."""
    with ExitStack() as held:  # all until the last is found
        return [int(held.enter_context(listening_socket(host)).getsockname()[1]) for host in hosts]
