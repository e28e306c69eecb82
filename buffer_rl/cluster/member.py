"""What a member process has so that it is seen to hang: its pulse, and the stack of its threads at a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import os
import platform
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from buffer_rl.observe.pulse import Pulse, PulseRecorder

PULSE = "pulse"
"""The method that is asked, and the name of its thread."""
STACK_SIGNAL = signal.SIGUSR2
STACK_S = 3.0
"""Deadline for a process to write its stack."""
STACK_FRAMES = 8
"""Frames of the stack in a notice; the log has all."""
POLL_S = 0.01


class Member:
    """Base of the classes of members that are watched: notes each call of a public method, and answers ``pulse`` on a
    thread of its own meanwhile."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _noted(name, method))

    def ready(self) -> Any:
        """Answers once the process can take calls."""

    def pulse(self) -> Pulse:
        """The calls under way, and which process this is."""
        recorder, log = _recorder_of(self), ""
        with contextlib.suppress(OSError):  # a system without /proc
            log = os.readlink("/proc/self/fd/2")
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        calls, gaps = recorder.calls(), recorder.gaps()
        return Pulse(calls=calls, gaps=gaps, pid=os.getpid(), node=node, host=platform.node(), log=log)


def _recorder_of(member: Any) -> PulseRecorder:
    recorder: PulseRecorder = vars(member).setdefault("_pulse_recorder", PulseRecorder())
    return recorder


def _noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def later(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _recorder_of(self).call(name):
                return await method(self, *args, **kwargs)

        return later

    @functools.wraps(method)
    def now(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _recorder_of(self).call(name):
            return method(self, *args, **kwargs)

    return now


def write_stack_at_signal() -> None:
    """Have this process write the stack of all its threads to its errors at ``STACK_SIGNAL``, whatever it does."""
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def take_stack(pid: int, log: str, stops: bool) -> str:
    """On the node of the process ``pid``, which called ``write_stack_at_signal``: have it write its stack, also if it
    is stopped. log: the file that its errors go to; empty if unknown. stops: afterwards it is stopped, else it goes on.
    Returns the text; empty if it writes none."""
    text = ""
    with contextlib.suppress(OSError):  # it has ended, or its log is not a file
        log = log or os.readlink(f"/proc/{pid}/fd/2")
        start = Path(log).stat().st_size
        os.kill(pid, STACK_SIGNAL)
        os.kill(pid, signal.SIGCONT)  # a stopped process gets the signal first
        before, deadline = "", time.monotonic() + STACK_S
        while time.monotonic() < deadline and not (text and text == before):
            time.sleep(POLL_S)
            before, text = text, _end_of(log, start)
        if stops:
            os.kill(pid, signal.SIGSTOP)  # it must not go on with what it did
    return text


def end_process(pid: int) -> None:
    """On the node of the process ``pid``: end it. Ray needs seconds to end one that is stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end_of(log: str, start: int) -> str:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


def frames_of(stack: str, method: str) -> str:
    """The newest frames of the thread that executes ``method``, else of the one with most frames, as one line, the
    newest first: ``file.py:12 in f < file.py:30 in g``. Empty if the text has no stack."""
    threads = [
        re.findall(r'File "([^"]*)", line (\d+) in (\S+)', part) for part in stack.split("most recent call first")
    ]
    at_work = [frames for frames in threads if any(name == method for *_, name in frames)]
    chosen = max(at_work or threads, key=len)
    return " < ".join(f"{Path(file).name}:{line} in {name}" for file, line, name in chosen[:STACK_FRAMES])
