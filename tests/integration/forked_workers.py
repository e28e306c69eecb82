"""Ray workers and engines that are forked from one process instead of started: each finds torch and transformers
imported.

What a test asks of a run is the same; only the seconds of processor time that the imports of every actor and engine
cost are paid once a session. Runs that tests start through the command line, and the golden runs, start theirs as users
do; so do the tests of engines.

``serve SOCKET`` imports and forks (in the environment of the cluster's workers: Ray reads some of it once, when it is
imported); ``ask SOCKET SCRIPT ARGUMENT ...`` has SCRIPT run by a forked process with the asking
process's environment, folder and standard streams. ``forked_engines`` has ``subprocess.Popen`` ask for engines.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

START_S = 60.0
STREAMS = (0, 1, 2)
MOST_FDS = 16
ENGINE = "buffer_rl.embedded.server"
CLONE = {"x86_64": 56, "aarch64": 220}  # the number of the system call, by machine
CLONE_PARENT = 0x8000
LENGTH_BYTES = 8
WARM = (
    "ray._private.workers.setup_worker",  # what Ray's own start imports
    "buffer_rl.buffer.actor",
    "buffer_rl.rollout.worker",
    "buffer_rl.rollout.default",
    "buffer_rl.train.rank",
    "buffer_rl.train.role_worker",
    "buffer_rl.train.torch_trainer",
    "buffer_rl.embedded.loader",
    "buffer_rl.embedded.routes",
    "buffer_rl.embedded.sglang_service",
    "uvicorn.server",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


def ask(path: str, arguments: list[str]) -> None:
    """Have ``arguments`` run, and end: Ray learns from the new process itself who it is."""
    request(path, arguments, dict(os.environ), STREAMS, STREAMS, group=os.getpgrp())


def request(
    path: str, arguments: Sequence[str], environment: dict[str, str], fds: Sequence[int], numbers: Sequence[int],
    *, group: int | None,
) -> int:  # fmt: skip
    """Have ``arguments`` run by a forked process. Returns its id. numbers: what ``fds`` are there. group: of processes,
    that it joins; None: it has a session of its own, and is a child of this process if that has started the server."""
    deadline = time.monotonic() + START_S
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    what = {"arguments": arguments, "environment": environment, "folder": os.getcwd(), "numbers": numbers}
    message = json.dumps({**what, "group": group}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(message).to_bytes(LENGTH_BYTES, "big")], fds)
        connection.sendall(message)
        if not (pid := int.from_bytes(connection.recv(LENGTH_BYTES), "big")):
            raise ChildProcessError("what Ray workers and engines are forked from has ended")
        return pid


def forked_engines(path: str) -> type[subprocess.Popen[Any]]:
    """``Popen`` for this process, which has started the server at ``path``: an engine is forked there. It is a child of
    this process, with the session, file descriptors and title that it would have; everything else is started."""
    if platform.machine() not in CLONE:
        return subprocess.Popen

    class Popen(subprocess.Popen[Any]):
        def _execute_child(
            self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
            *more: Any,
        ) -> None:  # fmt: skip
            if not isinstance(args, list) or args[1:3] != ["-m", ENGINE]:
                super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
                return
            pipes = more[3:9]  # read and write ends of standard input, output and error
            streams = [pipes[0], pipes[3], pipes[5]]
            numbers = [*STREAMS, *pass_fds]
            self.pid = request(path, args[1:], env, [*streams, *pass_fds], numbers, group=None)
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    return Popen


def serve(path: str) -> dict[str, Any]:
    """Returns in each forked process, with what it was asked for; never in this one."""
    import gc
    import importlib
    import signal

    gc.disable()
    for module in WARM:
        importlib.import_module(module)
    gc.freeze()  # a collection in a forked process would copy every page that it looks at
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the forked processes; none becomes a zombie
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}_")
        listener.listen(64)
        os.rename(f"{path}_", path)  # who finds it is heard
        while True:
            connection, _ = listener.accept()
            with connection:
                length, fds, _, _ = socket.recv_fds(connection, LENGTH_BYTES, MOST_FDS)
                with connection.makefile("rb") as file:
                    what = json.loads(file.read(int.from_bytes(length, "big")))
                if (os.fork if what["group"] is not None else _fork_for_parent)() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    if what["group"] is None:
                        os.setsid()
                    else:
                        os.setpgid(0, what["group"])  # which Ray ends with the worker
                    connection.sendall(os.getpid().to_bytes(LENGTH_BYTES, "big"))
                    connection.close()
                    listener.close()
                    _give_numbers(fds, what["numbers"])
                    return what
                for fd in fds:
                    os.close(fd)


def _fork_for_parent() -> int:
    """As ``os.fork``; but the new process is a child of this one's parent, which can wait for it (``CLONE_PARENT`` in
    clone(2)). This process must have one thread: what the C library does at a fork is left out."""
    import ctypes
    import signal

    python, number = ctypes.pythonapi, CLONE[platform.machine()]
    arguments = [ctypes.c_long(each) for each in (number, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)]
    clone = ctypes.PyDLL(None).syscall
    python.PyOS_BeforeFork()
    pid: int = clone(*arguments)
    (python.PyOS_AfterFork_Child if pid == 0 else python.PyOS_AfterFork_Parent)()
    return pid


def _give_numbers(fds: Sequence[int], numbers: Sequence[int]) -> None:
    import fcntl

    free = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]  # none is in the way of another one's number
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def run(what: dict[str, Any]) -> None:
    """Become the program that was asked for."""
    import runpy

    os.environ.clear()
    os.environ.update(what["environment"])
    os.chdir(what["folder"])
    sys.argv = what["arguments"]
    if sys.argv[0] == "-m":
        from ray._raylet import setproctitle

        setproctitle(" ".join([sys.executable, *sys.argv]))
        del sys.argv[0]
        sys.path[0] = what["folder"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    else:
        run(serve(sys.argv[2]))
