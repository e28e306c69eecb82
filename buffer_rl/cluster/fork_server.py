"""The fork server of a local run: one process imports torch, transformers and Ray; the others are forked from it.

A process that is forked is there in milliseconds, shares the memory of what was imported, and runs what it would run if
it were started: the same arguments, environment, folder, file descriptors and output. The server starts with the
command, and imports while the command reads options and data. It has one thread and touches no device.

This file is also the program of small processes that must start in milliseconds, so it imports little at the top:

    fork_server.py ask SOCKET COMMAND ...    have COMMAND run by a forked process, or become it if no server answers
    fork_server.py idle PORT COMMAND ...     wait for a connection to PORT, then become COMMAND; end with the parent
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from signal import SIGKILL
from typing import IO, Any

SOCKET_VARIABLE = "BUFFER_RL_FORK_SERVER"
"""Names the socket of the fork server in the environment of a run's processes. Set to an empty text, no server is
started, and each process imports what it needs."""
FIRST_JOB, NO_JOB = "01000000", "ffffffff"
"""Ray's ids of the first job of a cluster, which a run is in its local Ray, and of a worker that has none yet."""
PROGRAM = (sys.executable, "-I", "-S", __file__)
"""The command of the small processes; without the imports of ``site``, which take longer than theirs."""
STREAMS = (0, 1, 2)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MAX_FDS = 16
MAX_SOCKET_PATH = 107  # bytes, on Linux (unix(7))
LENGTH_BYTES = 8
REQUEST_S = 60.0
"""Deadline of a request: the server answers once it has imported what the process needs."""
STAGES = {
    "trial": (
        "torch",
        "transformers.models.auto.tokenization_auto",
        "transformers.tokenization_utils_tokenizers",
        "buffer_rl.verbs.reward_trial",
    ),
    "engine": (
        "transformers.models.qwen3.modeling_qwen3",
        "buffer_rl.embedded.loader",
        "buffer_rl.embedded.routes",
        "buffer_rl.embedded.sglang_service",
        "buffer_rl.engines.http_server",
        "uvicorn.server",
        "sglang_router.launch_router",
    ),
    "worker": (
        "ray._private.workers.setup_worker",  # what Ray's own start of a worker imports
        "buffer_rl.buffer.actor",
        "buffer_rl.rollout.worker",
        "buffer_rl.rollout.default",
        "buffer_rl.train.rank",
        "buffer_rl.train.role_worker",
        "buffer_rl.train.torch_trainer",
    ),
}
"""What the server imports, in this order. A process is forked once the modules of its stage are there."""


class ForkedProcess:
    """A process that the server forked; has what ``ChildProcess`` uses of ``subprocess.Popen``.

    Its parent is the server, which sends the exit status over the connection of the request."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        if self._status is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(LENGTH_BYTES)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            except OSError:
                answer = b""
            self._connection.close()
            # Without an answer the server is gone, and with it all that it has forked.
            self._status = int.from_bytes(answer, "big", signed=True) if answer else -SIGKILL
        return self._status


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends, even while other code hangs; elsewhere this does nothing.

    Linux means the parent's thread that started this process, which must live as long as the parent. parent: its
    process id, for a caller whose parent may have ended already.
    """
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), SIGKILL)


