"""What engine launchers and weight transports receive and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from buffer_rl.kinds.kind import PluginKind


class EngineProcess(Protocol):
    """A rollout engine that was started: a server that speaks SGLang's HTTP protocol at ``url``.

    ``check`` raises EngineError once the server has ended. It is called several times a second, and waits for nothing.
    A server that hangs is found by its silence: ``GET /server_info`` must be answered by what decodes. For
    ``--offload-rollout`` it has ``/release_memory_occupation`` and ``/resume_memory_occupation``, with tags."""

    @property
    def url(self) -> str: ...
    def wait_ready(self, timeout_s: float) -> None: ...
    def check(self) -> None: ...
    def stop(self) -> None: ...


class EngineLauncher(Protocol):
    """Starts one rollout engine, without waiting for it. Called on its node, in a process whose environment names its
    devices: the server listens on a free port of ``args.engine_host`` and ends with that process, as a child does that
    ``buffer_rl.cluster.process.ChildProcess`` starts; ``ServerProcess`` there finds the port of a server that cannot
    inherit a socket.

    The launcher may have ``deterministic``, true if under ``args.deterministic`` an answer depends on the request and
    its ``sampling_seed`` alone, and ``check(args)``, which is called before anything starts and raises ConfigError for
    options that its engines cannot serve."""

    def __call__(self, args: Any, index: int, log_path: str) -> EngineProcess: ...


class RouterProcess(EngineProcess, Protocol):
    """The router that was started: it forwards ``POST /generate`` at ``url`` to one of the engines that it lists,
    unchanged, and its answer. Requests with equal ``X-SMG-Routing-Key`` should reach one engine. ``GET /workers``
    answers ``{"workers": [{"url"}]}``; without an engine, ``/generate`` is answered as sglang-router or smg do.

    ``add`` returns once the engines, which answer, get requests, and calls ``check`` meanwhile; ``remove`` once ``url``
    gets no new ones, while those that run go on. Both raise EngineError and DeadlineError."""

    def add(self, *urls: str, timeout_s: float = ..., check: Callable[[], None] | None = None) -> None: ...
    def remove(self, url: str) -> None: ...


class RouterLauncher(Protocol):
    """Starts the router of a run, without waiting for it, on a free port of ``args.engine_host``; it ends with this
    process, and asks for ``args.engine_api_key``, as the engines do.

    The launcher may have ``passes_fields``, true if a field of ``/generate`` that it does not know reaches the engine,
    and ``check(args)``, which is called before anything starts and raises ConfigError."""

    def __call__(self, args: Any, log_path: str) -> RouterProcess: ...


class WeightTransport(Protocol):
    """Brings the weights from the trainer to the engines, version by version. Constructed as ``cls(args)``.

    sender: its side in the trainer, a class constructed as ``sender(args, topology)`` in each rank of the actor. Its
    methods get ``Trainer.export()``, which all ranks iterate to the end or none does, and the arguments of ``start``.
    staged: ``publish`` runs within one ``begin_weight_update`` and ``end_weight_update`` of the engines.
    It may have ``keeps_requests``, true if running requests end with the weights that they began with: nothing is
    retracted then, and no cache is flushed. And ``sent_share``: which part of a whole version's bytes the newest one
    took, None if unknown.
    It may also be one that ``Releases``, and one that ``Stages``.
    """

    sender: type[Any]
    staged: bool

    def connect(self, trainer: Any, engines: Any) -> None:
        """Fix what is sent to whom; idempotent. Called first, before each retry, and when engines joined or left.

        trainer: ``start(Sender.method, *arguments)`` calls every rank's sender; the ``wait()`` of what it returns has
        the answers in rank order; ``send`` does both. engines: ``buffer_rl.engines.control.EngineControlClient``, whose
        calls, ``post(path, body)`` for those of other servers, wait for all engines: start the trainer's side of an
        exchange first."""

    def prepare(self, version: int) -> None:
        """Copy the version to where the engines can take it, while they still generate. Once for all retries."""

    def publish(self, version: int) -> None:
        """Have the engines, which are paused, take it. Raises EngineError if one refuses: it is called again then."""

    def close(self) -> None:
        """Free everything: the run ends, or a publication failed for good. May be called twice."""


class Releases(Protocol):
    """A weight transport that keeps something of a version until all engines have it."""

    def release(self, version: int) -> None:
        """All engines that go on have the version: free what it took."""


class Stages(Protocol):
    """A weight transport whose engines prepare a version while they generate, if all of them can
    (``ServerInfo.prepares_weights``): their pause is a swap. In a retry, and where an engine joined meanwhile,
    ``publish`` is called in the pause instead."""

    def stage(self, version: int) -> None:
        """Have the engines, which generate, receive and prepare the version; after ``prepare``. Raises EngineError if
        one refuses."""

    def swap(self, version: int) -> None:
        """Have the engines, which are paused, serve what they prepared."""


KINDS = (
    PluginKind(
        name="engine",
        flags=("--rollout-engine",),
        protocol=EngineLauncher,
        signature="(args, index, log_path) -> EngineProcess",
    ),
    PluginKind(
        name="router", flags=("--router",), protocol=RouterLauncher, signature="(args, log_path) -> RouterProcess"
    ),
    PluginKind(
        name="weight_transport",
        flags=("--weight-sync-mode",),
        protocol=WeightTransport,
        signature="class (args) with sender, staged, connect, prepare, publish, close",
        attributes=("sender",),
        changed=dict.fromkeys(
            ("load", "cleanup"),
            "a weight transport has two sides now: connect(trainer, engines), prepare(version), publish(version) and "
            "close() in the driver, and a class `sender` in each rank of the trainer; see docs/scale.md",
        ),
        constructed=("args",),
    ),
)
