"""Ray as a run starts it: nobody else reaches it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
LISTENING = "0A"


def descendants(root):
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listeners(pids):
    """Addresses, as the kernel writes them, that one of the processes listens on."""
    sockets = set()
    for pid in pids:
        try:
            sockets |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].partition(":")[0])
    return found


FRESH = """
import os, runpy, sys
import ray
from buffer_rl.cluster.session import ray_session

here = runpy.run_path(sys.argv[1])
with ray_session(None):
    ray.get(ray.remote(num_cpus=0)(lambda: 0).remote(), timeout=60)
    print(*here["listeners"](here["descendants"](os.getpid())))
"""


@pytest.mark.slow
def test_every_listener_of_ray_is_on_the_loopback_interface():
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", FRESH, __file__]
    found = subprocess.run(command, env=own, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout.split()
    assert len(found) >= 3  # of gcs_server, raylet, agents, a worker and the driver
    assert set(found) <= set(LOOPBACK)


def test_the_token_is_the_runs_own_in_a_private_file_and_in_no_argument_list(ray_cluster):
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    token = path.read_bytes()
    assert len(token) == 64
    for pid in descendants(os.getpid()):
        try:
            assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue


@pytest.mark.parametrize(("environ", "answer"), [({}, "joined"), ({"RAY_AUTH_TOKEN": "0" * 64}, "InvalidAuthToken")])
def test_who_has_another_token_is_refused(ray_cluster, environ, answer):
    program = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); print('joined', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, ray.get_runtime_context().gcs_address],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    guard = threading.Timer(120, process.kill)
    guard.start()
    try:  # Ray goes on trying for 20 s: the first answer is enough
        said = next((word for line in process.stdout for word in ("joined", "InvalidAuthToken") if word in line), "")
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    assert said == answer


@pytest.mark.slow
def test_the_key_of_the_engines_is_in_no_argument_list_no_log_no_dump_and_no_checkpoint(
    train, make_options, tmp_path, monkeypatch
):
    key = "a-key-that-nothing-may-show-51d7"
    monkeypatch.setenv("BUFFER_RL_ENGINE_API_KEY", key)
    dump = str(tmp_path / "run" / "rollout_{rollout_id}.safetensors")
    args = make_options(engine_api_key=key, num_rollout=1, save=str(tmp_path / "saves"), save_debug_rollout_data=dump)
    ended, seen, shown = threading.Event(), set(), []

    def watch():
        while not ended.wait(0.05):
            for pid in descendants(os.getpid()):
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                seen.add(command)
                if key.encode() in command:
                    shown.append(command)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        train(args)
    finally:
        ended.set()
        watcher.join()
    assert any(b"router_process" in command for command in seen)
    assert any(b"embedded.server" in command for command in seen)
    assert shown == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if key.encode() in path.read_bytes()] == []
