"""Processes that a thread leaves behind are found by its mark, whatever became of their parents; no others are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from buffer_rl.agents.leftovers import ALL_MARKS, Mark, _newest_process
from harness.processes import is_running

SLEEP = ["sleep", "600"]
DAEMON = "(setsid sh -c 'echo $$; exec sleep 600 >/dev/null' &)"


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Ids of processes, which are ended at last."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: Mark, work: Callable[[], None]) -> None:
    """Do ``work`` in a marked thread."""

    def run() -> None:
        mark.put()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def start(pids: list[int], command: str | list[str] = SLEEP) -> None:
    """A process that sleeps; of a text, the one whose id it prints."""
    if isinstance(command, list):
        pids.append(subprocess.Popen(command).pid)
    else:
        pids.append(int(subprocess.run(command, shell=True, stdout=subprocess.PIPE, check=True).stdout))


async def test_a_child_a_daemon_and_what_another_thread_started_are_ended_and_those_of_other_marks_stay(
    started: list[int],
) -> None:
    mark, other = Mark(), Mark()
    in_thread = threading.Thread(target=start, args=(started,))
    marked(mark, lambda: [start(started), start(started, DAEMON), in_thread.start(), in_thread.join()].clear())
    marked(other, lambda: start(started))
    start(started)
    assert len(started) == 5
    assert sorted(mark.processes()) == sorted(started[:3])
    assert len(await mark.end_processes()) == 3
    assert [is_running(pid) for pid in started] == [False] * 3 + [True] * 2
    assert mark.processes() == {}
    assert list(other.processes()) == [started[3]]


def test_the_mark_is_of_its_thread_alone_and_what_has_ended_is_removed(started: list[int]) -> None:
    mark = Mark()
    children: list[subprocess.Popen[bytes]] = []  # one that is forgotten is waited for
    marked(mark, lambda: children.append(subprocess.Popen(["true"])))
    started.append(children[0].pid)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    os.waitid(os.P_PID, started[0], os.WEXITED | os.WNOWAIT)  # it has ended, and nobody waited for it
    assert mark.processes() == {}
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)


def test_only_newer_processes_are_looked_at_also_after_the_ids_began_again(started: list[int]) -> None:
    mark = Mark()
    marked(mark, lambda: start(started))
    assert list(mark.processes()) == started
    assert replace(mark, since=started[0]).processes() == {}
    assert list(replace(mark, since=1 << 40).processes()) == started  # ids grew beyond this, and began again
    assert mark.since <= started[0] <= _newest_process()


async def test_what_all_threads_share_is_not_ended(started: list[int]) -> None:
    mark = Mark()
    shared = [sys.executable, "-c", "import time; time.sleep(600)", "multiprocessing.resource_tracker"]
    marked(mark, lambda: start(started, shared))
    assert await mark.end_processes() == {}
    assert is_running(started[0])


def test_marks_differ() -> None:
    marks = {Mark().bits for _ in range(1000)}
    assert len(marks) > 990
    assert min(marks) > 0
    assert max(marks) <= ALL_MARKS
