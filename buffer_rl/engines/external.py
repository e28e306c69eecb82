"""Engines that run elsewhere, behind a router of the run's own: the ``external`` entry of the engine plugins.

``--rollout-external-engine-addrs`` chooses it. An engine that went away is taken back when it answers again.
"""

from __future__ import annotations

import time

from buffer_rl.args import Args
from buffer_rl.cluster.process import answers, refuses_connections
from buffer_rl.errors import ConfigError, DeadlineError, EngineError

POLL_S = 0.5


class ExternalEngine:
    """An engine at ``url``; meets ``buffer_rl.kinds.engine.EngineProcess``. It is never ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._answered = False

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it answers ``/health``. Raises DeadlineError after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not answers(f"{self.url}/health", 1.0):
            if time.monotonic() > deadline:
                hint = "--rollout-external-engine-addrs are engines that run already"
                raise DeadlineError(f"the engine did not answer within {timeout_s:g} s", where=self.url, hint=hint)
            time.sleep(POLL_S)
        self._answered = True

    def check(self) -> None:
        """Raises EngineError if nothing listens there any more; until it has answered once, it is waited for."""
        if self._answered and refuses_connections(self.url):
            raise EngineError("nothing listens there any more", where=self.url)

    def stop(self) -> None:
        """Nothing: it is not the run that ends it."""


def urls_of(args: Args) -> list[str]:
    """``args.rollout_external_engine_addrs`` as URLs, without a trailing slash."""
    found = [address.rstrip("/") for address in args.rollout_external_engine_addrs]
    return [address if "://" in address else f"http://{address}" for address in found]


def launch(args: Args, index: int, log_path: str) -> ExternalEngine:
    """Engine ``index`` of ``args.rollout_external_engine_addrs``. Raises ConfigError if there is none."""
    urls = urls_of(args)
    if index >= len(urls):
        raise ConfigError(f"there is no engine {index}", where="--rollout-external-engine-addrs")
    return ExternalEngine(urls[index])
