"""Python scripts that run at once in processes of their own, such as the ranks of a trainer.

Run as a program, the start of one of them: a process that is forked reads no PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from buffer_rl.cluster.fork_server import SOCKET_VARIABLE, ForkedProcess, start_process


@contextmanager
def forked_from(socket: str) -> Iterator[None]:
    """Processes that are started in the block are forked by the fork server of that socket."""
    before = os.environ.get(SOCKET_VARIABLE)
    os.environ[SOCKET_VARIABLE] = socket
    try:
        yield
    finally:
        if before is None:
            del os.environ[SOCKET_VARIABLE]
        else:
            os.environ[SOCKET_VARIABLE] = before


def start_script(
    script: Sequence[str], output: int, variables: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a script with its arguments, its output in the file ``output``. It finds the modules that this process
    does, and is forked if the fixture ``forked_processes`` is used."""
    words = [__file__, json.dumps(sys.path), *script]
    environment = {**os.environ, **(variables or {})}
    command = [sys.executable, *words]
    return start_process(command, streams=(output, output), env=environment, pass_fds=pass_fds, forked=words)


def run_scripts(scripts: Sequence[Sequence[str]], variables: Mapping[str, str], timeout_s: float) -> None:
    """Run scripts at once to their end. One that fails is an AssertionError with its output; the others are ended
    then."""
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        running = []
        for script in scripts:
            log = stack.enter_context(tempfile.TemporaryFile())
            process = start_script(script, log.fileno(), variables)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append((process, log))
        for process, log in running:
            status = process.wait(max(0.0, deadline - time.monotonic()))
            log.seek(0)
            assert status == 0, log.read().decode(errors="replace")


if __name__ == "__main__":
    path = json.loads(sys.argv[1])
    del sys.argv[:2]
    sys.path[:] = [os.path.dirname(os.path.abspath(sys.argv[0])), *path]
    runpy.run_path(sys.argv[0], run_name="__main__")
