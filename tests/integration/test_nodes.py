"""Engines behind actors, on the nodes of a cluster: several on this machine, each with an address of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.cli import main
from buffer_rl.cluster.placement import Placement, cluster_nodes
from buffer_rl.engines.host import placed_launcher
from buffer_rl.errors import ConfigError, EngineError
from buffer_rl.kinds.engine import EngineProcess
from buffer_rl.options.section import dump_args
from harness.nodes import Nodes
from harness.processes import Process, descendants, holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
many_addresses = pytest.mark.skipif(sys.platform != "linux", reason="a machine has all of 127/8 on Linux only")

HEAD, SECOND, THIRD, FOURTH = (f"127.0.0.{number}" for number in range(2, 6))
LISTENING = "0A"
SERVER = "buffer_rl.embedded.server"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path / "nodes") as cluster:
        yield cluster


class Joined:
    """A process that has joined the cluster. It reads options and works with them; its lines are marked, as Ray says
    something in between."""

    def __init__(self, nodes: Nodes, program: str, args: Any, folder: Path) -> None:
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=folder,
            env=nodes.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.send(dump_args(args))

    def send(self, line: str) -> None:
        """A line for it to read."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def next_line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if line.startswith("said: "))[6:].strip()

    def end(self) -> str:
        """Ends its input and waits for its end. Returns its last line."""
        out, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, out
        return [line for line in out.splitlines() if line.startswith("said: ")][-1][6:]


FLEET = """
import json, sys, threading
from buffer_rl.cluster.placement import placed
from buffer_rl.cluster.session import ray_session
from buffer_rl.options.section import load_args
from buffer_rl.engines import host
from buffer_rl.engines.fleet import EngineFleet

args = load_args(sys.stdin.readline())

def say(line):
    print("said:", line, flush=True)

def stop_when_asked():
    sys.stdin.read()
    ended.set()

ended = threading.Event()
threading.Thread(target=stop_when_asked, daemon=True).start()
with ray_session(args.ray_address), placed(args, True, lambda line: None) as placement:
    args = host.at_this_node(args)
    with EngineFleet(args, args.run_dir, host.placed_launcher(placement, say), say) as fleet:
        fleet.wait_ready()
        say(json.dumps([fleet.router_url, *fleet.engine_urls]))
        while not ended.wait(0.1):
            fleet.check()
        say(json.dumps(list(fleet.router.workers())))
"""


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


@pytest.mark.slow
@many_addresses
def test_an_engine_whose_actor_or_node_dies_takes_its_server_along_and_is_replaced_where_there_is_room(
    nodes: Nodes, options_in: Any, tmp_path: Path
) -> None:
    nodes.add(HEAD, cpus=0)
    nodes.add(SECOND, cpus=1)
    nodes.add(THIRD, cpus=1)
    args = options_in(tmp_path / "run", rollout_num_engines=2, ray_address=nodes.address, debug_rollout_only=True)
    fleet = Joined(nodes, FLEET, args, tmp_path / "driver")
    router, *engines = json.loads(fleet.next_line())
    assert [address_of(url) for url in (router, *engines)] == [HEAD, SECOND, THIRD]
    first, second = sorted(nodes.processes(SERVER), key=lambda server: engines.index(server_url(server)))
    os.kill(first.parent, signal.SIGKILL)
    assert holds_within(60, lambda: not first.alive())
    line = fleet.next_line()
    assert line.startswith("engine 0: its process was killed (")
    assert f"engine_0.log on node {SECOND}); the run goes on with 1 engine while another one starts" in line
    assert fleet.next_line() == "engine 0 is back, with the initial weights"
    nodes.remove(THIRD)
    assert holds_within(60, lambda: not second.alive())
    line = fleet.next_line()
    assert line.startswith("engine 1")
    assert f"engine_1.log on node {THIRD}); the run goes on with 1 engine while another one starts" in line
    assert fleet.next_line().startswith("engine 1 waits for a node that has room for it (1 CPU on ")
    nodes.add(FOURTH, cpus=1)
    assert fleet.next_line() == "engine 1 is back, with the initial weights"
    assert {address_of(url) for url in json.loads(fleet.end())} == {SECOND, FOURTH}
    assert nodes.processes(SERVER) == []


