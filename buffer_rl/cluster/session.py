"""The Ray session of a run, joined if an address is given, else started on this machine and ended with the run.

A local Ray is closed to other users: a token of its own, listeners on the loopback interface alone. Ray has no public
way to either; all of its private names that this takes stand here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from buffer_rl.cluster.environment import ENDING, variables
from buffer_rl.cluster.fork_server import PROGRAM, SOCKET_VARIABLE
from buffer_rl.cluster.process import reserved_port
from buffer_rl.errors import ClusterError, ConfigError
from buffer_rl.plugin.shipping import CodeBundle, use_shipped_code

WORKING_DIRECTORY = "BUFFER_RL_WORKING_DIRECTORY"
SETUP_HOOK = "buffer_rl.cluster.session.enter_working_directory"
JOB_HOOK = "BUFFER_RL_JOB_SETUP_HOOK"
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's name of the variable with which ``ray job submit`` gives a job's runtime environment to its command."""
OVERRIDE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
"""Ray's name: at ``1``, the fields that ``ray.init`` is called with replace those of the job."""
CONNECTION_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"
"""Ray's name: how often a cluster is asked whether it is there; twenty times if not set, 40 s each."""
PACKAGES = ("working_dir", "py_modules")
"""Fields of a runtime environment whose values are addresses on the cluster that they were sent to."""
CODE_FOLDER = "buffer_rl_code"
MAX_SOCKET_PATH = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Bytes that a temporary folder may have, so that Ray's sockets below it can be bound on Linux (``unix(7)``)."""
AUTH_TOKEN = "RAY_AUTH_TOKEN"
AUTH_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN_BYTES = 32
LOOPBACK_TIMEOUT_S = 10.0
NEAR = 60
"""Characters that a message shows on both sides of one that Ray does not take."""
NO_PORT = 1
"""Where nothing listens."""
_MULTIPLE_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; "0" means one node and loopback on Linux too


def enter_working_directory() -> None:
    """Executed by each worker of a cluster that was joined: go to the driver's folder, if this node has it, and find
    the user's code that came with the run."""
    came = os.getcwd()  # Ray starts a worker in the folder that was sent to its node
    with contextlib.suppress(OSError):
        os.chdir(os.environ[WORKING_DIRECTORY])
    for folder in (came, *(os.path.join(entry, CODE_FOLDER) for entry in sys.path)):
        use_shipped_code(folder)
    if hook := os.environ.get(JOB_HOOK):
        module, _, name = hook.rpartition(".")
        getattr(importlib.import_module(module), name)()


