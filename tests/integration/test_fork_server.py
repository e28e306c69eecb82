"""Processes that are forked from one that has imported torch are those that would have been started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from buffer_rl.cluster.fork_server import SOCKET_VARIABLE, ForkedProcess, start_process

PROBE = """
import json, os, sys
import numpy
import torch
facts = {
    "arguments": sys.argv[1:], "mine": os.environ.get("MINE"), "home": os.environ.get("HOME"), "folder": os.getcwd(),
    "leads_session": os.getsid(0) == os.getpid(), "numbers": numpy.random.rand(2).tolist(), "path": sys.path[0],
    "read": os.read(int(sys.argv[1]), 5).decode(), "input": sys.stdin.read(), "threads": torch.get_num_threads(),
    "title": open("/proc/self/cmdline").read().rstrip("\\0 "),
}
print(json.dumps(facts), flush=True)
print("to the other stream", file=sys.stderr)
sys.exit(7)
"""
ONCE = """
import os, sys
class Noted:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":  # of torch itself a library may ask whether it is there
            with open(os.environ["IMPORTS"], "a") as file:
                file.write(f"{os.getpid()}\\n")
sys.meta_path.insert(0, Noted())
"""


def probe(folder: Path, **environment: str) -> tuple[Any, int, dict[str, Any], str]:
    """Start the probe in ``folder``: the process, its exit status, what it found, and its other output."""
    (folder / "probe_of_forks.py").write_text(PROBE)
    reader, writer = os.pipe()
    os.write(writer, b"hello")
    with (folder / "output").open("w+b") as output, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command = [sys.executable, "-m", "probe_of_forks", str(reader), "two words"]
        streams = (output.fileno(), output.fileno())
        process = start_process(command, streams=streams, env={**os.environ, **environment}, pass_fds=[reader])
        status = process.wait(60)
        os.close(reader)
        os.close(writer)
        output.seek(0)
        found, *rest = output.read().decode().splitlines()
    return process, status, json.loads(found), "\n".join(rest)


def test_a_forked_process_has_the_arguments_environment_folder_files_and_session_of_one_that_is_started(
    ray_cluster: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    forked, status, of_forked, others = probe(tmp_path, MINE="yes", OMP_NUM_THREADS="1")
    monkeypatch.setenv(SOCKET_VARIABLE, "")
    started, same_status, of_started, same_others = probe(tmp_path, MINE="yes", OMP_NUM_THREADS="1")
    assert isinstance(forked, ForkedProcess)
    assert isinstance(started, subprocess.Popen)
    assert (status, others) == (same_status, same_others) == (7, "to the other stream")
    assert of_forked.pop("numbers") != of_started.pop("numbers")
    assert of_forked["arguments"][1] == "two words"
    for facts in (of_forked, of_started):
        assert facts.pop("title").replace("\0", " ").partition(" -m ")[2].startswith("probe_of_forks ")
        del facts["arguments"][0]
    assert of_forked == of_started


def test_no_two_forked_processes_draw_the_same_numbers(ray_cluster: object, tmp_path: Path) -> None:
    assert probe(tmp_path)[2]["numbers"] != probe(tmp_path)[2]["numbers"]


def test_the_signal_that_ends_a_forked_process_is_known_and_waiting_for_one_that_runs_has_an_end(
    ray_cluster: object, tmp_path: Path
) -> None:
    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"]
        process = start_process(command, streams=(output.fileno(), output.fileno()), env=os.environ)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(20) == process.poll() == -signal.SIGKILL


def test_without_the_server_a_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "nothing"))
    process, status, found, _ = probe(tmp_path)
    assert isinstance(process, subprocess.Popen)
    assert (status, found["read"]) == (7, "hello")


def test_a_worker_with_a_runtime_environment_of_its_own_gets_it(ray_cluster: object) -> None:
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"MINE": "yes"}}}
    look = ray.remote(**options)(lambda: os.environ["MINE"])
    assert ray.get(look.remote(), timeout=120) == "yes"


@pytest.mark.slow
def test_a_run_imports_torch_once_for_all_of_its_processes(
    task: Path, tmp_path: Path, options_in: Callable[..., Any]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONCE)
    args = options_in(tmp_path / "run", num_rollout=1)
    given = args.model_dump(exclude_defaults=True, exclude_none=True, mode="json")
    (tmp_path / "run.json").write_text(json.dumps(given))  # YAML
    own = {name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE and not name.startswith("RAY_")}
    environment = {**own, "PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports")}
    command = [sys.executable, "-m", "buffer_rl.cli", "train", "--config", str(tmp_path / "run.json")]
    subprocess.run(command, env=environment, cwd=tmp_path, timeout=120, check=True)
    assert len((tmp_path / "imports").read_text().split()) == 1