PLACED = """
import sys, time
from buffer_rl.cluster.placement import is_node_gone, placed
from buffer_rl.cluster.session import ray_session
from buffer_rl.options.section import load_args

args = load_args(sys.stdin.readline())

def say(line):
    print("said:", line, flush=True)

with ray_session(args.ray_address):
    say("joined")
    sys.stdin.readline()
    with placed(args, True, say) as placement:
        node = placement.node_of("engine", 0)
        say("bundle" if "scheduling_strategy" in placement.options("engine", 0) else "any node")
        sys.stdin.readline()
        deadline = time.monotonic() + 60
        while not is_node_gone(node.node_id) and time.monotonic() < deadline:
            time.sleep(0.05)
        say("bundle" if "scheduling_strategy" in placement.options("engine", 0) else "any node")
"""


@pytest.mark.slow
@many_addresses
def test_devices_are_chosen_on_another_node_where_one_died_that_ray_still_lists_or_dies_later(
    nodes: Nodes, options_in: Any, tmp_path: Path
) -> None:
    nodes.add(HEAD, cpus=0)
    nodes.add(SECOND, cpus=1)
    nodes.add(THIRD, cpus=1)
    args = options_in(tmp_path / "run", ray_address=nodes.address, debug_rollout_only=True)
    driver = Joined(nodes, PLACED, args, tmp_path / "driver")
    assert driver.next_line() == "joined"
    nodes.remove(SECOND)
    driver.send("go on")
    notice = f"the node {SECOND} is gone: the devices of the run are chosen among the others"
    assert driver.next_line() == notice  # and so it was chosen at first
    role, row = driver.next_line(), driver.next_line()
    assert (role.split()[0], row.split()) == ("role", ["engine", "1", "1", "CPU", THIRD])
    assert driver.next_line() == "bundle"
    nodes.remove(THIRD)
    driver.send("go on")
    assert driver.end() == "any node"  # for a member that is started again


RUN = """
import sys
from buffer_rl.options.section import load_args
from buffer_rl.driver.launch import launch_training
from buffer_rl.plugin.registry import PluginRegistry

args = load_args(sys.stdin.readline())
print("said:", launch_training(args, PluginRegistry.from_flags(args.plugin)).steps, flush=True)
"""

GENERATE = """
import asyncio, json, time, urllib.request
from pathlib import Path

from buffer_rl.cluster.process import auth_headers
from buffer_rl.rollout.lease import current_lease
from buffer_rl.rollout.generate import generate


def loads(args):
    request = urllib.request.Request(f"{args.router_url}/workers", headers=auth_headers(args.engine_api_key))
    with urllib.request.urlopen(request, timeout=10) as response:
        return {worker["url"]: worker["load"] for worker in json.load(response)["workers"]}


def say_when_both_are_at_work(args):
    deadline = time.monotonic() + 60
    while min(loads(args).values()) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    Path(args.run_dir, "both_are_at_work").write_text("\\n".join(loads(args)))


tasks = []


async def long_in_rollout_1(args, sample, sampling_params):
    if current_lease().ticket.task == "train_1":
        sampling_params = {**sampling_params, "max_new_tokens": 450, "ignore_eos": True}
        if not tasks:
            tasks.append(asyncio.create_task(asyncio.to_thread(say_when_both_are_at_work, args)))
    if current_lease().ticket.task == "train_2" and Path(args.run_dir).name.startswith("without"):
        deadline = time.monotonic() + 60
        log = Path(args.run_dir, "logs", "fleet.log")
        while not log.exists() or "the run goes on" not in log.read_text():  # the run does not end before it is noticed
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    return await generate(args, sample, sampling_params)
"""
KEY = "the-key-of-these-runs"


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] != "perf"]


