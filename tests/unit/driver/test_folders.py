"""Two runs never share a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.driver.folders import folder_lock
from buffer_rl.errors import ConfigError

HOLD = """
import sys
from pathlib import Path
from buffer_rl.driver.folders import folder_lock
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
