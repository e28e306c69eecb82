"""Waiting for a server process to answer, with a deadline."""

from __future__ import annotations

import http.client
import time
import urllib.request

from buffer_rl.engine.process import ChildProcess
from buffer_rl.errors import DeadlineError

POLL_INTERVAL_S = 0.05


def wait_until_ready(url: str, process: ChildProcess, timeout_s: float) -> None:
    """Ask ``url`` until it answers 200. Raises EngineError if ``process`` ends first, DeadlineError when time is up."""
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    while True:
        process.check()
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(
                f"{process.name} did not answer {url} within {timeout_s:g} s; "
                f"the end of its log:\n{process.log_tail()}",
                where=process.log_path,
                hint="read the log, or raise --engine-start-timeout-s",
            )
        try:
            with opener.open(url, timeout=min(left, 1.0)) as response:
                if response.status == 200:
                    return
        except (http.client.HTTPException, OSError):  # urllib's errors are OSErrors
            pass
        time.sleep(min(POLL_INTERVAL_S, max(left, 0.0)))
