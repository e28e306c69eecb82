"""Engines on the nodes of a cluster: an actor starts each server as its child, on the node and the devices that Ray
gives it, so that the server ends with it.

Who waits for whom: the actor waits for its server in a thread of its own, and answers ``check`` meanwhile. The driver
waits for the actor in ``wait_ready`` and ``stop``, with deadlines. ``check``, which the driver and publications call
again and again, waits for nothing: it looks at the answer to the question before, and at whether the server's port
still takes connections where that answer is late. Ray takes seconds to say that a node is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray

from buffer_rl.args import Args
from buffer_rl.cluster.calling import name_failure
from buffer_rl.cluster.devices import Node
from buffer_rl.cluster.environment import direct_variables, set_variables
from buffer_rl.cluster.locality import require_local_engines
from buffer_rl.cluster.placement import Placement, is_node_gone
from buffer_rl.cluster.process import STOP_TIMEOUT_S, refuses_connections, starts_engines
from buffer_rl.engines.fleet import named_launcher
from buffer_rl.errors import BufferRLError, DeadlineError, EngineError, WorkerDiedError
from buffer_rl.kinds.engine import EngineLauncher, EngineProcess
from buffer_rl.options.section import dump_args, load_args
from buffer_rl.plan.counts import ENGINE
from buffer_rl.plugin.registry import PluginRegistry

T = TypeVar("T")

THREADS = 4
ROOM_NOTICE_S = 20.0
"""An engine that has no node after this long is waiting for room: a worker process starts sooner."""
ROOM_POLL_S = 1.0
MAX_DEATHS = 2
"""Of actors before they ran, as their node died just then."""
LATE_S = 0.3
"""An actor that is alive answers ``check`` sooner."""
ANSWER_S = 2.0
"""What an actor may take longer than the wait that it was asked for."""


class EngineHost:
    """The actor of one engine. Its launcher is what ``--rollout-engine`` names in this process, and gets the options
    of ``at_this_node``. Errors say which node they are from."""

    def __init__(self, args_text: str, index: int, log_path: str) -> None:
        self._args = load_args(args_text)
        self._index = index
        self._log_path = log_path
        self._address = cast("Any", ray.util).get_node_ip_address()
        self._engine: EngineProcess | None = None

    def node(self) -> tuple[str, str]:
        """The address of this node, and Ray's id of it."""
        return self._address, ray.get_runtime_context().get_node_id()

    def start(self) -> None:
        """Start the server without waiting for it."""
        with self._named():
            reference = self._args.rollout_engine
            found = PluginRegistry.from_flags(self._args.plugin).resolve("engine", reference)
            args = at_this_node(self._args)
            set_variables(direct_variables(args))  # which its server inherits
            self._engine = named_launcher(found, reference)(args, self._index, self._log_path)

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until the server answers. Returns its URL."""
        assert self._engine is not None  # the driver waits for ``start``
        with self._named():
            self._engine.wait_ready(timeout_s)
            return self._engine.url

    def check(self) -> None:
        """Raises the engine's error if it has ended."""
        if self._engine is not None:
            with self._named():
                self._engine.check()

    def stop(self) -> None:
        """End the server; returns when it is gone."""
        if self._engine is not None:
            self._engine.stop()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BufferRLError as error:
            error.where = f"{error.where or f'engine {self._index}'} on node {self._address}"
            raise


