"""The fork server of a local run: one process imports torch, transformers and Ray; the others are forked from it.

A process that is forked is there in milliseconds, shares the memory of what was imported, and runs what it would run if
it were started: the same arguments, environment, folder, file descriptors and output. The server starts with the
command, and imports while the command reads options and data. It has one thread and touches no device.

This file is also the program of small processes that must start in milliseconds, so it imports little at the top:

    fork_server.py ask SOCKET COMMAND ...    have COMMAND run by a forked process, or become it if no server answers
    fork_server.py idle PORT COMMAND ...     wait for a connection to PORT, then become COMMAND; end with the parent
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

SOCKET_VARIABLE = "BUFFER_RL_FORK_SERVER"
"""Names the socket of the fork server in the environment of a run's processes. Set to an empty text, no server is
started, and each process imports what it needs."""
FIRST_JOB, NO_JOB = "01000000", "ffffffff"
"""Ray's ids of the first job of a cluster, which a run is in its local Ray, and of a worker that has none yet."""
PROGRAM = (sys.executable, "-I", "-S", __file__)
"""The command of the small processes; without the imports of ``site``, which take longer than theirs."""
OWN = "buffer_rl."
STREAMS = (0, 1, 2)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
MAX_FDS = 16
LENGTH_BYTES = 8
REQUEST_S = 60.0
"""Deadline of a request: the server answers once it has imported what the process needs."""
WORKER = "worker"
STAGES = {
    "trial": (
        "torch",
        "transformers.models.auto.tokenization_auto",
        "transformers.tokenization_utils_tokenizers",
        "buffer_rl.verbs.reward_trial",
    ),
    "engine": (
        "torch._dynamo",  # of the next one a large part: between modules, requests are looked at
        "transformers.models.qwen3.modeling_qwen3",
        "buffer_rl.embedded.loader",
        "buffer_rl.embedded.routes",
        "buffer_rl.engines.http_server",
        "uvicorn.server",
    ),
    WORKER: (
        "ray._private.workers.setup_worker",  # what Ray's own start of a worker imports
        "buffer_rl.buffer.actor",
        "buffer_rl.rollout.worker",
        "buffer_rl.rollout.default",
        "buffer_rl.trainer.rank",
        "buffer_rl.trainer.role_worker",
        "buffer_rl.trainer.torch_trainer",
    ),
}
"""What the server imports, in this order. A process is forked once the modules of its stage are there."""


class ForkedProcess:
    """A process that the server forks, at once or when it has imported what the process needs; has what is used of
    ``subprocess.Popen``.

    Its parent is the server, which sends its id and its exit status over the connection of the request."""

    def __init__(self, connection: socket.socket, args: Sequence[str]) -> None:
        self.args = args  # as subprocess.Popen has them
        self._connection = connection
        self._lock = threading.Lock()
        self._told: list[int] = []  # its process id, then its exit status

    @property
    def pid(self) -> int:
        """Process id, once it is forked. Raises ProcessLookupError if the server ends before."""
        if (pid := self._read(0, REQUEST_S)) < 0:
            raise ProcessLookupError("the fork server has ended")
        return pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs, and before."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        return self._read(1, timeout)

    def _read(self, place: int, timeout: float | None) -> int:
        """What the server has told at ``place``. Without an answer it is gone, and with it all that it has forked."""
        with self._lock:
            while len(self._told) <= place:
                answer = b""
                with suppress(ConnectionError):
                    self._connection.settimeout(timeout)
                    try:
                        answer = self._connection.recv(LENGTH_BYTES)
                    except (TimeoutError, BlockingIOError):
                        raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
                self._told.append(int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL)
            if place:
                self._connection.close()
            return self._told[place]


