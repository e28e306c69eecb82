"""Engines on the nodes of a cluster: three nodes on this machine, each with an address of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from buffer_rl.config import dump_args
from harness.nodes import Nodes
from harness.processes import Process, holds_within

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="one machine has all addresses of 127/8 on Linux only"),
]

HEAD, SECOND, THIRD, FOURTH = (f"127.0.0.{number}" for number in range(2, 6))
LISTENING = "0A"
SERVER = "buffer_rl.engine.embedded.server"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path / "nodes") as cluster:
        yield cluster


FLEET = """
import json, sys, threading, time
from buffer_rl.cluster.placement import placed
from buffer_rl.cluster.session import ray_session
from buffer_rl.config import load_args
from buffer_rl.engine import host
from buffer_rl.engine.fleet import EngineFleet

args = load_args(sys.stdin.readline())

def say(line):
    print("fleet:", line, flush=True)

def stop_when_asked():
    sys.stdin.read()
    ended.set()

ended, longest = threading.Event(), 0.0
threading.Thread(target=stop_when_asked, daemon=True).start()
with ray_session(args.ray_address), placed(args, True, lambda line: None) as placement:
    args = host.at_this_node(args)
    with EngineFleet(args, args.run_dir, host.placed_launcher(placement, say), say) as fleet:
        fleet.wait_ready()
        host.ROOM_NOTICE_S = 4.0
        say(json.dumps([fleet.router_url, *fleet.engine_urls]))
        while not ended.wait(0.1):
            started = time.monotonic()
            fleet.check()
            longest = max(longest, time.monotonic() - started)
        say(json.dumps([longest, *fleet.router.workers()]))
"""


class Fleet:
    """A process that has joined the cluster, and that starts engines and checks them until its input ends."""

    def __init__(self, nodes: Nodes, args: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FLEET],
            env=nodes.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        print(dump_args(args), file=self._process.stdin, flush=True)

    def next_line(self) -> str:
        """What it says next; Ray may say something in between."""
        assert self._process.stdout is not None
        return next(line for line in self._process.stdout if line.startswith("fleet: "))[7:].strip()

    def end(self) -> str:
        """Returns its last line."""
        out, _ = self._process.communicate(timeout=60)
        assert self._process.returncode == 0
        return [line for line in out.splitlines() if line.startswith("fleet: ")][-1][7:]


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports that the process listens on, by IPv4."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in links]
    return [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in local]


def server_url(server: Process) -> str:
    ((address, port),) = listening(server.pid)
    return f"http://{address}:{port}"


def address_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def test_an_engine_whose_actor_or_node_dies_takes_its_server_along_and_is_replaced_where_there_is_room(
    nodes: Nodes, options_in: Any, tmp_path: Path
) -> None:
    nodes.add(HEAD, cpus=0)
    nodes.add(SECOND, cpus=1)
    nodes.add(THIRD, cpus=1)
    args = options_in(tmp_path / "run", rollout_num_engines=2, ray_address=nodes.address, debug_rollout_only=True)
    fleet = Fleet(nodes, args)
    router, *engines = json.loads(fleet.next_line())
    assert [address_of(url) for url in (router, *engines)] == [HEAD, SECOND, THIRD]
    first, second = sorted(nodes.processes(SERVER), key=lambda server: engines.index(server_url(server)))
    os.kill(first.parent, signal.SIGKILL)
    assert holds_within(5, lambda: not first.alive())
    line = fleet.next_line()
    assert line.startswith("engine 0: its process was killed (")
    assert f"engine_0.log on node {SECOND}); the run goes on with 1 engine while another one starts" in line
    assert fleet.next_line() == "engine 0 is back, with the initial weights"
    nodes.remove(THIRD)
    assert holds_within(10, lambda: not second.alive())
    line = fleet.next_line()
    assert line.startswith("engine 1")
    assert f"engine_1.log on node {THIRD}); the run goes on with 1 engine while another one starts" in line
    assert fleet.next_line() == "engine 1 waits for a node that has room for it (1 CPU on any node)"
    nodes.add(FOURTH, cpus=1)
    assert fleet.next_line() == "engine 1 is back, with the initial weights"
    longest, *workers = json.loads(fleet.end())
    assert longest < 1.0  # of the checks, which the driver makes while it waits
    assert {address_of(url) for url in workers} == {SECOND, FOURTH}
    assert nodes.processes(SERVER) == []
