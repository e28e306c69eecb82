"""Signals that end a run: which are taken, which stay the caller's, and what the command says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_rl.cluster.environment import ENDING, ENDING_BY_DEFAULT, signals_as_exceptions
from buffer_rl.errors import EndedBySignal


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Those of a process that was started in the foreground."""
    taken = (*ENDING, *ENDING_BY_DEFAULT)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in taken}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [*ENDING, *ENDING_BY_DEFAULT])
def test_a_signal_to_end_is_an_exit_with_its_status_and_the_handler_is_put_back(
    default_handlers: None, number: int
) -> None:
    with pytest.raises(EndedBySignal) as caught, signals_as_exceptions():
        os.kill(os.getpid(), number)
    assert (caught.value.code, caught.value.number) == (128 + number, number)
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", [*ENDING, *ENDING_BY_DEFAULT])
def test_a_signal_that_the_caller_ignores_stays_ignored(default_handlers: None, number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with signals_as_exceptions():
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN


def test_a_handler_of_the_caller_stays_for_signals_that_mean_nothing_by_themselves(default_handlers: None) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with signals_as_exceptions():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]


def test_outside_the_main_thread_no_handler_is_set_and_none_is_needed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with signals_as_exceptions():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_names_the_signal_unless_its_caller_ignores_it(
    default_handlers: None, tmp_path: Path, number: signal.Signals, handler: signal.Handlers
) -> None:
    pipe = tmp_path / "data.jsonl"
    os.mkfifo(pipe)
    signal.signal(number, handler)  # the child inherits that a signal is ignored, and nothing else
    command = [sys.executable, "-m", "buffer_rl.cli", "data", "validate", str(pipe)]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True)
    # Opens once the program has opened its end, and waits for rows.
    with contextlib.suppress(BrokenPipeError), pipe.open("wb") as rows:
        process.send_signal(number)
        rows.write(b'{"prompt": "a"}\n')
    # The pipe is closed: a signal that comes just before the program reads would else be seen after the read alone.
    _, error = process.communicate(timeout=60)
    ended = (128 + number, f"buffer-rl: ended by {number.name}\n")
    assert (process.returncode, error) == (ended if handler is signal.SIG_DFL else (0, ""))
