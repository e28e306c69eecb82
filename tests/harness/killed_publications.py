"""Publications in which a process is killed: two real engines, a sender in a process of its own, requests all the time.

The sender has weights from a folder; versions alternate between two sets of weights, whose checksums and greedy answers
are known. The killed process dies at a bucket that it sends, or before one of the calls that a publication makes to the
engines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.calling import Call
from buffer_rl.embedded.launcher import EmbeddedEngine, launch
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.registry import EngineRegistry, EngineState, Replica
from buffer_rl.errors import WorkerDiedError
from buffer_rl.options.section import compose, dump_args, load_args
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Topology
from buffer_rl.trainer.model import weight_buckets
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.sender import RankSender, Senders
from harness.fake_roles import of_one_rank
from harness.processes import holds_within
from harness.scripts import start_script

TIMEOUT_S = 60.0
STDERR = 2
BUCKET_BYTES = 80_000
PAUSE_S = 0.01  # between two requests: two processors have to do for all processes
PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


# -- the trainer's side ------------------------------------------------------------------------------


def buckets_of(folder: str, kill_at: int | None = None) -> Iterator[dict[str, Any]]:
    """A folder's weights; the process is killed before bucket ``kill_at``, of which the one after the last ends it."""
    number = 0
    for number, bucket in enumerate(weight_buckets(load_file(Path(folder, "model.safetensors")).items(), BUCKET_BYTES)):
        _kill_if(number == kill_at)
        yield bucket
    _kill_if(number + 1 == kill_at)


def _kill_if(reached: bool) -> None:
    if reached:
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection, transport: str, args_text: str) -> None:
    args: Any = load_args(args_text)
    factory = PluginRegistry().resolve("weight_transport", transport)
    sender = RankSender(transport, factory, args, Topology(dp_rank=0, dp_size=1))
    while True:
        try:
            folder, kill_at, method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((sender(method, buckets_of(folder, kill_at), *arguments), None))
        except Exception as error:  # fault boundary: the error of a call is its answer
            connection.send((None, error))


class SenderProcess:
    """A trainer's rank without a trainer. folder: of the weights that it sends. kill: a method of the sender and the
    bucket at which the process dies in it."""

    def __init__(self, transport: str, args_text: str) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            words = [__file__, str(theirs.fileno()), transport, args_text]
            self._process = start_script(words, STDERR, pass_fds=[theirs.fileno()])
        self._calls = ThreadPoolExecutor(1)
        self.folder = ""
        self.kill: tuple[str, int] | None = None

    def start(self, method: str, *arguments: Any) -> Call:
        """Call the sender."""
        return of_one_rank(self._calls.submit(self._call, method, arguments))

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        kill_at = self.kill[1] if self.kill is not None and self.kill[0] == method else None
        try:
            self._connection.send((self.folder, kill_at, method, arguments))
            answer, error = self._connection.recv()
        except (EOFError, OSError) as gone:
            self._process.wait()  # its end of the pipe closes before it can be reaped
            raise WorkerDiedError("the sender was killed", where="the sender") from gone
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    @property
    def dead(self) -> bool:
        """Whether it was killed."""
        return self._process.poll() is not None


# -- the engines' side -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request got. versions: of its tokens."""

    versions: frozenset[int]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]

    def is_like(self, other: Answer) -> bool:
        """Whether both are of the same weights: log-probabilities of a request that was retracted may be rounded
        differently."""
        rounding = 64 * float(np.finfo(np.float32).eps)  # of sums of float32; other weights differ by more than 0.1
        return self.tokens == other.tokens and bool(np.allclose(self.log_probs, other.log_probs, rtol=rounding, atol=0))


class Client(threading.Thread):
    """Asks one engine the same, again and again, until the engine is gone."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(name="client", daemon=True)
        self.engine = engine
        self.answers: list[Answer] = []

    def run(self) -> None:
        body = json.dumps({"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}).encode()
        while True:
            try:
                with urllib.request.urlopen(f"{self.engine.url}/generate", body, timeout=10 * TIMEOUT_S) as raw:
                    answer = json.load(raw)
            except (OSError, ValueError):  # the engine was killed
                return
            meta = answer["meta_info"]
            versions = frozenset(int(span["version"]) for span in meta["weight_versions"])
            log_probs = tuple(entry[0] for entry in meta["output_token_logprobs"])
            self.answers.append(Answer(versions, tuple(answer["output_ids"]), log_probs))
            time.sleep(PAUSE_S)


class CountsCalls:
    """Has ``before_call`` see the number of each control call, from 1."""

    before_call: Callable[[int], None]
    num_calls = 0
    was_paused = False

    def pause(self, mode: str = "retract") -> None:
        self.was_paused = True
        super().pause(mode)  # type: ignore[misc]  # of the client beside it

    def _run(self, call: Any) -> Any:
        self.num_calls += 1
        self.before_call(self.num_calls)
        return super()._run(call)  # type: ignore[misc]  # as above


class CountedClient(CountsCalls, EngineControlClient):
    """Engines that are not replaced."""


class CountedFleet(CountsCalls, EngineControlClient):
    """Engines of the run's own."""