def path_options() -> list[str]:
    """Options of Python for modules of this package: a ``queue.py`` in the working directory must not hide that of the
    library. Code of the user is found by the import path that these modules are sent. None if the package itself
    stands in the working directory, as in a clone that is not installed."""
    with suppress(OSError):
        if os.path.samefile(os.curdir, os.path.dirname(os.path.dirname(os.path.dirname(__file__)))):
            return []
    return ["-P"]


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process the signal ``number`` when its parent ends, even while other code hangs; elsewhere
    this does nothing.

    Linux means the parent's thread that started this process, which must live as long as the parent. parent: its
    process id, for a caller whose parent may have ended already.
    """
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)


def keep_descendants() -> None:
    """Ask Linux to make this process the parent of all that it has started and that has lost its parent, so that
    ``kill_descendants`` finds daemons too; elsewhere this does nothing."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(pid: int) -> None:
    """Stop the process ``pid``, which has called ``keep_descendants``, and send SIGKILL to all that it has started,
    also in sessions of their own. The caller kills the process itself."""
    killed: set[int] = set()
    with suppress(ProcessLookupError, PermissionError):
        if pid != os.getpid():
            os.kill(pid, signal.SIGSTOP)  # it starts nothing from now on
        while new := _descendants(pid) - killed:  # what a killed one has started meanwhile is looked for again
            for each in new:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
            killed |= new


def _end_with_descendants(*_: object) -> None:
    """For the server when its parent has ended, and could end nothing."""
    keep_descendants()
    kill_descendants(os.getpid())
    os._exit(128 + signal.SIGTERM)


def _descendants(pid: int) -> set[int]:
    """Process ids; none if the system does not tell."""
    found: set[int] = set()
    left = [pid]
    while left:
        tasks = f"/proc/{left.pop()}/task"
        with suppress(OSError):
            for task in os.listdir(tasks):
                with suppress(OSError), open(f"{tasks}/{task}/children", "rb") as file:
                    new = {int(child) for child in file.read().split()} - found
                found |= new
                left += new
    return found