@contextmanager
def ray_session(
    address: str | None, code: CodeBundle | None = None, object_store_bytes: int = 500_000_000
) -> Iterator[None]:
    """Connect to Ray for the length of the block, unless this process is connected already.

    What is started here listens on the loopback interface alone and asks for a token (see ``isolated_ray``); a cluster
    that is joined has its own rules.

    code: the user's files to send to the nodes of a cluster that is joined.
    object_store_bytes: of the object store that is started. A laptop's rollout is a few megabytes; Ray's default is
    30% of the memory. What does not fit is spilled to disk.
    Raises ConfigError if the machine has less memory, ClusterError if Ray does not start or the cluster at ``address``
    does not answer.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # CUDA_VISIBLE_DEVICES stays what it is
    with contextlib.ExitStack() as stack:
        if address is None:
            stack.enter_context(isolated_ray())
            stack.enter_context(short_temporary_folder())
            port = stack.enter_context(reserved_port("127.0.0.1")).getsockname()[1]
            _check_loopback(port)
        stack.callback(ray.shutdown)
        with _SignalsLater() as later, tempfile.TemporaryDirectory(prefix="buffer_rl_") as temporary:
            folder = None
            if code is not None and code.files:
                folder = Path(temporary, CODE_FOLDER)
                code.write(folder)
            with lean_node(port, later.reaching_children) if address is None else contextlib.nullcontext():
                _connect(address, folder, object_store_bytes)
        yield


@contextmanager
def isolated_ray() -> Iterator[None]:
    """For a block that starts Ray and ends it again.

    ``ray.init`` asks for a token by itself, and keeps it in the home folder, readable by others, for all clusters to
    come. Here it is new for each run, in a file of mode 0600 whose path Ray's processes find in their environment.
    A token that the caller's environment names is used instead, and ``RAY_AUTH_MODE=disabled`` is obeyed.

    Unless a flag says that there are no other machines, Ray replaces the node address 127.0.0.1 by the one that they
    reach, and its daemons listen on all interfaces.

    Raises ClusterError if the installed version of Ray lacks one of the private names.
    """
    names = ("RAY_AUTH_MODE", AUTH_TOKEN, AUTH_TOKEN_PATH, _MULTIPLE_NODES)
    own: dict[str, str | None] = {name: os.environ.get(name) for name in names}
    constants, tokens = _private("_private.ray_constants"), _private("_raylet.AuthenticationTokenLoader")
    # Read from the environment once, when ray was imported.
    multiple_nodes = _private("_private.ray_constants.ENABLE_RAY_CLUSTER")
    with tempfile.TemporaryDirectory(prefix="buffer_rl_token_") as folder:
        if own[AUTH_TOKEN] is None and own[AUTH_TOKEN_PATH] is None:
            path = Path(folder, "token")
            path.touch(0o600)
            path.write_text(secrets.token_hex(TOKEN_BYTES), encoding="ascii")
            own[AUTH_TOKEN_PATH] = str(path)
        with variables({**own, _MULTIPLE_NODES: "0"}):
            try:
                constants.ENABLE_RAY_CLUSTER = False
                tokens.instance().reset_cache()  # a process keeps the token that it read first
                yield
            finally:
                constants.ENABLE_RAY_CLUSTER = multiple_nodes
        tokens.instance().reset_cache()  # the next cluster has another one


@contextmanager
def lean_node(agent_port: int, around_start: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """For a block that starts Ray: without the processes that a run on one machine never asks for, which take seconds
    to start. Workers come from the fork server, if there is one.

    agent_port: a free port, on which the agent that sets up runtime environments starts once Ray asks for it.
    around_start: entered while a process is started. Raises ClusterError as ``isolated_ray``.
    """
    node, services = _private("_private.node"), _private("_private.services")
    whole, start = _private("_private.node.Node"), _private("_private.services.start_ray_process")
    raylet = _private("_private.ray_constants.PROCESS_TYPE_RAYLET")

    def no_dashboard(self: Any, **_: Any) -> None:
        self._webui_url = ""

    nothing = dict.fromkeys(("start_monitor", "start_log_monitor"), lambda self: None)
    lean = type("LeanNode", (whole,), {**nothing, "start_api_server": no_dashboard})

    def start_lean(command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        chosen = raylet_command(command, agent_port) if process_type == raylet else command
        with around_start():
            return start(chosen, process_type, *args, **options)

    node.Node, services.start_ray_process = lean, start_lean
    try:
        yield
    finally:
        node.Node, services.start_ray_process = whole, start


def raylet_command(command: Sequence[str], agent_port: int) -> list[str]:
    """Ray's command of its raylet with other commands in it: the agent of runtime environments is started when it is
    connected to, that of the dashboard never, and workers by the fork server, if there is one."""
    socket_path = os.environ.get(SOCKET_VARIABLE)
    ports = ("metrics-agent-port", "metrics_export_port", "dashboard_agent_listen_port")
    lean = []
    for word in command:
        flag, _, value = word.partition("=")
        if flag.lstrip("-") in ports:
            continue
        words = shlex.split(value) if flag.endswith("_command") else []
        if flag == "--dashboard_agent_command":
            words = [*PROGRAM, "idle", "0"]
        elif flag == "--runtime_env_agent_command":
            own = [f"--runtime-env-agent-port={agent_port}" if "env-agent-port" in each else each for each in words]
            words = [*PROGRAM, "idle", str(agent_port), *own]
        elif flag == "--runtime_env_agent_port":
            word = f"{flag}={agent_port}"
        elif flag == "--python_worker_command" and socket_path:
            words = [*PROGRAM, "ask", socket_path, *words]
        lean.append(f"{flag}={subprocess.list2cmdline(words)}" if words else word)
    return [*lean, *(f"--{name}={NO_PORT}" for name in ports)]  # a raylet waits for what has no port


def _private(name: str) -> Any:
    try:
        return attrgetter(name)(ray)
    except AttributeError as error:
        what = f"Ray {ray.__version__} has no ray.{name}, so a local Ray cannot be closed to other users"
        hint = "install another version of Ray, or join a running cluster with --ray-address"
        raise ClusterError(what, where="the local Ray", hint=hint) from error


def check_local_ray() -> None:
    """Raises ClusterError if the raylet or the control service of the Ray that this process has started is gone.
    Workers live on for a while, and calls would wait until their deadlines."""
    node = _private("_private.worker._global_node")
    dead = [] if node is None else [name for name, _ in node.dead_processes() if name in ("raylet", "gcs_server")]
    if dead:
        what = f"Ray cannot go on: its {' and '.join(dead)} died"
        unless = "unless a signal went to the whole process group, which ends Ray too"
        hint = f"look at the machine's memory (dmesg), {unless}; --load goes on from a checkpoint"
        raise ClusterError(what, where="the local Ray", hint=hint, see="docs/troubleshooting.md#a-process-died")


@contextmanager
def short_temporary_folder() -> Iterator[None]:
    """Let Ray reach a temporary folder with a path that is long or beyond ASCII through a short one, for the length of
    the block: sockets in it could not be bound. Everything is still written to the folder itself.

    Raises ClusterError if no short path can be made."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(folder)) <= MAX_SOCKET_PATH and folder.isascii():
        yield
        return
    try:
        short = tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp")  # mode 0700
        os.symlink(os.path.abspath(folder), link := os.path.join(short.name, "t"))
    except OSError as error:
        what = f"Ray cannot bind its sockets below {folder!r}, and a shorter path to it cannot be made: {error}"
        expected = f"a folder whose path has at most {MAX_SOCKET_PATH} bytes"
        hint, see = "export RAY_TMPDIR=/path/to/a/short/folder", "docs/troubleshooting.md#tmpdir-is-too-long"
        raise ClusterError(what, where="TMPDIR", expected=expected, hint=hint, see=see) from error
    with short, variables({"RAY_TMPDIR": link}):
        yield


