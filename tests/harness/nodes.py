"""A Ray cluster of several nodes on this machine, each with a loopback address of its own; on Linux all of 127/8 is
there. It lives in a child process, which keeps Ray's token and its connections out of the tests' process."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from buffer_rl.cluster.fork_server import SOCKET_VARIABLE
from harness.processes import Process, descendants


class Nodes:
    """The cluster; a context manager. folder: each node works in a folder of its own in it.

    environment: of a process that joins it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own.pop(SOCKET_VARIABLE, None)  # other machines have none
        tests = Path(__file__).parents[1]
        path = os.pathsep.join([str(tests.parent), str(tests)])
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self.environment = {**own, **auth, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.address = ""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.nodes", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.communicate(timeout=60)  # it ends the cluster when nothing more is to be read

    def add(self, address: str, cpus: int) -> None:
        """Add a node, whose CPUs are what Ray counts; the first one is the head."""
        self.address = self._ask({"add": address, "cpus": cpus})

    def remove(self, address: str) -> None:
        """Kill the node's own processes; Ray ends its workers."""
        self._ask({"remove": address})

    def processes(self, name: str) -> list[Process]:
        """Those whose command has ``name`` in it, of all nodes."""
        assert self._process is not None
        return [process for process in descendants(self._process.pid) if name in process.command]

    def node_of(self, process: Process) -> str:
        """The address of the node that the process is of."""
        assert self._process is not None
        table = {found.pid: found for found in descendants(self._process.pid)}
        while "/raylet/raylet " not in process.command:
            process = table[process.parent]
        return process.command.partition("--node_ip_address=")[2].split()[0]

    def _ask(self, request: Mapping[str, Any]) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "log").read_text()[-2000:]
        return answer.strip()


def _serve(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster, nodes = Cluster(), {}
    head = {"_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}}
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "remove" in request:
                cluster.remove_node(nodes.pop(request["remove"]), allow_graceful=False)
            else:
                place = folder / request["add"]
                place.mkdir(exist_ok=True)
                os.chdir(place)
                nodes[request["add"]] = cluster.add_node(
                    node_ip_address=request["add"],
                    num_cpus=request["cpus"],
                    object_store_memory=100_000_000,
                    include_dashboard=False,
                    **({} if nodes else head),
                )
            print(cluster.address, file=answers, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