class PlacedEngine:
    """An engine behind its actor, as the driver sees it; meets ``buffer_rl.kinds.engine.EngineProcess``.

    It is on its node of ``placement``; where Ray has found that one gone, on any that has the devices.
    notice: called with a line while no node has room for it. url: without a trailing slash; empty before ``wait_ready``
    has returned.
    """

    def __init__(
        self, args: Args, index: int, log_path: str, placement: Placement, notice: Callable[[str], None] | None
    ) -> None:
        self._name = f"engine {index}"
        self._log_path = log_path
        self._notice = notice
        self._weight_sync_mode = args.weight_sync_mode
        self.url = ""
        self._host_args = dump_args(args), index, log_path
        self._options = placement.options(ENGINE, index)
        self._planned: Node | None = placement.node_of(ENGINE, index)
        self._lock = threading.Lock()
        self._ended = False
        self._probe: Future[None] | None = None
        self._silent_since: float | None = None
        self._place()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the engine answers. Raises EngineError if it ends first or cannot be started, DeadlineError if no
        node has room for it, or it does not answer, within ``timeout_s`` seconds, and ConfigError if the weights are to
        go through the memory of another machine."""
        deadline = time.monotonic() + timeout_s
        self._wait_for_room(timeout_s)
        self._result(self._started, deadline - time.monotonic() + ANSWER_S)
        left = max(deadline - time.monotonic(), 0.0)
        url = self._result(self._actor.wait_ready.remote(left).future(), left + ANSWER_S)
        require_local_engines(self._weight_sync_mode, [url])
        self.url = url

    def check(self) -> None:
        """Raises EngineError if the engine has ended, with the end of its log where its node still answers. Never waits
        longer than ``CONNECT_TIMEOUT_S``."""
        with self._lock:
            if self._started.done():
                self._result(self._started)
            if self._probe is not None and self._probe.done():
                if not isinstance(self._probe.exception(), ray.exceptions.ActorUnavailableError):
                    self._result(self._probe)  # an error stays: this answer is looked at again
                    self._silent_since = None
                self._probe = None
            if self._probe is None:
                self._probe = self._actor.check.remote().future()
                self._silent_since = self._silent_since or time.monotonic()
        if self._is_late() and self.url and refuses_connections(self.url):
            what = f"{self._name} is gone: nothing listens at {self.url}, and its process does not answer"
            raise EngineError(what, where=self._where(), hint="its node may be gone; else its log is there")

    def stop(self) -> None:
        """End the server and its actor. An actor that does not answer is not waited for: Ray ends it, and its server
        with it, once its node can be reached."""
        with self._lock:
            self._ended = True
        if self._node.done() and not self._is_late():
            with contextlib.suppress(Exception):  # fault boundary: the actor, or Ray itself, may be gone
                self._actor.stop.remote().future().result(2 * STOP_TIMEOUT_S)
        with contextlib.suppress(Exception):  # as above
            ray.kill(self._actor, no_restart=True)

    def _place(self) -> None:
        """Start the actor: at once if a node has room, else as soon as one has."""
        if self._planned is None or self._may_move():
            self._planned = None
            self._options = {**self._options, "scheduling_strategy": "SPREAD"}
        remote = cast("Any", ray.remote)(max_restarts=0, max_concurrency=THREADS)(EngineHost)
        self._actor = remote.options(**self._options).remote(*self._host_args)
        self._node: Future[tuple[str, str]] = self._actor.node.remote().future()
        self._started: Future[None] = self._actor.start.remote().future()
        self._probe = self._silent_since = None

    def _may_move(self) -> bool:
        """Whether the planned node is gone, and another one could have the devices; those that are shared with other
        roles are on that node alone."""
        has_own = bool(self._options.get("num_gpus") or self._options.get("num_cpus"))
        return has_own and self._planned is not None and is_node_gone(self._planned.node_id)

    def _place_again(self) -> None:
        with self._lock:
            ray.kill(self._actor, no_restart=True)
            if self._ended:
                raise EngineError(f"{self._name} was stopped", where=self._where())
            self._place()

    def _wait_for_room(self, timeout_s: float) -> None:
        """Return once the actor runs. Places it elsewhere where its node died meanwhile."""
        started, noticed, deaths = time.monotonic(), False, 0
        while True:
            placed = wait([self._node], min(ROOM_POLL_S, timeout_s)).done
            died = bool(placed) and isinstance(self._node.exception(), ray.exceptions.RayActorError)
            deaths += died
            if placed and (not died or deaths > MAX_DEATHS):
                self._result(self._node)
                return
            if died or self._may_move():
                self._place_again()
            waited = time.monotonic() - started
            if waited >= timeout_s:
                what = f"no node had room for {self._name} within {timeout_s:g} s"
                hint = "`ray status` says what its nodes have; add nodes, or lower --rollout-num-engines"
                raise DeadlineError(what, where=f"the cluster, asked for {self._asks()}", hint=hint)
            if waited >= ROOM_NOTICE_S and not noticed and self._notice is not None:
                self._notice(f"{self._name} waits for a node that has room for it ({self._asks()})")
                noticed = True

    def _asks(self) -> str:
        """What Ray was asked for, in words."""
        counts = {"GPU": self._options.get("num_gpus"), "CPU": self._options.get("num_cpus")}
        devices = [f"{count:g} {name}" for name, count in counts.items() if count]
        where = f"the node {self._planned.address}" if self._planned is not None else "any node"
        return f"{' and '.join(devices) or 'no devices'} on {where}"

    def _result(self, answer: Future[T], timeout_s: float = 0.0) -> T:
        if not wait([answer], timeout_s).done:
            raise DeadlineError(f"{self._name}: no answer from its process", where=self._where())
        error = answer.exception()
        if error is None:
            return answer.result()
        named = name_failure(self._name, error)
        if isinstance(named, EngineError | DeadlineError):
            raise named
        if isinstance(named, WorkerDiedError):
            gone = is_node_gone(self._place_of()[1])
            what = f"{self._name}: {'its node is gone' if gone else 'its process was killed'}; {named.what}"
            raise EngineError(what, where=self._where(), hint="its log is a file of that node") from error
        raise EngineError(named.what, where=self._where(), expected=named.expected, hint=named.hint) from error

    def _is_late(self) -> bool:
        since, asked = self._silent_since, self._probe
        return since is not None and time.monotonic() - since > LATE_S and (asked is None or not asked.done())

    def _place_of(self) -> tuple[str, str]:
        """Address and id of its node; empty before it has one."""
        known = self._node.done() and self._node.exception() is None
        return self._node.result() if known else ("", "")

    def _where(self) -> str:
        address, _ = self._place_of()
        return f"{self._log_path} on node {address}" if address else self._name


def places_engines(args: Args) -> bool:
    """Whether Ray places the engines of a run: on the nodes of a cluster that it joins, or on the GPUs of this machine.
    Else they are children of the driver's process, and load while Ray starts."""
    if not starts_engines(args):
        return False
    on_cpu = args.engine_device == "cpu"
    return args.ray_address is not None or (not on_cpu and any(Path("/dev").glob("nvidia[0-9]*")))


def at_this_node(args: Args) -> Any:
    """``args`` with the address of this node as Ray knows it, which other nodes reach, for engines and the router;
    without ``--ray-address`` what ``--engine-host`` says."""
    if args.ray_address is None:
        return args
    return args.model_copy(update={"engine_host": cast("Any", ray.util).get_node_ip_address()})


def placed_launcher(placement: Placement, notice: Callable[[str], None] | None = None) -> EngineLauncher:
    """Launches engines as actors of the cluster that this process has joined, on the nodes and devices of
    ``placement``.

    notice: called with a line, from any thread, while no node has room for an engine."""
    return partial(PlacedEngine, placement=placement, notice=notice)