def _check_loopback(port: int) -> None:
    """Ray retries for minutes, without a word, if this machine does not reach itself."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=LOOPBACK_TIMEOUT_S).close()
    except ConnectionRefusedError:  # an answer: nothing listens there yet
        return
    except OSError as error:
        what = f"this machine does not reach itself at 127.0.0.1: {error}"
        hint = "start the interface (ip link set lo up), or look at the rules of the firewall"
        raise ClusterError(what, where="the local Ray", hint=hint) from error


def worker_environment(code_folder: Path | None, job: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime environment of workers on a cluster that is joined, merged with that of the submitted job.

    Workers go to the driver's folder, since relative paths of options mean that one. Code goes into the folder that
    Ray starts a worker in, or beside it if the job has one of its own. The job's setup hook is called after ours.
    """
    ours = {WORKING_DIRECTORY: os.getcwd()}
    if hook := job.get("worker_process_setup_hook"):
        ours[JOB_HOOK] = str(hook)
    there: dict[str, Any] = {"env_vars": {**job.get("env_vars", {}), **ours}, "worker_process_setup_hook": SETUP_HOOK}
    if code_folder is not None and job.get("working_dir"):
        there["py_modules"] = [*(job.get("py_modules") or ()), str(code_folder)]
    elif code_folder is not None:
        there["working_dir"] = str(code_folder)
    return there


