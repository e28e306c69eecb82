"""Ray workers that are forked from one process instead of started: each finds torch and transformers imported.

What a test asks of a run is the same; only the seconds of processor time that every actor's imports cost are paid once
a session. Runs that tests start through the command line, and the golden runs, start their workers as users do.

``serve SOCKET`` imports and forks (in the environment of the cluster's workers: Ray reads some of it once, when it is
imported); ``ask SOCKET SCRIPT ARGUMENT ...`` has SCRIPT run by a forked process with the asking
process's environment, folder and standard streams.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

START_S = 60.0
STREAMS = (0, 1, 2)
LENGTH_BYTES = 8
WARM = (
    "ray._private.workers.setup_worker",  # what Ray's own start imports
    "buffer_rl.buffer.actor",
    "buffer_rl.rollout.worker",
    "buffer_rl.rollout.default",
    "buffer_rl.train.group",
    "buffer_rl.train.worker",
    "buffer_rl.train.torch_trainer",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


def ask(path: str, arguments: list[str]) -> None:
    """Have ``arguments`` run, and end: Ray learns from the new process itself who it is."""
    deadline = time.monotonic() + START_S
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    what = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "group": os.getpgrp()}
    message = json.dumps(what).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(message).to_bytes(LENGTH_BYTES, "big")], STREAMS)
        connection.sendall(message)
        connection.recv(1)


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
                length, streams, _, _ = socket.recv_fds(connection, LENGTH_BYTES, len(STREAMS))
                with connection.makefile("rb") as file:
                    what = json.loads(file.read(int.from_bytes(length, "big")))
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setpgid(0, what["group"])  # which Ray ends with the worker
                    connection.sendall(b"1")
                    for stream, target in zip(streams, STREAMS, strict=True):
                        os.dup2(stream, target)
                        os.close(stream)
                    return what
                for stream in streams:
                    os.close(stream)


def run(what: dict[str, Any]) -> None:
    """Become the program that was asked for."""
    import runpy

    os.environ.clear()
    os.environ.update(what["environment"])
    os.chdir(what["folder"])
    sys.argv = what["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    else:
        run(serve(sys.argv[2]))
