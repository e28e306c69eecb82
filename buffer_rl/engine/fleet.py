"""The engines of a run and the router in front of them: started together, watched, always stopped."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from buffer_rl.contracts import EngineLauncher, EngineProcess
from buffer_rl.engine.process import ChildProcess
from buffer_rl.engine.readiness import wait_until_ready
from buffer_rl.errors import ConfigError, DeadlineError, EngineError
from buffer_rl.plugins import PluginRegistry

HOST = "127.0.0.1"
ROUTER_ATTEMPTS = 3


class EngineFleet:
    """Starts ``args.rollout_num_engines`` engines and, once they are ready, the router. A context manager.

    Entering starts the engines without waiting; ``wait_ready`` waits for them and starts the router. Leaving stops
    everything, whatever happened. Logs are in ``run_dir/logs``. With ``args.router_url`` set, the fleet is somebody
    else's: nothing is started, checked or stopped.

    launcher: a registry that ``args.rollout_engine`` is resolved in, or the launcher itself.
    """

    def __init__(self, args: Any, run_dir: str, launcher: PluginRegistry | EngineLauncher) -> None:
        self._args = args
        self._logs = Path(run_dir, "logs")
        self._external = args.router_url is not None
        if self._external and not args.engine_urls:
            raise ConfigError(
                "--router-url needs the engines behind it as well",
                where="--engine-urls",
                hint="pause, abort and weight updates go to the engines directly",
            )
        self._launch: EngineLauncher
        if isinstance(launcher, PluginRegistry):
            self._launch = launcher.resolve("engine", args.rollout_engine)
        else:
            self._launch = launcher
        self._engines: list[EngineProcess] = []
        self._router: ChildProcess | None = None
        self._router_url = ""

    def __enter__(self) -> EngineFleet:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def router_url(self) -> str:
        """Where generation requests go. Raises EngineError before ``wait_ready``."""
        url = self._args.router_url if self._external else self._router_url
        if not url:
            raise EngineError("the router is not running yet", hint="call wait_ready first")
        return str(url)

    @property
    def engine_urls(self) -> list[str]:
        """Where control calls go."""
        return list(self._args.engine_urls) if self._external else [engine.url for engine in self._engines]

    def start(self) -> None:
        """Start the engines without waiting for them. If one cannot be started, the others are stopped."""
        if self._external or self._engines:
            return
        try:
            for index in range(self._args.rollout_num_engines):
                log = str((self._logs / f"engine_{index}.log").absolute())
                self._engines.append(self._launch(self._args, index, log))
        except BaseException:
            self.stop()
            raise

    def wait_ready(self) -> None:
        """Wait for all engines, then start the router and wait for it, within ``args.engine_start_timeout_s``.

        Raises EngineError with the end of the log if a process ends first, DeadlineError when time is up;
        everything is stopped then.
        """
        if self._external:
            return
        deadline = time.monotonic() + self._args.engine_start_timeout_s
        try:
            for engine in self._engines:
                engine.wait_ready(max(deadline - time.monotonic(), 0.0))
            if self._router is None:
                self._start_router(deadline)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises EngineError naming a process that has ended. Engines of launchers without ``check`` are skipped."""
        for child in (*self._engines, self._router):
            probe: Callable[[], None] | None = getattr(child, "check", None)
            if probe is not None:
                probe()

    def stop(self) -> None:
        """End the router and all engines; returns when they are gone. May be called twice."""
        children = [child for child in (self._router, *self._engines) if child is not None]
        self._router, self._engines, self._router_url = None, [], ""
        failures = []
        for child in children:
            try:
                child.stop()
            except Exception as error:  # fault boundary: one process that resists must not keep the others alive
                failures.append(f"{type(error).__name__}: {error}")
        if failures:
            raise EngineError(f"some processes could not be stopped: {'; '.join(failures)}")

    # ------------------------------------------------------------------ router

    def _start_router(self, deadline: float) -> None:
        """The router takes no inherited socket, so another process may take its port first: try again then."""
        for attempt in range(ROUTER_ATTEMPTS):
            port, metrics_port = free_ports(2)
            url = f"http://{HOST}:{port}"
            log = str((self._logs / "router.log").absolute())
            process = ChildProcess("sglang-router", self._router_command(port, metrics_port), log)
            try:
                wait_until_ready(f"{url}/readiness", process, max(deadline - time.monotonic(), 0.0))
                process.check()
            except DeadlineError:
                process.stop()
                raise
            except EngineError:
                process.stop()
                if attempt + 1 < ROUTER_ATTEMPTS and "in use" in process.log_tail():
                    continue
                raise
            except BaseException:
                process.stop()
                raise
            self._router, self._router_url = process, url
            return

    def _router_command(self, port: int, metrics_port: int) -> list[str]:
        """The policy ``manual`` sends equal routing keys to one engine, so that the samples of a prompt share its
        prefill; a new key goes to the engine with the fewest requests. Retries and the circuit breaker are off: the
        client retries by ``rid``, and a bad request (400) must not count against an engine."""
        return [
            sys.executable,
            "-m",
            "buffer_rl.engine.router_process",
            *("--host", HOST, "--port", str(port)),
            *("--worker-urls", *self.engine_urls),
            *("--policy", "manual", "--assignment-mode", "min_load"),
            "--disable-retries",
            "--disable-circuit-breaker",
            *("--worker-startup-check-interval", "1"),
            *("--health-check-interval-secs", "5", "--health-check-timeout-secs", "20"),
            *("--request-timeout-secs", str(max(int(self._args.generate_timeout_s) + 60, 60))),
            *("--shutdown-grace-period-secs", "1"),
            *("--prometheus-host", HOST, "--prometheus-port", str(metrics_port)),
            *("--log-level", "warn"),
        ]


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback interface that nobody listens on now."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    try:
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