@contextmanager
def fork_server(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Start a fork server for the length of the block, unless this system cannot have one, or has one already.

    Everything that it has forked ends with it, and it ends with this process."""
    from tempfile import TemporaryDirectory

    if sys.platform != "linux" or SOCKET_VARIABLE in environ or has_cuda():
        yield
        return
    with TemporaryDirectory(prefix="buffer_rl_") as folder:  # mode 0700
        path = os.path.join(folder, "fork")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            yield
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)  # from here on requests wait for an answer
            numbers = (str(listener.fileno()), str(os.getpid()))
            server = subprocess.Popen(
                [sys.executable, "-m", "buffer_rl.cluster.fork_server", "serve", *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environ, **_import_variables(environ)},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for this process
            )
        os.environ[SOCKET_VARIABLE] = path
        try:
            yield
        finally:
            os.environ.pop(SOCKET_VARIABLE, None)
            server.kill()
            server.wait()


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
    command: Sequence[str], output: IO[bytes], env: dict[str, str], pass_fds: Sequence[int] = (), stage: str = "engine"
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start ``command`` in a session of its own, without input; forked if it is a Python module and there is a fork
    server. output: of both of its output streams. Raises OSError if it cannot be started."""
    if (path := os.environ.get(SOCKET_VARIABLE)) and list(command[:2]) == [sys.executable, "-m"]:
        with suppress(OSError), open(os.devnull, "rb") as nothing:
            fds = [nothing.fileno(), output.fileno(), output.fileno(), *pass_fds]
            connection, pid = _request(path, command[1:], env, fds, [*STREAMS, *pass_fds], stage=stage)
            return ForkedProcess(connection, pid)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def _request(
    path: str, arguments: Sequence[str], environment: dict[str, str], fds: Sequence[int], numbers: Sequence[int],
    *, stage: str, group: int | None = None,
) -> tuple[socket.socket, int]:  # fmt: skip
    """Have ``arguments`` run by a forked process. Returns the connection and the process id.

    numbers: what ``fds`` are there. group: of processes, that it joins; None: it has a session of its own.
    Raises OSError if there is no server."""
    what = {"arguments": arguments, "environment": environment, "folder": os.getcwd(), "numbers": numbers}
    message = json.dumps({**what, "stage": stage, "group": group}).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(REQUEST_S)
        connection.connect(path)
        socket.send_fds(connection, [len(message).to_bytes(LENGTH_BYTES, "big")], fds)
        connection.sendall(message)
        if pid := int.from_bytes(connection.recv(LENGTH_BYTES), "big"):
            return connection, pid
        raise ConnectionError("the fork server has ended")
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
        with suppress(OSError):
            group = os.getpgrp()
            connection, _ = _request(path, arguments, dict(os.environ), STREAMS, STREAMS, stage="worker", group=group)
            connection.close()
            return
    os.execv(command[0], command)


def _idle(port: int, command: list[str]) -> None:
    parent = os.getppid()
    with socket.socket() as listener:
        if command:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
        listener.settimeout(1.0)
        while os.getppid() == parent:
            if not command:
                time.sleep(1.0)
                continue
            with suppress(TimeoutError):
                listener.accept()[0].close()
                break
        else:
            return
    os.execv(command[0], command)


def _serve(listener: socket.socket, parent: int) -> dict[str, Any]:
    """Import, and fork for each request. Returns in each forked process, with the request; never in this one."""
    import gc
    import importlib
    import selectors
    import signal

    die_with_parent(parent)
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    gc.disable()  # with it, importing takes a fourth longer
    missing = [(stage, module) for stage, modules in STAGES.items() for module in modules]
    requests: list[tuple[socket.socket, dict[str, Any], list[int]]] = []
    watched: dict[int, socket.socket] = {}  # connections by the process whose end they wait for
    selector = selectors.DefaultSelector()
    for readable in (listener, woken):
        selector.register(readable, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select(0.0 if missing or requests else None):
            if key.fileobj is listener:
                with suppress(OSError, ValueError):
                    requests.append(_receive(listener.accept()[0]))
            else:
                woken.recv(MAX_FDS)
                _report_ended(watched)
        incomplete = {stage for stage, _ in missing}
        ready = [each for each in requests if each[1]["stage"] not in incomplete]
        requests = [each for each in requests if each not in ready]
        for connection, what, fds in ready:
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent(os.getppid())
                selector.close()
                for each in (listener, wake, woken, connection, *watched.values()):
                    each.close()
                gc.freeze()  # a collection would copy every page that it looks at
                gc.enable()
                _join_group(what["group"])
                _give_numbers(fds, what["numbers"])
                return what
            with suppress(OSError):  # who has asked may be gone
                connection.sendall(pid.to_bytes(LENGTH_BYTES, "big"))
            watched[pid] = connection
            for fd in fds:
                os.close(fd)
        if missing:
            with suppress(ImportError):  # the process that needs it says so
                importlib.import_module(missing.pop(0)[1])


def _receive(connection: socket.socket) -> tuple[socket.socket, dict[str, Any], list[int]]:
    connection.settimeout(REQUEST_S)
    length, fds, _, _ = socket.recv_fds(connection, LENGTH_BYTES, MAX_FDS)
    with connection.makefile("rb") as file:
        return connection, json.loads(file.read(int.from_bytes(length, "big"))), fds


def _report_ended(watched: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            connection = watched.pop(ended[0])
            with connection, suppress(OSError):
                status = os.waitstatus_to_exitcode(ended[1])
                connection.sendall(status.to_bytes(LENGTH_BYTES, "big", signed=True))


def _join_group(group: int | None) -> None:
    if group is None:
        os.setsid()
        return
    with suppress(OSError):  # Ray ends its workers by their group; one that it has ended meanwhile is found out later
        os.setpgid(0, group)


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

    from setproctitle import setproctitle

    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forked processes draw the same numbers
    if what["group"] is None:  # Ray's workers name themselves, in their own way
        setproctitle(" ".join([sys.executable, *what["arguments"]]))  # which finds its place beside the environment
    os.environ.clear()
    os.environ.update(what["environment"])
    if "ray" in sys.modules:
        sys.modules["ray._raylet"].AuthenticationTokenLoader.instance().reset_cache()  # of the cluster that asks
    os.chdir(what["folder"])
    sys.argv = list(what["arguments"])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = what["folder"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


def _main(arguments: Sequence[str]) -> None:
    action, first, *rest = arguments
    if action == "serve":
        _become(_serve(socket.socket(fileno=int(first)), int(rest[0])))
    elif action == "ask":
        _ask(first, rest)
    else:
        _idle(int(first), rest)


if __name__ == "__main__":
    _main(sys.argv[1:])