@pytest.mark.slow
@many_addresses
def test_a_run_on_three_nodes_goes_on_without_one_that_is_removed_and_ends_as_a_run_that_is_not_disturbed(
    nodes: Nodes, options_in: Any, tmp_path: Path
) -> None:
    for address in (HEAD, SECOND, THIRD):
        nodes.add(address, cpus=1)
    (tmp_path / "mine.py").write_text(GENERATE)

    def options(name: str, weight_sync_mode: str = "disk") -> Any:
        return options_in(
            tmp_path / name,
            ray_address=nodes.address,
            weight_sync_mode=weight_sync_mode,
            rollout_num_engines=2,
            rollout_worker_nodes=[THIRD],
            engine_api_key=KEY,
            engine_context_length=1024,
            custom_generate_function_path=f"{tmp_path / 'mine.py'}:long_in_rollout_1",
            deterministic=True,
            eval_prompt_data=[],
            eval_interval=None,
        )

    whole = Joined(nodes, RUN, options("whole"), tmp_path / "driver_of_whole")
    assert whole.end() == "3"
    # With an engine alone, and with an engine and the rollout worker. Both transports bring the same bits.
    for address, mode in ((SECOND, "distributed"), (THIRD, "disk")):
        run_dir = tmp_path / f"without_{address}_{mode}"
        run = Joined(nodes, RUN, options(run_dir.name, mode), tmp_path / f"driver_{run_dir.name}")
        assert holds_within(120, (run_dir / "both_are_at_work").exists)
        server = seen_in_their_places(nodes, run.process.pid)[address]
        nodes.remove(address)
        assert holds_within(60, lambda server=server: not server.alive())
        assert run.end() == "3"
        assert nodes.processes("ray::EngineHost") + nodes.processes(SERVER) == []
        ends_as(tmp_path / "whole", run_dir, gone=address)
        nodes.add(address, cpus=1)


def seen_in_their_places(nodes: Nodes, driver: int) -> dict[str, Process]:
    """Asserts where the processes of the run are. Returns the engines' servers by address."""
    places = {
        title: {nodes.node_of(process) for process in nodes.processes(f"ray::{title}")}
        for title in ("TrainRank", "RolloutWorker", "EngineHost")
    }
    assert places == {"TrainRank": {HEAD}, "RolloutWorker": {THIRD}, "EngineHost": {SECOND, THIRD}}
    servers = {}
    for server in nodes.processes(SERVER):
        # Of requests; in a weight group it also listens where the kernel sends from, which is 127.0.0.1 here.
        (own,) = {address for address, _ in listening(server.pid)} - {"127.0.0.1"}
        servers[own] = server
    assert {address: nodes.node_of(server) for address, server in servers.items()} == {SECOND: SECOND, THIRD: THIRD}
    mine = descendants(driver)
    (router,) = (process for process in mine if process.command == "sglang::router")
    assert {address for address, _ in listening(router.pid)} == {HEAD, "127.0.0.1"}  # the latter for its metrics
    assert not [process for process in [*mine, *nodes.processes(KEY)] if KEY in process.command]
    return servers


def ends_as(whole: Path, run_dir: Path, *, gone: str) -> None:
    """Asserts that the run without the node ``gone`` has the metrics, the groups and the weights of ``whole``."""
    said = (run_dir / "logs" / "fleet.log").read_text().splitlines()
    first = next(line for line in said if "the run goes on" in line)
    assert f"on node {gone}); the run goes on with 1 engine while another one starts" in first
    assert main(["ledger", "--verify", str(run_dir)]) == 0
    audit = LedgerAudit(run_dir / FILE_NAME)
    entries = [audit.entry(uid) for uid, _ in audit.states()]
    audit.close()
    trained = [entry for entry in entries if entry.state == "trained"]
    assert Counter(entry.step for entry in trained) == {1: 3, 2: 3, 3: 3}  # a uid has one entry
    # With the rollout worker on that node, its groups are leased again if it saw the engine fail before its own end.
    attempts = Counter(entry.attempt for entry in trained)
    assert attempts == {1: 9} or (gone == THIRD and attempts.keys() == {1, 2} and attempts[1] >= 6)
    # Where it had finished some of its groups before, the metrics of that rollout are of the second worker's groups.
    shared = gone == THIRD and attempts[1] > 6
    lines = [
        [line for line in metrics_of(folder) if not (shared and (line["kind"], line["step"]) == ("rollout", 1))]
        for folder in (run_dir, whole)
    ]
    assert lines[0] == lines[1]
    left, right = (load_file(folder / "hf" / "model.safetensors") for folder in (run_dir, whole))
    assert all(torch.equal(left[name], right[name]) for name in right)


