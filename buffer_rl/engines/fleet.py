"""The engines of a run and the router in front of them: started together, watched, replaced, always stopped.

Who waits for whom: the caller waits for the engines of the start. What happens to them later is the supervisor's, whose
threads no caller waits for; ``check`` says where it is at its end.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, cast

from buffer_rl.args import Args
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.registry import EngineEvent, EngineRegistry, EngineState, Replica
from buffer_rl.engines.supervisor import Heartbeat, Supervisor
from buffer_rl.errors import ConfigError, DeadlineError, EngineError, WorkerDiedError
from buffer_rl.kinds.engine import EngineLauncher, EngineProcess, RouterLauncher, RouterProcess
from buffer_rl.plugin.calls import Guarded, call, in_thread, returned
from buffer_rl.plugin.registry import PluginRegistry

_REQUIRED = ("wait_ready", "check", "stop")
_OF_ROUTER = (*_REQUIRED, "add", "remove")


class EngineFleet:
    """Starts ``args.rollout_num_engines`` engines and the router. A context manager.

    Entering starts them without waiting; ``wait_ready`` waits for them and adds the engines to the router's list. From
    then on engines that die or hang are replaced. Leaving stops everything, whatever happened. Logs are in the folder
    ``run_dir/logs``.

    With ``args.router_url`` set, the fleet is external: nothing is started, checked or stopped.
    ``args.engine_api_key`` is what engines and router ask for (see ``with_engine_key``); None: they ask for none.

    router: what the fleet has started; None before ``start``, and for an external fleet.
    launcher: a registry that ``args.rollout_engine`` is resolved in, or the launcher itself. notice: called with one
    line, from any thread, when an engine is lost or replaced.
    """

    def __init__(
        self,
        args: Args,
        run_dir: str,
        launcher: PluginRegistry | EngineLauncher,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._args = args
        self._logs = Path(run_dir, "logs")
        self._external = args.router_url is not None
        if self._external and not args.engine_urls:
            hint = "pause, abort and weight updates go to the engines directly"
            raise ConfigError("--router-url needs the engines behind it as well", where="--engine-urls", hint=hint)
        if isinstance(launcher, PluginRegistry):
            launcher = named_launcher(launcher.resolve("engine", args.rollout_engine), args.rollout_engine)
        self._launch: EngineLauncher = launcher
        self._notice = notice
        self._registry = EngineRegistry.of_urls(args.engine_urls) if self._external else EngineRegistry()
        self.router: RouterProcess | None = None
        self._heartbeat: Heartbeat | None = None
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> EngineFleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def addresses(self) -> dict[str, Any]:
        """What options of clients say: with own engines the router alone, which lists those of the moment."""
        return {"router_url": self.router_url, "engine_urls": self.engine_urls if self._external else []}

    @property
    def router_url(self) -> str:
        """Where generation requests go. Waits for the router to answer, which takes less time than engines do. Raises
        EngineError where it is not started, and as ``Router.wait_ready``."""
        if self._external:
            return str(self._args.router_url)
        if self.router is None:
            raise EngineError("the router is not running yet", hint="call start first")
        self.router.wait_ready(self._args.engine_start_timeout_s)
        return self.router.url

    @property
    def engines(self) -> list[EngineProcess]:
        """The engines that belong to the fleet now, replacements that do not serve yet included."""
        return [replica.engine for replica in self._registry.all()]

    @property
    def engine_urls(self) -> list[str]:
        """Where control calls go now."""
        return [engine.url for engine in self.engines]

    def control(self, timeout_s: float) -> EngineControlClient:
        """The control calls to the engines that there are at each call. timeout_s: deadline of one call."""
        start_timeout_s, key = self._args.engine_start_timeout_s, self._args.engine_api_key
        return EngineControlClient(self._registry, timeout_s=timeout_s, start_timeout_s=start_timeout_s, api_key=key)

    def start(self) -> None:
        """Start the engines and the router without waiting for them. If one cannot be started, all are stopped."""
        if self._registry.all():
            return
        try:
            for index in range(self._args.rollout_num_engines):
                engine = self._start_one(index, f"engine_{index}.log")
                self._registry.add(Replica(index=index, engine=engine, on_change=self._changed))
            self.router = self._start_router()
        except BaseException:
            self.stop()
            raise

    def wait_ready(self) -> None:
        """Wait for all engines and the router, within ``args.engine_start_timeout_s``, and have it list the engines.

        Raises EngineError with the end of the log if a process ends first, DeadlineError when time is up;
        everything is stopped then.
        """
        if self.router is None or self._heartbeat is not None:  # an external fleet has no router of its own
            return
        deadline = time.monotonic() + self._args.engine_start_timeout_s
        try:
            _wait_for_all([*self.engines, self.router], deadline)
            self.router.check()  # it may have ended while the engines loaded
            left = max(deadline - time.monotonic(), 0.0)
            self.router.add(*self.engine_urls, timeout_s=left, check=self._check_engines)
            for replica in self._registry.all():
                replica.note(EngineEvent.HAS_WEIGHTS)
            args, registry = self._args, self._registry
            self._supervisor = Supervisor(args, registry, self.router, self._start_one, self._say)
            self._supervisor.start()
            self._heartbeat = Heartbeat(registry, args.rollout_health_check_timeout, args.engine_api_key)
            self._heartbeat.start()
        except BaseException:
            self.stop()
            raise

    def _check_engines(self) -> None:
        for engine in self.engines:
            engine.check()

    def check(self) -> None:
        """Raises WorkerDiedError, with the end of the log, if the router has ended; EngineError if no engine is left
        and none will come, as ``args.engine_max_restarts`` were started in the place of others."""
        if self.router is not None:
            try:
                self.router.check()
            except EngineError as error:
                raise WorkerDiedError(error.what, where=f"router, {error.where}", hint=error.hint) from error
        if self._registry.over is not None:
            raise self._registry.over

    def starved_version(self) -> int | None:
        """The version that was published last, if all engines that are left wait for weights: then it is to be
        published again, or a newer one. See ``EngineRegistry.starved_version``."""
        return self._registry.starved_version()

    def stop(self) -> None:
        """End the router and all engines; returns when they are gone. May be called twice."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.stop()
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        replicas, router, self.router = self._registry.clear(), self.router, None
        failures = []
        stops = [replica.engine.stop for replica in replicas]
        for stop in [router.stop, *stops] if router is not None else stops:
            try:
                stop()
            except Exception as error:  # fault boundary: one process that resists must not keep the others alive
                failures.append(f"{type(error).__name__}: {error}")
        if supervisor is not None:
            supervisor.join()  # its engines are gone, so it has nothing left to wait for
        if failures:
            raise EngineError(f"some processes could not be stopped: {'; '.join(failures)}")

    def _start_router(self) -> RouterProcess:
        reference = self._args.router
        launch: RouterLauncher = PluginRegistry.from_flags(self._args.plugin).resolve("router", reference)
        log_path = self._log_path("router.log")
        started: Any = call("router", reference, launch, self._args, log_path, at="start", error_class=EngineError)
        expected = "an object with url, wait_ready(timeout_s), check(), stop(), add(*urls) and remove(url)"
        return cast("RouterProcess", _guarded("router", reference, started, _OF_ROUTER, expected, at="start"))

    def _start_one(self, index: int, log_name: str) -> EngineProcess:
        return self._launch(self._args, index, self._log_path(log_name))

    def _log_path(self, name: str) -> str:
        return str((self._logs / name).absolute())

    def _changed(self, replica: Replica, before: EngineState, why: str) -> None:
        """Note a transition of ``replica`` from ``before``."""
        self._log(f"engine {replica.index}: {before} -> {replica.state}{f' ({why})' if why else ''}")
        if replica.state is EngineState.WAITING:
            self._say(f"engine {replica.index} is up again and waits for the next weights")

    def _log(self, line: str) -> None:
        """Write ``line`` to the fleet's log. A full disk ends no thread that watches engines."""
        with contextlib.suppress(OSError):
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / "fleet.log").open("a", encoding="utf-8", errors="backslashreplace") as log:
                print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=log)

    def _say(self, line: str) -> None:
        """Write ``line`` to the fleet's log and pass it to ``notice``."""
        self._log(line)
        if self._notice is not None:
            self._notice(line)


