"""The router of a run as a child process, and its list of workers: the ``sglang`` entry of the router plugins, and what
another package with the command line and the HTTP interface of ``sglang-router`` needs beside its name."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from buffer_rl.args import Args
from buffer_rl.cluster.process import NO_ANSWER, POLL_INTERVAL_S, ServerProcess, arguments_of, fetch, key_environment
from buffer_rl.engines.client import request_timeout_s
from buffer_rl.engines.http import decode_json, status_error
from buffer_rl.errors import ConfigError, DeadlineError, EngineError, raised_as

LOOPBACK = "127.0.0.1"
CALL_TIMEOUT_S = 10.0
"""Deadline of one change of the worker list; the router answers at once and does the work in the background."""

OWN = {
    "worker_urls": "--engine-urls",
    "request_timeout_secs": "--generate-timeout-s",
    "api_key": "--engine-api-key",
    "prometheus_host": "",
    "prometheus_port": "",
}
"""Arguments of the router that the run sets itself, with the option for each that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPackage:
    """Starts the router of an installed package; meets ``buffer_rl.kinds.engine.RouterLauncher``.

    name: of the package for pip. package: for Python; its ``router_args.RouterArgs`` adds its arguments to a parser.
    program: a module whose ``parse_router_args`` and ``launch_router`` run it. passes_fields: see ``RouterLauncher``.
    """

    name: str
    package: str
    program: str
    passes_fields: bool = False

    def __call__(self, args: Args, log_path: str) -> Router:
        """The router of the run, which starts. Raises ConfigError as ``check``."""
        return Router(args, log_path, self)

    def check(self, args: Args) -> None:
        """Raises ConfigError if the package is not installed, or ``args.router_args`` has an argument that it refuses
        or that the run sets."""
        self.arguments(args.router_args)

    def arguments(self, given: Mapping[str, Any]) -> list[str]:
        """``--router-args`` as the router takes them. Raises ConfigError as ``check``."""
        found = arguments_of(given, "router", OWN)
        where = f"--router {self.package}"
        hint = f"pip install 'buffer-rl[{self.package}]', or the router of the core: --router sglang"
        with raised_as(ConfigError, "the router cannot be imported", ImportError, where=where, hint=hint):
            known = importlib.import_module(f"{self.package}.router_args").RouterArgs
        parser = _Parser(f"{self.package}.launch_router")
        known.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
        parser.parse_args([f"--router-{each[2:]}" if each.startswith("--") else each for each in found])
        return found


launch = RouterPackage(name="sglang-router", package="sglang_router", program="sglang_router.launch_router")


class Router(ServerProcess):
    """The router in front of the workers that are added, on a free port of ``args.engine_host``. It starts at once, and
    answers at ``url`` after ``wait_ready``, whether it has workers or not.

    of: whose router it is. It asks clients for ``args.engine_api_key``, which the workers ask for.
    """

    def __init__(self, args: Args, log_path: str, of: RouterPackage) -> None:
        more = of.arguments(args.router_args)
        self._api_key = args.engine_api_key
        self._answers = False
        super().__init__(
            of.name,
            lambda ports: [*_command(of.program, args, *ports), *more],
            log_path,
            hosts=(args.engine_host, LOOPBACK),
            ready_path="/liveness",
            env=key_environment(args.engine_api_key),
        )

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it answers, whether it has workers or not."""
        if not self._answers:
            super().wait_ready(timeout_s)
            self._answers = True

    def workers(self) -> dict[str, str]:
        """The router's own id of each worker, by URL. Raises EngineError."""
        return {worker["url"]: worker["id"] for worker in self._call("GET", "/workers")["workers"]}

    def add(self, *urls: str, timeout_s: float = CALL_TIMEOUT_S, check: Callable[[], None] | None = None) -> None:
        """Send requests to ``urls`` as well, which answer already; returns once they are listed, at most ``timeout_s``
        later. Raises EngineError and DeadlineError, and what ``check`` raises, which is called meanwhile."""
        deadline = time.monotonic() + timeout_s
        own_key = {"api_key": self._api_key} if self._api_key else {}  # added workers do not inherit the router's
        for url in urls:
            self._call("POST", "/workers", {"url": url, **own_key})
        for url in urls:
            self._wait_for(url, deadline, listed=True, check=check)

    def remove(self, url: str) -> None:
        """Send nothing to ``url`` any more; returns once it is off the list. Raises EngineError and DeadlineError."""
        worker = self.workers().get(url)
        if worker is not None:
            self._call("DELETE", f"/workers/{worker}")
            self._wait_for(url, time.monotonic() + CALL_TIMEOUT_S, listed=False)

    def _wait_for(self, url: str, deadline: float, *, listed: bool, check: Callable[[], None] | None = None) -> None:
        while (url in self.workers()) is not listed:
            if check is not None:
                check()
            if time.monotonic() > deadline:
                verb, see = "list" if listed else "drop", "docs/troubleshooting.md#router-or-engines-are-not-reached"
                what = f"the router at {self.url} did not {verb} {url} in time; {self.process.log_end()}"
                hint = f"can the router's machine reach {url}? It connects directly, without a proxy"
                raise DeadlineError(what, where=self.process.log_path, hint=hint, see=see)
            time.sleep(POLL_INTERVAL_S)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        where = f"{method} {self.url}{path}"
        try:
            status, raw = fetch(self.url + path, CALL_TIMEOUT_S, key=self._api_key, method=method, body=body)
        except NO_ANSWER as error:
            self.check()  # a router that has ended gives the reason in its log
            raise EngineError(f"{type(error).__name__}: {error}", where=where) from error
        if status >= 400:
            raise status_error(where, status, raw)
        return decode_json(raw, where)


def _command(program: str, args: Args, port: int, metrics_port: int) -> list[str]:
    """The policies ``manual`` and ``consistent_hashing`` send equal routing keys to one engine, so that the samples of
    a prompt share its prefill; with ``manual`` a new key goes to the engine with the fewest requests. Retries and the
    circuit breaker are off: the client retries by ``rid``, and a bad request (400) must not count against an engine."""
    # It does not start with this policy and fewer than two workers. These two answer nothing, so they are never listed.
    policy = args.router_policy
    unlisted = ["--worker-urls", "http://127.0.0.1:1", "http://127.0.0.1:2"] if policy == "power_of_two" else []
    return [
        sys.executable,
        "-m",
        "buffer_rl.engines.router_process",
        *("--program", program),
        *("--host", args.engine_host, "--port", str(port)),
        *unlisted,
        *("--policy", policy, "--assignment-mode", "min_load"),
        "--disable-retries",
        "--disable-circuit-breaker",
        *("--worker-startup-check-interval", "1"),
        *("--health-check-interval-secs", "5", "--health-check-timeout-secs", "20"),
        *("--request-timeout-secs", str(int(request_timeout_s(args)) + 60)),
        *("--shutdown-grace-period-secs", "1"),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)),
        *("--log-level", "warn"),
    ]


class _Parser(argparse.ArgumentParser):
    def __init__(self, program: str) -> None:
        super().__init__(prog=program, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        hint = f"python -m {self.prog} --help lists them, without the prefix"
        raise ConfigError(f"the router refuses its arguments: {message}", where="--router-NAME", hint=hint)
