"""Weights by broadcast to real engines, killed at every bucket, on either side."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.embedded.launcher import launch
from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.protocol import EMBEDDED, ServerInfo
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import Topology
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.train.model import Model, weight_buckets
from buffer_rl.train.pretrained import load_model
from buffer_rl.weights.distributed import DistributedSender, DistributedTransport, chosen_backend, join_group
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import local_senders
from harness.processes import holds_within

pytestmark = pytest.mark.timeout(300)

BUCKET_BYTES, NUM_BUCKETS = 110_000, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one shape: the first is what the engines start with."""
    base = tmp_path_factory.mktemp("models")
    return [make_tiny_model(base / str(seed), seed=seed) for seed in range(2)]


def buckets_of(folder: str) -> list[dict[str, torch.Tensor]]:
    weights = dict(Model(load_model(folder, torch.device("cpu"), "folder")).weights())
    buckets = list(weight_buckets(weights.items(), BUCKET_BYTES))
    assert len(buckets) == NUM_BUCKETS
    return buckets


def checksum(folder: str) -> str:
    """What an engine that serves the folder's weights says of them."""
    model = LoadedModel(LoadOptions(model_path=folder))
    return str(checksum_answer(model.decoder.named_weights())["per_engine_checksum"])


@pytest.fixture
def fleet(folders: list[str], tmp_path: Path, forked_processes: None) -> Iterator[EngineFleet]:
    """Two engines. An engine that dies is replaced."""
    args: Any = compose(CORE_SECTIONS)(
        hf_checkpoint=folders[0],
        run_dir=str(tmp_path),
        rollout_num_engines=2,
        engine_device="cpu",
        engine_max_restarts=NUM_BUCKETS + 1,
        update_weights_timeout_s=30.0,
    )
    end = threading.Event()

    def watch() -> None:
        while not end.wait(0.05):
            running.check()

    with EngineFleet(args, str(tmp_path), launch) as running:
        running.wait_ready()
        watcher = threading.Thread(target=watch)
        watcher.start()
        yield running
        end.set()
        watcher.join()


@pytest.mark.slow
def test_an_engine_that_is_killed_at_any_bucket_leaves_the_others_with_the_whole_version_and_is_replaced(
    fleet: EngineFleet, folders: list[str]
) -> None:
    checksums = [checksum(folder) for folder in folders]
    victim: dict[str, Any] = {}

    class KillingSender(DistributedSender):
        def broadcast(self, buckets: Iterator[Mapping[str, torch.Tensor]], name: str) -> None:
            super().broadcast(killing(buckets), name)

    class Killing(DistributedTransport):
        sender = KillingSender

    def killing(buckets: Iterator[Mapping[str, torch.Tensor]]) -> Iterator[Mapping[str, torch.Tensor]]:
        for index, bucket in enumerate([*buckets, None]):
            if index == victim.get("bucket"):
                os.kill(victim.pop("engine").process.pid, signal.SIGKILL)
                del victim["bucket"]
            if bucket is not None:
                yield bucket

    sent = [0]
    exports: list[list[dict[str, torch.Tensor]]] = [buckets_of(folder) for folder in folders]
    trainer = local_senders(Killing, fleet._args, lambda: iter(exports[sent[0]]))
    control, notices = fleet.control(30.0), []
    publisher = Publisher(Killing(fleet._args), trainer, control, first_pause_s=0.0, notice=notices.append)
    publisher.publish(1)
    for kill_at in range(NUM_BUCKETS + 1):
        version, sent[0] = kill_at + 2, (kill_at + 1) % 2
        lost = fleet.engines[0]
        victim.update(bucket=kill_at, engine=lost)
        publisher.publish(version)
        assert not victim
        assert control.targets() == [url for url in control.targets() if url != lost.url]
        assert set(control.versions().values()) == {str(version)}
        assert set(control.checksums().values()) == {checksums[sent[0]]}
        assert holds_within(60, lambda number=kill_at + 1: waiting(fleet) == number), (
            "the replacement waits for weights"
        )
    assert notices, "no attempt failed"
    publisher.publish(99)
    assert list(control.versions().values()) == ["99", "99"]
    assert set(control.checksums().values()) == {checksums[sent[0]]}