def _wait_for_all(servers: Sequence[EngineProcess], deadline: float) -> None:
    """Return once all are ready. Raises the error of the first that fails, while others still load; where time is up,
    that of the first in their order."""

    def wait(server: EngineProcess) -> None:
        server.wait_ready(max(deadline - time.monotonic(), 0.0))

    answers = [in_thread(f"start-{place}", wait, server)[0] for place, server in enumerate(servers)]
    for answer in as_completed(answers):
        if not isinstance(answer.exception(), DeadlineError):
            answer.result()
    for answer in answers:
        answer.result()


def named_launcher(launcher: EngineLauncher, reference: str) -> EngineLauncher:
    """``launcher``, which may be the user's: its failures and those of its engines name ``reference``.

    Raises EngineError if it raises, PluginError if what it returns is no ``EngineProcess``.
    """

    def launch(args: Args, index: int, log_path: str) -> EngineProcess:
        at = f"engine {index}"
        engine: Any = call("engine", reference, launcher, args, index, log_path, at=at, error_class=EngineError)
        expected = "an object with url, wait_ready(timeout_s), check() and stop()"
        return cast("EngineProcess", _guarded("engine", reference, engine, _REQUIRED, expected, at=at))

    return launch


def _guarded(kind: str, reference: str, server: Any, methods: tuple[str, ...], expected: str, *, at: str) -> Guarded:
    """``server``, which a launcher returned, with failures of ``methods`` that name ``reference``. Raises PluginError
    if it is none."""
    # The address may not be known before the server is ready: only whether there will be one is asked.
    has_url = hasattr(type(server), "url") or "url" in getattr(server, "__dict__", {})
    if not has_url or inspect.isawaitable(server) or not all(callable(getattr(server, m, None)) for m in methods):
        raise returned(kind, reference, server, expected, at=at)
    return Guarded(kind, reference, server, EngineError, methods)
