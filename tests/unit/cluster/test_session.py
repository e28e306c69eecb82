"""How a run reaches Ray: temporary folders with long paths, submitted jobs, private names, and what Ray raises."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray

import buffer_rl
from buffer_rl.cluster.fork_server import (
    PROGRAM,
    SOCKET_VARIABLE,
    ForkedProcess,
    fork_server,
    path_options,
    start_process,
)
from buffer_rl.cluster.session import (
    CODE_FOLDER,
    JOB_CONFIG,
    JOB_HOOK,
    MAX_SOCKET_PATH,
    SETUP_HOOK,
    WORKING_DIRECTORY,
    isolated_ray,
    ray_session,
    raylet_command,
    short_temporary_folder,
    worker_environment,
)
from buffer_rl.errors import ClusterError
from buffer_rl.options.sources import RESERVED_VARIABLES
from harness.processes import holds_within, is_running

SOCKET = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


@pytest.fixture(params=["t" * 120, "ü"])  # Ray encodes the paths of its sockets as ASCII
def long_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:  # whose path is short
        folder = Path(parent, request.param)
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield folder


def test_sockets_below_a_long_or_foreign_temporary_folder_have_a_short_private_path(long_folder: Path) -> None:
    with short_temporary_folder():
        short = Path(os.environ["RAY_TMPDIR"])
        assert str(short).isascii()
        place = short / SOCKET
        place.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place))
        assert (long_folder / SOCKET).is_socket()  # files are where the user wants them
        assert stat.S_IMODE(short.parent.stat().st_mode) == 0o700
    assert "RAY_TMPDIR" not in os.environ
    assert not short.parent.exists()
    assert (long_folder / SOCKET).is_socket()


def test_a_temporary_folder_that_sockets_fit_below_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "/tmp/" + "t" * (MAX_SOCKET_PATH - len("/tmp/"))
    assert len(f"{longest}/{SOCKET}") == 107
    monkeypatch.setenv("RAY_TMPDIR", longest)
    with short_temporary_folder():
        assert os.environ["RAY_TMPDIR"] == longest


def test_a_folder_that_cannot_be_shortened_is_named_with_what_to_export(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(ClusterError, match="RAY_TMPDIR") as caught, short_temporary_folder():
        raise AssertionError("the block is not entered")
    assert str(long_folder) in caught.value.what


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


JOB = {
    "working_dir": "gcs://_ray_pkg_0.zip",
    "py_modules": ["gcs://_ray_pkg_1.zip"],
    "env_vars": {"TOKEN": "t"},
    "worker_process_setup_hook": "their.hook",
    "pip": ["nltk"],
}


def test_the_environment_of_a_submitted_job_and_ours_are_merged(tmp_path: Path) -> None:
    code = tmp_path / CODE_FOLDER
    alone = worker_environment(code, {})
    here = {WORKING_DIRECTORY: os.getcwd()}
    assert alone == {"env_vars": here, "worker_process_setup_hook": SETUP_HOOK, "working_dir": str(code)}
    assert worker_environment(code, JOB) == {
        "env_vars": {"TOKEN": "t", **here, JOB_HOOK: "their.hook"},
        "worker_process_setup_hook": SETUP_HOOK,
        "py_modules": ["gcs://_ray_pkg_1.zip", str(code)],
    }
    assert "working_dir" not in worker_environment(None, JOB)


@pytest.mark.parametrize(
    ("address", "raised", "says"),
    [
        (None, OSError("AF_UNIX path length cannot exceed 107 bytes: /scratch/x"), "RAY_TMPDIR"),
        (None, Exception("The current node timed out during startup."), "ulimit -a"),
        (None, ValueError("bad"), "Ray does not start: ValueError: bad"),
        (None, UnicodeEncodeError("utf-8", "/data/caf\udce9/run", 9, 10, "surrogates not allowed"), r"caf\udce9/run"),
        ("10.0.0.1:6379", ConnectionError("no answer"), "--ray-address 10.0.0.1:6379"),
        ("10.0.0.1:6379", ConnectionError("no answer"), "RAY_AUTH_TOKEN_PATH"),
        ("auto", ValueError("Failed to merge the Job's runtime env"), "--ray-address auto"),
        ("auto", RuntimeError("Version mismatch: Ray 2.0 and 3.0"), "Version mismatch"),
    ],
)
def test_whatever_ray_raises_at_the_start_is_a_cluster_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, address: str | None, raised: Exception, says: str
) -> None:
    def init(**_: Any) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = dict(os.environ)
    with pytest.raises(ClusterError) as caught, ray_session(address):
        raise AssertionError("the block is not entered")
    assert says in str(caught.value)
    assert caught.value.hint
    assert {**before, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"} == dict(os.environ)


def test_a_joined_cluster_gets_the_merged_environment_and_a_local_one_none_of_the_jobs_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def init(**given: Any) -> None:
        calls.append((given.get("runtime_env"), os.environ.get(JOB_CONFIG)))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv(JOB_CONFIG, json.dumps({"runtime_env": JOB, "metadata": {}}))
    for address in ("auto", None):
        with ray_session(address):
            pass
    (joined, given), (none, local) = calls
    assert (joined, given, none) == (worker_environment(None, JOB), os.environ[JOB_CONFIG], None)
    kept = {name: value for name, value in JOB.items() if name not in ("working_dir", "py_modules")}
    assert json.loads(local) == {"runtime_env": kept, "metadata": {}}


def test_a_version_of_ray_without_a_private_name_is_refused_and_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(os.environ)
    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    missing = rf"Ray {ray.__version__} has no ray\._raylet\.AuthenticationTokenLoader"
    with pytest.raises(ClusterError, match=missing), isolated_ray():
        raise AssertionError("the block is not entered")
    assert dict(os.environ) == before


def test_a_local_raylet_starts_the_agent_of_runtime_environments_on_demand_and_workers_by_the_fork_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "/tmp/a b/fork")
    command = [
        "/ray/raylet",
        "--metrics-agent-port=0",
        "--runtime_env_agent_port=0",
        "--python_worker_command=/bin/python /ray/setup_worker.py /ray/default_worker.py --node-ip-address=127.0.0.1",
        "--java_worker_command=",
        "--dashboard_agent_command=/bin/python -u /ray/agent.py",
        "--runtime_env_agent_command=/bin/python -u /ray/main.py --runtime-env-agent-port=0 --log-dir=/tmp/l",
        "--object_store_memory=9",
    ]
    lean = dict(word.split("=", 1) for word in raylet_command(command, 5001)[1:])
    commands = {name: shlex.split(value) for name, value in lean.items() if name.endswith("_command")}
    program = [*PROGRAM]
    assert commands == {
        "--python_worker_command": [*program, "ask", "/tmp/a b/fork", *command[3].partition("=")[2].split()],
        "--java_worker_command": [],
        "--dashboard_agent_command": [*program, "idle", "0"],
        "--runtime_env_agent_command": [
            *program, "idle", "5001", "/bin/python", "-u", "/ray/main.py", "--runtime-env-agent-port=5001",
            "--log-dir=/tmp/l",
        ],
    }  # fmt: skip
    assert lean["--runtime_env_agent_port"] == "5001"
    assert {lean[name] for name in ("--metrics-agent-port", "--metrics_export_port")} == {"1"}
    assert lean["--object_store_memory"] == "9"
    monkeypatch.setenv(SOCKET_VARIABLE, "")
    assert command[3] in raylet_command(command, 5001)


def test_the_variable_of_the_fork_server_is_no_option() -> None:
    assert SOCKET_VARIABLE in RESERVED_VARIABLES


@pytest.mark.parametrize("name", ["t" * 120, "absent"])
def test_without_a_place_for_its_socket_there_is_no_fork_server_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    if name != "absent":
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with fork_server():
        assert SOCKET_VARIABLE not in os.environ
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.parametrize("kind", [subprocess.Popen, pytest.param(ForkedProcess, marks=pytest.mark.slow)])
def test_no_file_of_the_working_directory_hides_a_module_of_python_from_our_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    for name in ("selectors", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    with fork_server() if kind is ForkedProcess else nullcontext(), open(tmp_path / "log", "wb") as log:
        command = [sys.executable, "-m", "buffer_rl.cli", "--version"]
        streams = (log.fileno(), log.fileno())
        process = start_process(command, streams=streams, env=os.environ, stage="trial")
        assert (type(process), process.wait(60)) == (kind, 0), (tmp_path / "log").read_text()


RUN = """
import os, sys, time
from buffer_rl.cluster.fork_server import fork_server, start_process
with fork_server():
    process = start_process([sys.executable, "-m", "starts_a_daemon"], streams=(1, 2), env=os.environ, stage="trial")
    print(type(process).__name__, flush=True)
    time.sleep(3600)
"""
STARTS_A_DAEMON = """
import subprocess, time
print(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.slow  # the server imports torch first
@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")
def test_a_killed_run_takes_along_the_daemons_of_its_forked_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_daemon.py").write_text(STARTS_A_DAEMON)
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ForkedProcess\n"
        daemon = int(run.stdout.readline())
        assert is_running(daemon)
        run.send_signal(signal.SIGKILL)
    assert holds_within(10.0, lambda: not is_running(daemon))


def test_a_clone_that_is_not_installed_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(buffer_rl.__file__).parents[1])
    assert path_options() == []
    for folder in (tmp_path, tmp_path / "removed"):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        if folder != tmp_path:
            folder.rmdir()
        assert path_options() == ["-P"]
    monkeypatch.chdir(tmp_path)


def test_a_machine_that_does_not_reach_itself_is_named_at_once() -> None:
    """In a network of its own, whose loopback interface is down."""
    alone = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system gives no process a network of its own: unshare --net --map-root-user true")
    code = "from buffer_rl.cluster.session import ray_session\nwith ray_session(None): pass"
    run = subprocess.run([*alone, sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode
    assert "does not reach itself at 127.0.0.1" in run.stderr
