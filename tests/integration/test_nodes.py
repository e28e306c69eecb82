"""Engines on the nodes of a cluster: three nodes on this machine, each with an address of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.nodes import Nodes
from harness.processes import holds_within

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="one machine has all addresses of 127/8 on Linux only"),
]

HEAD, SECOND, THIRD, FOURTH = (f"127.0.0.{number}" for number in range(2, 6))
SERVER = "buffer_rl.engine.embedded.server"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path / "nodes") as cluster:
        yield cluster


FLEET = """
import json, sys, threading, time
from buffer_rl.cluster.session import ray_session
from buffer_rl.config import dump_args, load_args
from buffer_rl.engine import host
from buffer_rl.engine.fleet import EngineFleet
from buffer_rl.errors import EngineError

args, folder = load_args(sys.stdin.readline()), sys.argv[1]

def say(line):
    print(line, flush=True)

def options_of(index):
    return {"num_cpus": 0, "resources": {"engine": 1}}

with ray_session(args.ray_address):
    args = host.at_this_node(args)
    with EngineFleet(args, folder, host.placed_launcher(options_of, say), say) as fleet:
        fleet.wait_ready()
        host.ROOM_NOTICE_S = 1.0
        say(json.dumps([fleet.router_url, *fleet.engine_urls]))
        ended = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        longest = 0.0
        while not ended.wait(0.1):
            started = time.monotonic()
            fleet.check()
            longest = max(longest, time.monotonic() - started)
        say(json.dumps([longest, *fleet.router.workers()]))
"""


class Fleet:
    """A process that has joined the cluster, started a fleet and checks it until its input ends."""

    def __init__(self, nodes: Nodes, args: Any, folder: Path) -> None:
        from buffer_rl.config import dump_args

        command = [sys.executable, "-c", FLEET, str(folder)]
        self.process = subprocess.Popen(
            command, env=nodes.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        print(dump_args(args), file=self.process.stdin, flush=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> list[Any]:
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return out.splitlines()


def test_an_engine_whose_actor_or_node_dies_is_gone_and_is_replaced_on_a_node_that_has_room(
    nodes: Nodes, options_in: Any, tmp_path: Path
) -> None:
    nodes.add(HEAD)
    nodes.add(SECOND, {"engine": 1})
    nodes.add(THIRD, {"engine": 1})
    args = options_in(tmp_path / "run", rollout_num_engines=2, ray_address=nodes.address)
    fleet = Fleet(nodes, args, tmp_path / "run")
    try:
        router, *engines = json.loads(fleet.line())
        assert router.startswith(f"http://{HEAD}:")
        assert {url.rpartition(":")[0] for url in engines} == {f"http://{SECOND}", f"http://{THIRD}"}
        on = {0: engines[0].split("/")[2].split(":")[0], 1: engines[1].split("/")[2].split(":")[0]}

        t = time.monotonic()
        servers = nodes.processes(SERVER)
        assert len(servers) == 2
        hosts = {process.pid: process for process in nodes.processes("ray::EngineHost")}
        assert len(hosts) == 2
        victim = servers[0]
        os.kill(victim.parent, signal.SIGKILL)
        assert holds_within(5, lambda: not victim.alive())
        print("actor killed", time.monotonic() - t)
        print(fleet.line(), time.monotonic() - t)
        print(fleet.line(), time.monotonic() - t)
        t = time.monotonic()
        nodes.remove(THIRD)
        for _ in range(2):
            print(fleet.line(), time.monotonic() - t)
        print(nodes.processes(SERVER))
        nodes.add(FOURTH, {"engine": 1})
        print(fleet.line(), time.monotonic() - t)
    finally:
        print(fleet.end())