LAUNCHERS = """
class Elsewhere:
    url = "http://192.0.2.1:1"

    def wait_ready(self, timeout_s):
        pass

    def check(self):
        pass

    def stop(self):
        with open(__file__ + ".stopped", "w"):
            pass


def elsewhere(args, index, log_path):
    return Elsewhere()


def refuses(args, index, log_path):
    raise RuntimeError(f"no license on {args.engine_host}")
"""


@pytest.fixture
def placed_engine(ray_cluster: None, make_options: Any, tmp_path: Path) -> Iterator[Any]:
    """``placed_engine(**options)``: an engine behind an actor of the tests' own Ray."""
    (tmp_path / "launchers.py").write_text(LAUNCHERS)
    with ExitStack() as stack:

        def start(launcher: str = "", **options: Any) -> EngineProcess:
            reference = {"rollout_engine": f"{tmp_path / 'launchers.py'}:{launcher}"} if launcher else {}
            args = make_options(**options, **reference)
            placement = Placement(args, cluster_nodes())
            engine = placed_launcher(placement)(args, 0, str(tmp_path / "logs" / "engine_0.log"))
            stack.callback(engine.stop)
            return engine

        yield start


def check_until_it_raises(engine: Any) -> None:
    holds_within(30, lambda: bool(engine.check()))


def test_the_error_of_a_server_that_ends_has_the_end_of_its_log_and_its_node(placed_engine: Any) -> None:
    engine = placed_engine(hf_checkpoint="/no/such/model")
    with pytest.raises(EngineError, match="/no/such/model") as caught:
        engine.wait_ready(60.0)
    assert "exited with status 1; the end of its log:\n" in caught.value.what
    assert caught.value.where.endswith("engine_0.log on node 127.0.0.1")
    with pytest.raises(EngineError, match="exited with status 1; the end of its log:"):
        check_until_it_raises(engine)


def test_what_a_launcher_raises_on_its_node_is_the_engines_error_and_it_reads_the_nodes_address(
    placed_engine: Any,
) -> None:
    engine = placed_engine("refuses")
    with pytest.raises(EngineError, match=r"RuntimeError: no license on 127\.0\.0\.1") as caught:
        engine.wait_ready(60.0)
    assert "launchers.py:refuses', engine 0 on node 127.0.0.1" in caught.value.where
    with pytest.raises(EngineError, match="no license"):
        check_until_it_raises(engine)


def test_an_engine_on_another_machine_is_refused_where_weights_go_through_memory(placed_engine: Any) -> None:
    engine = placed_engine("elsewhere")
    engine.wait_ready(60.0)
    assert engine.url == "http://192.0.2.1:1"
    with pytest.raises(ConfigError, match=r"the engine http://192\.0\.2\.1:1 is not on this machine"):
        placed_engine("elsewhere", weight_sync_mode="tensor").wait_ready(60.0)


def test_without_a_cluster_an_engine_listens_where_the_option_says(placed_engine: Any) -> None:
    with pytest.raises(EngineError, match=r"no license on 127\.0\.0\.7"):
        placed_engine("refuses", engine_host="127.0.0.7").wait_ready(60.0)


def test_an_engine_whose_process_has_answered_since_it_was_asked_is_ended_by_its_launcher(
    placed_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = placed_engine("elsewhere")
    engine.wait_ready(60.0)
    engine.check()
    monkeypatch.setattr("buffer_rl.engines.host.LATE_S", 0.0)
    wait([engine._probe], 60.0)
    engine.stop()
    assert (tmp_path / "launchers.py.stopped").exists()
