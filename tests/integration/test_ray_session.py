"""Real sessions of Ray: below a temporary folder with a long path, and inside a submitted job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from buffer_rl.cluster.process import reserved_port

LOCAL = """
import ray
from buffer_rl.cluster.session import ray_session

with ray_session(None):
    print(ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=60))
    print(ray._private.worker._global_node.get_session_dir_path())
"""

JOB = """
import os, sys
from pathlib import Path
import ray
from buffer_rl.cluster.session import ray_session
from buffer_rl.plugin.shipping import CodeBundle

code = CodeBundle(files={"shipped_module.py": Path(sys.argv[2])}, references={}, folders=())

def look():
    import shipped_module
    return shipped_module.NUMBER, os.environ["OF_THE_JOB"], os.environ["HOOKED"], Path(sys.argv[3], "data.txt").name

with ray_session(sys.argv[1], code):
    os.unlink(sys.argv[2])  # as on a node that has not the file
    print(*ray.get(ray.remote(num_cpus=0)(look).remote(), timeout=60))
"""

ABSENT = """
import sys
from buffer_rl.cluster.session import ray_session
from buffer_rl.errors import ClusterError

try:
    with ray_session(sys.argv[1]):
        print("in the block")
except ClusterError as error:
    print(error)
"""

SIGNALLED = """
import os, sys
import ray
from buffer_rl.cluster.environment import signals_as_exceptions
from buffer_rl.cluster.session import ray_session
from buffer_rl.errors import EndedBySignal

number, at = int(sys.argv[1]), sys.argv[2]
services = ray._private.services
start, init = services.start_ray_process, ray.init

def start_and_send(command, process_type, *args, **options):
    started = start(command, process_type, *args, **options)
    if process_type == at:
        os.kill(os.getpid(), number)
    return started

def init_and_send(*args, **options):
    init(*args, **options)
    print("started")
    if at == "connected":  # Ray's own handlers are set
        os.kill(os.getpid(), number)

services.start_ray_process, ray.init = start_and_send, init_and_send
try:
    with signals_as_exceptions(), ray_session(None):
        print("in the block")
except EndedBySignal as ended:
    print(ended.number, ray.is_initialized())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGTERM, "gcs_server"), (signal.SIGTERM, "connected"), (signal.SIGINT, "raylet")]
)
def test_a_signal_while_ray_starts_waits_until_it_is_there_and_is_the_runs_own(number: signal.Signals, at: str) -> None:
    """Ray's handler would abort the process, and it would crash if Ray were interrupted."""
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), at]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (ended.stdout.split(), ended.returncode) == (["started", str(int(number)), "False"], 0)


@pytest.mark.slow
def test_ray_starts_below_a_temporary_folder_whose_path_is_too_long_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", LOCAL]
    ended = subprocess.run(
        command, env={**own, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    answer, session = ended.stdout.split()
    assert answer == "7"
    assert not Path(session).parents[1].exists()  # the short path
    assert next(folder.glob("ray/session_*/logs/raylet.out"))


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_asked_once_and_not_for_a_quarter_of_an_hour() -> None:
    with reserved_port("127.0.0.1") as port:
        address = f"127.0.0.3:{port.getsockname()[1]}"
        shorter = {"RAY_py_gcs_connect_timeout_s": "1", "RAY_gcs_rpc_server_connect_timeout_s": "1"}  # of one attempt
        program = [sys.executable, "-c", ABSENT, address]
        ended = subprocess.run(program, env={**os.environ, **shorter}, stdout=subprocess.PIPE, text=True, timeout=45)
    assert ended.stdout.startswith(f"--ray-address {address}: the Ray cluster does not answer")


@pytest.mark.slow
def test_a_submitted_job_with_a_folder_variables_and_a_hook_of_its_own_gets_our_code_beside_them(
    ray_cluster: object, tmp_path: Path
) -> None:
    working, shipped = tmp_path / "working", tmp_path / "user" / "shipped_module.py"
    working.mkdir()
    shipped.parent.mkdir()
    (working / "data.txt").write_text("of the job")
    (working / "their_hook.py").write_text("import os\ndef hook():\n    os.environ['HOOKED'] = os.getcwd()\n")
    shipped.write_text("NUMBER = 41\n")
    environment = {
        "working_dir": str(working),
        "env_vars": {"OF_THE_JOB": "yes"},
        "worker_process_setup_hook": "their_hook.hook",
    }
    job = json.dumps({"runtime_env": environment, "metadata": {}})
    address = ray.get_runtime_context().gcs_address
    ended = subprocess.run(
        [sys.executable, "-c", JOB, address, str(shipped), str(working)],
        env={**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": job},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout.split() == ["41", "yes", str(tmp_path), "data.txt"]
