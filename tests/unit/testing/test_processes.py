"""Descendants are found through generations, and the dead do not count."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.processes import descendants, holds_within

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()  # grandchild"])
print(child.pid, flush=True)
child.wait()
"""


def test_children_and_grandchildren_are_found_and_zombies_are_not() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        found = {process.pid: process for process in descendants(os.getpid())}
        assert found[grandchild].parent == parent.pid
        assert "# grandchild" in found[grandchild].command
        parent.kill()
        assert holds_within(30, lambda: not found[parent.pid].alive())  # killed and not yet waited for: a zombie
        assert parent.pid not in {process.pid for process in descendants(os.getpid())}
        assert parent.stdin is not None
        parent.stdin.close()
    assert holds_within(30, lambda: not found[grandchild].alive())
