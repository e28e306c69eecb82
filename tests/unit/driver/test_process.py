"""How a run's process is told to end, and that two runs never share a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from buffer_rl.driver.process import folder_lock, termination_as_exception
from buffer_rl.errors import ConfigError


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_end_becomes_an_exit_with_its_status_and_the_handler_is_put_back(number: int, status: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, termination_as_exception():
        os.kill(os.getpid(), number)
    assert caught.value.code == status
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_no_handler_is_set_and_none_is_needed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with termination_as_exception():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


HOLD = """
import sys
from pathlib import Path
from buffer_rl.driver.process import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_process_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another run is at work"), folder_lock(folder):
            pass
        with folder_lock(tmp_path / "runs" / "b"):
            pass
        holder.kill()
    with folder_lock(folder):
        pass
    with folder_lock(folder):
        pass