class Trial:
    """Publications of one transport to two engines, version after version. own: the engines are the run's own.

    folders: of the weights of even and of odd versions; engines start with the former, as version 0. A killed process
    is replaced by ``repair``. publish_delta: what changed is sent where all have the version before.
    """

    def __init__(
        self, transport: str, folders: tuple[str, str], folder: Path, *, own: bool, publish_delta: bool = False
    ) -> None:
        self.own, self.folders, self.version = own, folders, -1
        self.args: Any = compose(CORE_SECTIONS)(
            hf_checkpoint=folders[0], run_dir=str(folder), rollout_num_engines=2, deterministic=True,
            weight_sync_mode=transport, update_weights_timeout_s=TIMEOUT_S, engine_device="cpu",
            publish_delta=publish_delta,
        )  # fmt: skip
        self._factory: Any = PluginRegistry().resolve("weight_transport", transport)
        self.registry = EngineRegistry()
        self._started = 0
        self.clients = [self._client(engine, EngineState.SERVING) for engine in [self._launch(0), self._launch(1)]]
        self.sender = SenderProcess(transport, dump_args(self.args))
        self.checksums: dict[int, str] = {}
        self.expected: dict[int, Answer] = {}
        self._open()
        for version in range(2):
            self.publish()
            wanted = frozenset({version})
            assert holds_within(TIMEOUT_S, lambda wanted=wanted: all(self._newest(c) == wanted for c in self.clients))
            (self.checksums[version],) = set(self.control.checksums().values())
            self.expected[version] = self.clients[0].answers[-1]
        assert self.checksums[0] != self.checksums[1]
        assert self.expected[0].tokens != self.expected[1].tokens

    def _newest(self, client: Client) -> frozenset[int]:
        return client.answers[-1].versions if client.answers else frozenset()

    def _launch(self, index: int) -> EmbeddedEngine:
        self._started += 1
        return launch(self.args, index, str(Path(self.args.run_dir, "logs", f"engine_{self._started}.log")))

    def _client(self, engine: EmbeddedEngine, state: EngineState) -> Client:
        engine.wait_ready(TIMEOUT_S)
        self.registry.add(Replica(index=len(self.registry.all()), engine=engine, state=state))
        client = Client(engine)
        client.start()
        return client

    def _open(self) -> None:
        """Another publisher, with no call counted."""
        self.control: Any = (
            CountedFleet(self.registry, timeout_s=TIMEOUT_S)
            if self.own
            else CountedClient([client.engine.url for client in self.clients], timeout_s=TIMEOUT_S)
        )
        self.control.before_call = lambda number: None
        transport = self._factory(self.args)
        senders = Senders(self.sender.start)
        self.publisher = Publisher(transport, senders, self.control, first_pause_s=0.0)

    def reopen(self) -> None:
        """Another publisher in place of the one before: its next publication begins by connecting both sides."""
        self.control.before_call = lambda number: None
        self.publisher.close()
        self.control.close()
        self._open()

    def publish(self) -> None:
        """Publish the next version."""
        self.version += 1
        self.sender.folder, self.control.was_paused = self.folders[self.version % 2], False
        self.publisher.publish(self.version)

    def kill_before_call(self, number: int, victim: Callable[[], None]) -> None:
        """Have ``victim`` kill before call ``number`` of the publications from now on."""
        self.control.num_calls = 0
        self.control.before_call = lambda reached: victim() if reached == number else None

    def kill_engine(self) -> None:
        """Kill engine 1."""
        process = self.clients[1].engine.process
        os.kill(process.pid, signal.SIGKILL)
        assert holds_within(TIMEOUT_S, lambda: not _lives(self.clients[1].engine))

    def check(self) -> None:
        """Raises AssertionError unless all that was answered, and what is served, is of whole versions, and an engine
        that was paused goes on with the newest version or not at all."""
        for client in self.clients:
            if _lives(client.engine):
                self._check_served(client)
            for answer in list(client.answers):
                assert answer.versions <= frozenset(range(self.version + 1)), answer
                if len(answer.versions) == 1:
                    assert answer.is_like(self.expected[next(iter(answer.versions)) % 2]), answer

    def _check_served(self, client: Client) -> None:
        with EngineControlClient([client.engine.url], timeout_s=TIMEOUT_S) as control:
            (version,), (checksum,) = control.versions().values(), control.checksums().values()
            assert checksum == self.checksums[int(version) % 2], f"version {version} is not whole"
            if self.is_paused(client):
                before = len(client.answers)
                control.checksums()  # a round through the thread that would generate
                assert len(client.answers) == before
            else:
                assert int(version) == self.version or not self.control.was_paused, f"it goes on with {version}"

    def is_paused(self, client: Client) -> bool:
        """Whether the engine is paused."""
        with urllib.request.urlopen(f"{client.engine.url}/server_info", timeout=TIMEOUT_S) as raw:
            return bool(json.load(raw)["paused"])

    def repair(self) -> None:
        """Replace what was killed, publish the next version, and see that both engines answer with it."""
        if not _lives(self.clients[1].engine):
            for dead in [replica for replica in self.registry.all() if replica.index == 1]:
                self.registry.remove(dead)
            self.clients[1].engine.stop()
            self.clients[1] = self._client(self._launch(1), EngineState.WAITING)
        if self.sender.dead:
            self.sender = SenderProcess(self.args.weight_sync_mode, dump_args(self.args))
        self.control.close()
        self._open()
        self.publish()
        wanted = frozenset({self.version})
        assert holds_within(TIMEOUT_S, lambda: all(self._newest(client) == wanted for client in self.clients))

    def close(self) -> None:
        """End all processes."""
        self.publisher.close()
        self.control.close()
        self.sender.end()
        for client in self.clients:
            client.engine.stop()


def _lives(engine: EmbeddedEngine) -> bool:
    try:
        engine.check()
    except Exception:  # fault boundary: whatever it says, it is gone
        return False
    return True


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), *sys.argv[2:])
