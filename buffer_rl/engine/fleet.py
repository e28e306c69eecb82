"""The engines of a run and the router in front of them: started together, watched, replaced, always stopped.

Who waits for whom: no caller waits for a replacement. It starts in the background, brings itself to the newest weights
where they are on disk, else it waits for the next publication, and only then the router sends it requests.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from buffer_rl.contracts import EngineLauncher, EngineProcess
from buffer_rl.engine.control import EngineControlClient
from buffer_rl.engine.registry import EngineRegistry, FleetControl, Heartbeat, Replica, ReplicaState, no_engine_left
from buffer_rl.engine.router import Router
from buffer_rl.errors import BufferRLError, ConfigError, DeadlineError, EngineError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import Guarded, call, returned

JOIN_TIMEOUT_S = 5.0
_REQUIRED = ("wait_ready", "stop")


class EngineFleet:
    """Starts ``args.rollout_num_engines`` engines and, once they are ready, the router. A context manager.

    Entering starts the engines without waiting; ``wait_ready`` waits for them and starts the router. ``check``, called
    again and again, replaces engines that died. Leaving stops everything, whatever happened. Logs are in the folder
    ``run_dir/logs``.

    With ``args.router_url`` set, the fleet is external: nothing is started, checked or stopped.
    ``args.engine_api_key`` is what engines and router ask for (see ``with_engine_key``); None: they ask for none.

    launcher: a registry that ``args.rollout_engine`` is resolved in, or the launcher itself. notice: called with one
    line, from any thread, when an engine is lost or replaced.
    """

    def __init__(
        self,
        args: Any,
        run_dir: str,
        launcher: PluginRegistry | EngineLauncher,
        notice: Callable[[str], None] | None = None,
    ) -> None:
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
            self._launch = named_launcher(launcher.resolve("engine", args.rollout_engine), args.rollout_engine)
        else:
            self._launch = launcher
        self._notice = notice
        self._registry = EngineRegistry()
        self._restarts = 0
        self._last_death: BufferRLError | None = None
        self._router: Router | None = None
        self._listed_dead: list[str] = []
        self._heartbeat: Heartbeat | None = None

    def __enter__(self) -> EngineFleet:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def addresses(self) -> dict[str, Any]:
        """What options of clients say: with own engines the router alone, which lists those of the moment."""
        return {"router_url": self.router_url, "engine_urls": self.engine_urls if self._external else []}

    @property
    def router_url(self) -> str:
        """Where generation requests go. Raises EngineError before ``wait_ready``."""
        if self._external:
            return str(self._args.router_url)
        if self._router is None:
            raise EngineError("the router is not running yet", hint="call wait_ready first")
        return self._router.url

    @property
    def router(self) -> Router | None:
        """The router that the fleet started; None before ``wait_ready`` and for an external fleet."""
        return self._router

    @property
    def engines(self) -> list[EngineProcess]:
        """The engines that belong to the fleet now, replacements that do not serve yet included."""
        return [replica.engine for replica in self._registry.all()]

    @property
    def engine_urls(self) -> list[str]:
        """Where control calls go now."""
        return list(self._args.engine_urls) if self._external else [replica.url for replica in self._registry.all()]

    def control(self, timeout_s: float) -> EngineControlClient:
        """The control calls to the engines that there are at each call. timeout_s: deadline of one call."""
        if self._external:
            return EngineControlClient(self._args.engine_urls, timeout_s=timeout_s, api_key=self._args.engine_api_key)
        return FleetControl(self._registry, self._admit, timeout_s=timeout_s, api_key=self._args.engine_api_key)

    def start(self) -> None:
        """Start the engines without waiting for them. If one cannot be started, the others are stopped."""
        if self._external or self._registry.all():
            return
        try:
            for index in range(self._args.rollout_num_engines):
                self._registry.add(self._launched(index, f"engine_{index}.log"))
        except BaseException:
            self.stop()
            raise

    def wait_ready(self) -> None:
        """Wait for all engines, then start the router and wait for it, within ``args.engine_start_timeout_s``.

        Raises EngineError with the end of the log if a process ends first, DeadlineError when time is up;
        everything is stopped then.
        """
        if self._external or self._router is not None:
            return
        deadline = time.monotonic() + self._args.engine_start_timeout_s
        try:
            for replica in self._registry.all():
                replica.engine.wait_ready(max(deadline - time.monotonic(), 0.0))
                replica.state = ReplicaState.SERVING
            self._router = Router(
                self.engine_urls,
                self._log_path("router.log"),
                request_timeout_s=max(int(self._args.generate_timeout_s) + 60, 60),
                deadline=deadline,
                api_key=self._args.engine_api_key,
                host=self._args.engine_host,
            )
            self._heartbeat = Heartbeat(self._registry, self._args.rollout_health_check_timeout)
            self._heartbeat.start()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Drop engines that died or hang, and start replacements, at most ``args.engine_max_restarts`` in all.

        Raises EngineError, with the end of the log, if the router has ended or no engine is left that could serve.
        Engines of launchers without ``check`` are found dead by their silence alone (``Heartbeat``).
        """
        if self._router is not None:
            self._router.check()
        for replica in self._registry.all():
            if (death := replica.error()) is not None:
                self._drop(replica, death)
                self._replace(replica.index, death)
        self._unlist_dead()
        self._require_one()

    def stop(self) -> None:
        """End the router and all engines; returns when they are gone. May be called twice."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        replicas, router, self._router = self._registry.clear(), self._router, None
        failures = []
        stops = [replica.engine.stop for replica in replicas]
        for stop in [router.stop, *stops] if router is not None else stops:
            try:
                stop()
            except Exception as error:  # fault boundary: one process that resists must not keep the others alive
                failures.append(f"{type(error).__name__}: {error}")
        for replica in replicas:
            if replica.thread is not None:
                replica.thread.join(JOIN_TIMEOUT_S)  # its engine is gone, so it has nothing left to wait for
        if failures:
            raise EngineError(f"some processes could not be stopped: {'; '.join(failures)}")

    # ------------------------------------------------------------------ loss and replacement

    def _drop(self, replica: Replica, death: BufferRLError) -> None:
        self._last_death = death
        self._registry.remove(replica)
        replica.engine.stop()  # what is left of its process group
        self._listed_dead += filter(None, [replica.url])  # one that is still placed has none

    def _unlist_dead(self) -> None:
        """Have the router send nothing more to engines that are gone. One that is too busy to answer is asked again at
        the next check: it finds out by its own health checks too, and clients try again elsewhere."""
        waiting, self._listed_dead = self._listed_dead, []
        alive = {replica.url for replica in self._registry.all()}  # a replacement may have got the same port
        for url in waiting:
            try:
                if self._router is not None and url not in alive:
                    self._router.remove(url)
            except BufferRLError as error:
                self._listed_dead.append(url)
                self._say(f"the router still lists {url}: {error}")

    def _require_one(self) -> None:
        if self._last_death is not None and not self._registry.healthy():
            raise no_engine_left(self._last_death)

    def _replace(self, index: int, death: BufferRLError) -> None:
        self._require_one()
        reason = death.what.splitlines()[0].partition("; ")[0]  # without the log
        left = len(self._registry.in_state(ReplicaState.SERVING))
        limit = self._args.engine_max_restarts
        goes_on = f"{reason} ({death.where}); the run goes on with {left} engine{'s' if left != 1 else ''}"
        if self._restarts >= limit:
            self._say(f"{goes_on}, and none is started in its place (--engine-max-restarts {limit})")
            return
        self._restarts += 1
        self._say(f"{goes_on} while another one starts in its place ({self._restarts} of at most {limit} restarts)")
        try:
            replacement = self._launched(index, f"engine_{index}_restart_{self._restarts}.log")
        except BufferRLError as error:
            self._say(f"engine {index} could not be started again: {error}")
            return
        name = f"engine-{index}-restart"
        thread = threading.Thread(target=self._bring_up, args=(replacement,), name=name, daemon=True)
        replacement.thread = thread
        self._registry.add(replacement)
        thread.start()

    def _bring_up(self, replica: Replica) -> None:
        """What a replacement's thread does; ``check`` finds the failure."""
        try:
            replica.engine.wait_ready(self._args.engine_start_timeout_s)
            self._catch_up(replica)
        except BufferRLError as error:
            replica.failure = error
        except Exception as error:  # fault boundary: launchers are plugins
            replica.failure = EngineError(f"{type(error).__name__}: {error}", where=f"engine {replica.index}")

    def _catch_up(self, replica: Replica) -> None:
        """Bring the engine to the weights of the others, or leave it for the next publication."""
        limit = self._args.update_weights_timeout_s
        replica.state = ReplicaState.LOADING
        if not self._registry.publication.acquire(timeout=limit):
            raise DeadlineError(f"a publication took longer than {limit:g} s", where=f"engine {replica.index}")
        try:
            published = self._registry.published
            if published is not None:
                if published.folder is None or not Path(published.folder).is_dir():
                    replica.state = ReplicaState.WAITING
                    self._say(f"engine {replica.index} is up again and waits for the next weights")
                    return
                key = self._args.engine_api_key
                # A publication waits ``limit`` for the lock: the engine must be done, or have failed, before.
                with EngineControlClient([replica.url], timeout_s=limit / 2, api_key=key) as control:
                    control.update_weights_from_disk(published.folder, int(published.version))
                    if (found := control.versions()[replica.url]) != published.version:
                        what = f"its weights are of version {found}"
                        raise EngineError(what, where=replica.url, expected=published.version)
            self._admit(replica)
        finally:
            self._registry.publication.release()

    def _admit(self, replica: Replica) -> None:
        """The router sends requests to ``replica`` from now on."""
        router = self._router
        if router is None or replica not in self._registry:
            return
        router.add(replica.url)
        replica.state = ReplicaState.SERVING
        if replica not in self._registry:  # it died meanwhile, and was taken off a list that it was not on yet
            router.remove(replica.url)
            return
        published = self._registry.published
        weights = f"the weights of version {published.version}" if published else "the initial weights"
        self._say(f"engine {replica.index} is back, with {weights}")

    def _launched(self, index: int, log_name: str) -> Replica:
        return Replica(index=index, engine=self._launch(self._args, index, self._log_path(log_name)))

    def _log_path(self, name: str) -> str:
        return str((self._logs / name).absolute())

    def _say(self, line: str) -> None:
        """Write ``line`` to the fleet's log and pass it to ``notice``."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / "fleet.log").open("a", encoding="utf-8") as log:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=log)
        if self._notice is not None:
            self._notice(line)


def named_launcher(launcher: EngineLauncher, reference: str) -> EngineLauncher:
    """``launcher``, which may be the user's: its failures and those of its engines name ``reference``.

    Raises EngineError if it raises, PluginError if what it returns is no ``EngineProcess``.
    """

    def launch(args: Any, index: int, log_path: str) -> EngineProcess:
        at = f"engine {index}"
        engine: Any = call("engine", reference, launcher, args, index, log_path, at=at, error_class=EngineError)
        # The address may not be known before the engine is ready: only whether there will be one is asked.
        has_url = hasattr(type(engine), "url") or "url" in getattr(engine, "__dict__", {})
        if not has_url or inspect.isawaitable(engine) or not all(callable(getattr(engine, m, None)) for m in _REQUIRED):
            raise returned("engine", reference, engine, "an object with url, wait_ready(timeout_s) and stop()", at=at)
        return cast(EngineProcess, Guarded("engine", reference, engine, EngineError, (*_REQUIRED, "check")))

    return launch