@contextmanager
def fork_server(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Start a fork server for the length of the block, unless this system cannot have one, or has one already.

    Everything that it has forked ends with it, and it ends with this process."""
    with ExitStack() as stack:
        if sys.platform == "linux" and SOCKET_VARIABLE not in environ and not has_cuda():
            with suppress(OSError):  # the path is too long, or the file system has no sockets or no room
                _start_server(stack, environ)
        yield


def _start_server(stack: ExitStack, environ: Mapping[str, str]) -> None:
    """Start a server for the length of the stack. Its socket is in a folder of mode 0700, and requests wait there for
    an answer from now on."""
    from tempfile import TemporaryDirectory

    path = os.path.join(stack.enter_context(TemporaryDirectory(prefix="buffer_rl_")), "fork")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        numbers = (str(listener.fileno()), str(os.getpid()))
        server = subprocess.Popen(
            [sys.executable, *path_options(), "-m", "buffer_rl.cluster.fork_server", "serve", *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environ, **_import_variables(environ)},
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for this process
        )
    stack.callback(server.wait)
    stack.callback(server.kill)
    stack.callback(os.environ.pop, SOCKET_VARIABLE, None)
    os.environ[SOCKET_VARIABLE] = path


def has_cuda() -> bool:
    """Whether this machine has NVIDIA's driver, which a process must not have used before it is forked."""
    return os.path.exists("/dev/nvidiactl")


def _import_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that libraries read once, when they are imported. Ray's workers end when the process RAY_RAYLET_PID
    does: this one, as there is no raylet yet. OpenMP's number of threads is one for workers, unless the user set it;
    trainers and engines set theirs in torch."""
    return {
        "RAY_RAYLET_PID": str(os.getpid()),
        "RAY_JOB_ID": FIRST_JOB,
        "RAY_AUTH_MODE": environ.get("RAY_AUTH_MODE", "token"),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # see ``buffer_rl.cluster.session.isolated_ray``
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": environ.get("TOKENIZERS_PARALLELISM", "false"),
    }


def start_process(
    command: Sequence[str],
    *,
    streams: tuple[int, int],
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    stage: str = "engine",
    forked: Sequence[str] = (),
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start ``command`` in a session of its own, without input; forked, if there is a fork server, and if it is a
    Python module or ``forked`` is one. A forked process also ends with this one.

    streams: the file descriptors of its output and of its errors. forked: the arguments of Python in place of those of
    ``command``. Raises OSError if it cannot be started."""
    is_module = list(command[:2]) == [sys.executable, "-m"]
    if (path := os.environ.get(SOCKET_VARIABLE)) and (forked or is_module):
        with suppress(OSError), open(os.devnull, "rb") as nothing:
            fds = [nothing.fileno(), *streams, *pass_fds]
            numbers = [*STREAMS, *pass_fds]
            arguments = [*(forked or command[1:])]
            return ForkedProcess(_request(path, arguments, dict(env), fds, numbers, stage=stage), arguments)
    is_own = is_module and command[2].startswith(OWN)
    return subprocess.Popen(
        [command[0], *path_options(), *command[1:]] if is_own else command,
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def _request(
    path: str, arguments: Sequence[str], environment: dict[str, str], fds: Sequence[int], numbers: Sequence[int],
    *, stage: str,
) -> socket.socket:  # fmt: skip
    """Have ``arguments`` run by a forked process. Returns the connection, over which its id comes.

    numbers: what ``fds`` are there. Raises OSError if there is no server."""
    what = {"arguments": arguments, "environment": environment, "folder": os.getcwd(), "numbers": numbers}
    message = json.dumps({**what, "stage": stage}).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(REQUEST_S)
        connection.connect(path)
        socket.send_fds(connection, [len(message).to_bytes(LENGTH_BYTES, "big")], fds)
        connection.sendall(message)
        return connection
    except BaseException:
        connection.close()
        raise


def _ask(path: str, command: list[str]) -> None:
    """Have Ray's worker ``command`` run by a forked process, and end: Ray learns from the new process who it is. A
    worker with a runtime environment of its own, or of another job, is started as usual."""
    environments = [each for each in command if each.startswith("--serialized-runtime-env-context=")]
    is_plain = all(each.partition("=")[2] == "{}" for each in environments)
    if is_plain and os.environ.get("RAY_JOB_ID", NO_JOB) in (NO_JOB, FIRST_JOB):
        worker = next(position for position, each in enumerate(command) if each.endswith("default_worker.py"))
        arguments = [each for each in command[worker:] if each not in environments and each != "--language=PYTHON"]
        with suppress(OSError), _request(path, arguments, dict(os.environ), STREAMS, STREAMS, stage=WORKER) as asked:
            if asked.recv(LENGTH_BYTES):
                return
    os.execv(command[0], command)


def _idle(port: int, command: list[str]) -> None:
    parent = os.getppid()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(1.0)
        while os.getppid() == parent:
            with suppress(TimeoutError):
                listener.accept()[0].close()
                if command:
                    os.execv(command[0], command)


class _Request(NamedTuple):
    """What a client has sent: the process that it asks for, and file descriptors for it."""

    connection: socket.socket
    what: dict[str, Any]
    fds: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> _Request:
        """Read a request. Raises OSError and ValueError."""
        connection.settimeout(REQUEST_S)
        length, fds, _, _ = socket.recv_fds(connection, LENGTH_BYTES, MAX_FDS)
        with connection.makefile("rb") as file:
            return cls(connection, json.loads(file.read(int.from_bytes(length, "big"))), fds)


class _Server:
    """Imports, forks for each request, and tells how a process ended to the client that waits for it.

    A client that is gone takes its processes along, but for Ray's workers, whose clients ask and end."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._waiting: list[_Request] = []
        self._clients: dict[int, socket.socket] = {}  # by the process whose end they wait for
        self._selector = selectors.DefaultSelector()
        for readable in (listener, self._woken):
            self._selector.register(readable, selectors.EVENT_READ)

    def serve(self) -> _Request:
        """Returns in each forked process, with its request; never in this one."""
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        gc.disable()  # with it, importing takes a fourth longer
        missing = [(stage, module) for stage, modules in STAGES.items() for module in modules]
        while True:
            self._look(0.0 if missing or self._waiting else None)
            incomplete = {stage for stage, _ in missing}
            for request in [each for each in self._waiting if each.what["stage"] not in incomplete]:
                self._waiting.remove(request)
                ready, led = os.pipe()
                if (pid := os.fork()) == 0:
                    self._leave(request, ready, led)
                    return request
                os.close(led)
                os.read(ready, 1)  # until it has a session: its client may signal the group at once
                os.close(ready)
                self._watch(pid, request)
            if missing:
                with suppress(ImportError):  # the process that needs it says so
                    importlib.import_module(missing.pop(0)[1])

    def _look(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                with suppress(OSError, ValueError):
                    self._waiting.append(_Request.receive(self._listener.accept()[0]))
            elif key.fileobj is self._woken:
                self._woken.recv(MAX_FDS)
                self._report_ended()
            else:  # its client has closed the connection, or ended
                self._forget(key.data)
                kill_descendants(key.data)
                with suppress(ProcessLookupError):
                    os.killpg(key.data, signal.SIGKILL)

    def _watch(self, pid: int, request: _Request) -> None:
        for fd in request.fds:
            os.close(fd)
        with suppress(OSError):  # the client may be gone
            request.connection.sendall(pid.to_bytes(LENGTH_BYTES, "big"))
        if request.what["stage"] == WORKER:
            request.connection.close()
            return
        self._clients[pid] = request.connection
        self._selector.register(request.connection, selectors.EVENT_READ, pid)

    def _report_ended(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in self._clients:
                    self._forget(ended[0], os.waitstatus_to_exitcode(ended[1]))

    def _forget(self, pid: int, status: int | None = None) -> None:
        connection = self._clients.pop(pid)
        self._selector.unregister(connection)
        with connection, suppress(OSError):
            if status is not None:
                connection.sendall(status.to_bytes(LENGTH_BYTES, "big", signed=True))

    def _leave(self, request: _Request, *pipe: int) -> None:
        """Become a process like one that was started."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(os.getppid())
        self._selector.close()
        others = [each.connection for each in self._waiting]
        for each in (self._listener, self._wake, self._woken, request.connection, *others, *self._clients.values()):
            each.close()
        gc.freeze()  # a collection would copy every page that it looks at
        gc.enable()
        if request.what["stage"] == WORKER:
            os.setpgid(0, 0)  # Ray may end a worker by its group
        else:
            os.setsid()
        for fd in (*pipe, *(fd for waiting in self._waiting for fd in waiting.fds)):
            os.close(fd)
        _give_numbers(request.fds, request.what["numbers"])


def _give_numbers(fds: Sequence[int], numbers: Sequence[int]) -> None:
    import fcntl

    free = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]  # none is in the way of another one's number
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _become(what: dict[str, Any]) -> None:
    """Become the program that was asked for."""
    import runpy
    import warnings

    from setproctitle import setproctitle

    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forked processes draw the same numbers
    if what["stage"] != WORKER:  # Ray's workers name themselves, in their own way
        setproctitle(" ".join([sys.executable, *what["arguments"]]))  # which finds its place beside the environment
    os.environ.clear()
    os.environ.update(what["environment"])
    if "ray" in sys.modules:
        sys.modules["ray._raylet"].AuthenticationTokenLoader.instance().reset_cache()  # of the cluster that asks
    os.chdir(what["folder"])
    # Those of the server were made for the null device, in which one can seek. The buffering is as Python's own.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = list(what["arguments"])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        if not sys.argv[0].startswith(OWN):
            sys.path.insert(0, what["folder"])
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # of a module that was imported
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _main(arguments: Sequence[str]) -> None:
    action, first, *rest = arguments
    if action == "serve":
        signal.signal(signal.SIGTERM, _end_with_descendants)
        die_with_parent(int(rest[0]), signal.SIGTERM)
        _become(_Server(socket.socket(fileno=int(first))).serve().what)
    elif action == "ask":
        _ask(first, rest)
    else:
        _idle(int(first), rest)


if __name__ == "__main__":
    _main(sys.argv[1:])