def waiting(fleet: EngineFleet) -> int:
    """How often a replacement has begun to wait for a publication."""
    log = Path(fleet._args.run_dir) / "logs" / "fleet.log"
    return log.read_text().count("waits for the next weights") if log.exists() else 0


@pytest.mark.slow
def test_a_group_that_cannot_be_made_is_an_error_of_the_engines_and_is_made_at_the_next_attempt(
    fleet: EngineFleet, folders: list[str]
) -> None:
    class Once(DistributedSender):
        failures = 0

        def join(self, buckets: Any, name: str, world_size: int, backend: Any) -> None:
            if not self.failures:
                self.failures, self._rendezvous = 1, None  # the sender stops listening before the engines have joined
                raise EngineError("it does not join")
            super().join(buckets, name, world_size, backend)

    class Failing(DistributedTransport):
        sender = Once

    notices: list[str] = []
    control = fleet.control(30.0)
    trainer = local_senders(Failing, fleet._args, lambda: iter(buckets_of(folders[1])))
    publisher = Publisher(Failing(fleet._args), trainer, control, first_pause_s=0.0, notice=notices.append)
    publisher.publish(1)
    assert len(notices) == 1
    assert set(control.checksums().values()) == {checksum(folders[1])}


def test_nccl_is_for_a_trainer_and_servers_that_are_all_on_gpus() -> None:
    gpu = ServerInfo.parse({"device": "cuda", "tp_size": 2}, "a")
    cpu, silent = ServerInfo.parse({"device": "cpu"}, "b"), ServerInfo.parse({}, "c")
    embedded = ServerInfo.parse({"engine": EMBEDDED, "device": "cuda"}, "d")
    assert chosen_backend([gpu, gpu], on_gpu=True) == "nccl"
    assert chosen_backend([gpu], on_gpu=False) == "gloo"
    assert {chosen_backend([gpu, other], on_gpu=True) for other in (cpu, silent, embedded)} == {"gloo"}


def test_each_engine_has_as_many_ranks_of_the_group_as_it_has_tensor_parallel_ones() -> None:
    class Noting(EngineControlClient):
        asked: Mapping[str, Any]

        def post(self, path: str, *_: Any, each: Any = None, **__: Any) -> None:
            self.asked = each

    control = Noting(["a", "b", "c"])
    join_group(control, "127.0.0.1", 5, {"a": 2, "b": 4, "c": 1}, name="w", timeout_s=1.0)
    assert {url: body["rank_offset"] for url, body in control.asked.items()} == {"a": 1, "b": 3, "c": 7}
    assert {body["world_size"] for body in control.asked.values()} == {8}


def test_the_next_bucket_is_gathered_while_one_is_sent_and_all_are_gathered_after_a_failure() -> None:
    class Slow:
        """A group whose first broadcast ends when the second bucket was gathered."""

        device = "cpu"

        def __init__(self, fails: bool) -> None:
            self.fails, self.second, self.sent, self.closed = fails, threading.Event(), 0, False

        def send(self, tensors: list[torch.Tensor], timeout_s: float, **_: Any) -> None:
            assert self.second.wait(60)
            self.sent += 1
            if self.fails:
                raise EngineError("broken")

        def close(self) -> None:
            self.closed = True

    for fails in (False, True):
        sender, group = DistributedSender(compose(CORE_SECTIONS)(), Topology(dp_rank=0, dp_size=1)), Slow(fails)
        sender._groups["w"] = group  # type: ignore[assignment]

        def gathered(group: Slow = group) -> Iterator[dict[str, torch.Tensor]]:
            yield {"a": torch.ones(1)}
            group.second.set()
            yield {"b": torch.ones(1)}
            yield {"c": torch.ones(1)}

        buckets = gathered()
        if fails:
            with pytest.raises(EngineError, match="broken"):
                sender.broadcast(buckets, "w")
        else:
            sender.broadcast(buckets, "w")
        assert next(buckets, None) is None
        assert (group.sent, group.closed) == ((1, True) if fails else (3, False))