def job_without_packages(config: str | None) -> str | None:
    """A submitted job's configuration without the packages that only its own cluster has."""
    if config is None:
        return None
    job: dict[str, Any] = json.loads(config)
    kept = {name: value for name, value in (job.get("runtime_env") or {}).items() if name not in PACKAGES}
    return json.dumps({**job, "runtime_env": kept})


def _connect(address: str | None, code_folder: Path | None, object_store_bytes: int) -> None:
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    job = os.environ.get(JOB_CONFIG)
    try:
        if address is None:
            changes = {JOB_CONFIG: job_without_packages(job)}
            given.update(include_dashboard=False, object_store_memory=object_store_bytes, _node_ip_address="127.0.0.1")
        else:
            changes = {OVERRIDE: "1", CONNECTION_ATTEMPTS: os.environ.get(CONNECTION_ATTEMPTS, "1")}
            given["runtime_env"] = worker_environment(code_folder, json.loads(job or "{}").get("runtime_env") or {})
        with variables(changes):
            ray.init(address=address or "local", **given)
    except Exception as error:  # fault boundary: Ray raises ValueError, OSError, RuntimeError, ConnectionError ...
        if isinstance(error, ValueError) and "object_store_memory" in str(error):
            what = f"Ray does not start with an object store of {object_store_bytes / 1e9:g} GB: {error}"
            raise ConfigError(what, where="--object-store-gb", expected="a part of this machine's memory") from error
        if isinstance(error, UnicodeEncodeError):  # of a path that Python read as surrogates
            near = ascii(error.object[max(0, error.start - NEAR) : error.end + NEAR])
            hint = "rename the file or folder: the working directory, TMPDIR, or what an option names"
            raise ClusterError("Ray takes no path that is not UTF-8", where=near, hint=hint) from error
        if address is not None:
            where, what = f"--ray-address {address}", "the Ray cluster does not answer, or refuses this run"
            hint = "'ray status' shows whether it runs; its nodes need the version of Ray and Python of this machine; "
            hint += "if it asks for a token, this process needs that too (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH)"
        else:
            where, what = "the local Ray", "Ray does not start"
            hint = "look at the limits of this shell (ulimit -a), the disk of TMPDIR, /dev/shm and the interface lo; "
            hint += "RAY_TMPDIR names another folder for Ray's files, and --ray-address joins a cluster that runs"
        raise ClusterError(f"{what}: {type(error).__name__}: {error}", where=where, hint=hint) from error


class _SignalsLater:
    """A block in which signals that would end the process wait for its end; another one after the first does not, but
    for SIGTERM. While Ray starts it sets handlers of its own, one of which aborts the process at SIGTERM; and the
    process crashes if an exception interrupts it. Outside the main thread, where Python allows no handlers, nothing
    changes."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._mask: set[int] = set()
        self._noted: list[int] = []

    def __enter__(self) -> _SignalsLater:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in ENDING}
            self._handlers = {n: handler for n, handler in found.items() if handler not in (signal.SIG_IGN, None)}
            for number in self._handlers:
                signal.signal(number, self._note)
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        return self

    def __exit__(self, *_: object) -> None:
        if not self._mask and not self._handlers:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # a SIGTERM that waits comes now
        if self._noted:
            signal.raise_signal(self._noted[0])

    @contextmanager
    def reaching_children(self) -> Iterator[None]:
        """Processes that are started in the block can be ended by SIGTERM: they inherit what is blocked here."""
        if signal.SIGTERM not in self._handlers:
            yield
            return
        rays = signal.signal(signal.SIGTERM, self._note)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGTERM, rays)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            signal.signal(number, self._handlers[number])
            signal.raise_signal(number)
        self._noted.append(number)
