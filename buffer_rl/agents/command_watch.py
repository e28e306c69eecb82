"""A small program that runs an agent's command, and ends all that the command has started:

    command_watch.py FD FILE COMMAND ...

It exits when the command does, with its status, or with 128 and the number of the signal that ended it. Processes that
the command has left behind are killed then, also those that made a session of their own. All are killed if the pipe FD
is closed, as it is when the rollout worker ends, however it ends. FILE is removed at last.

Each process costs its start, so nothing is imported but what Python has loaded, or loads in a millisecond.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
POLL_MS = 50
"""Between two looks at the command, if the system cannot say when a process ends."""
CANNOT_RUN = 127


def main(lifeline: int, file: str, command: list[str]) -> int:
    """Returns the exit status."""
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes a child of this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the group: for the command
    os.set_inheritable(lifeline, False)
    own = os.getpid()
    if (pid := os.fork()) == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == own:
            _become(command)
        os._exit(CANNOT_RUN)
    status = _wait(pid, lifeline)
    _end_children()
    with suppress(OSError):
        os.unlink(file)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _prctl() -> Callable[[int, int], object]:
    if sys.platform != "linux":
        return lambda *_: None
    import ctypes

    found: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    return found


def _become(command: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):  # the last two are ignored by Python
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())


def _wait(pid: int, lifeline: int) -> int:
    """How the process ended; as killed, if the lifeline was closed before."""
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    timeout = POLL_MS
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            poller.register(os.pidfd_open(pid), select.POLLIN)
            timeout = 20 * POLL_MS
    while True:
        ready = [fd for fd, _ in poller.poll(timeout)]
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if lifeline in ready:
            os.kill(pid, signal.SIGKILL)
            return signal.SIGKILL


def _end_children() -> None:
    """Kill what is left until nothing is: the children of a process that ends become children of this one."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _children() -> list[int]:
    """Of this process; none if the system does not tell."""
    own, found = str(os.getpid()).encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
