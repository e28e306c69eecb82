"""The weight transport of examples/weight_transports with real engines, killed at every bucket, on either side."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer_rl.config import compose
from buffer_rl.engine.embedded.launcher import launch
from buffer_rl.engine.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.engine.fleet import EngineFleet
from buffer_rl.errors import EngineError
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.plugins import PluginRegistry
from buffer_rl.testing.fake_roles import local_senders
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.train.model import hf_state, load_model, weight_buckets
from buffer_rl.weights.publish import Publisher
from harness.processes import holds_within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GLOO = f"{Path(__file__).resolve().parents[3] / 'examples' / 'weight_transports' / 'gloo_broadcast.py'}:GlooBroadcast"
TRANSPORT: Any = PluginRegistry().resolve("weight_transport", GLOO)
BUCKET_BYTES, NUM_BUCKETS = 110_000, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one shape: the first is what the engines start with."""
    base = tmp_path_factory.mktemp("models")
    return [make_tiny_model(base / str(seed), seed=seed) for seed in range(2)]


def buckets_of(folder: str) -> list[dict[str, torch.Tensor]]:
    weights = hf_state(load_model(folder, torch.device("cpu"), "folder"))
    buckets = list(weight_buckets(weights.items(), BUCKET_BYTES))
    assert len(buckets) == NUM_BUCKETS
    return buckets


def checksum(folder: str) -> str:
    """What an engine that serves the folder's weights says of them."""
    model = LoadedModel(LoadOptions(model_path=folder))
    return str(checksum_answer(model.decoder.named_weights())["per_engine_checksum"])


@pytest.fixture
def fleet(folders: list[str], tmp_path: Path) -> Iterator[EngineFleet]:
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


def test_an_engine_that_is_killed_at_any_bucket_leaves_the_others_with_the_whole_version_and_is_replaced(
    fleet: EngineFleet, folders: list[str]
) -> None:
    checksums = [checksum(folder) for folder in folders]
    victim: dict[str, Any] = {}

    class KillingSender(TRANSPORT.sender):  # type: ignore[misc]
        def broadcast(self, buckets: Iterator[dict[str, torch.Tensor]]) -> None:
            super().broadcast(killing(buckets))

    class Killing(TRANSPORT):  # type: ignore[misc]
        sender = KillingSender

    def killing(buckets: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
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


def test_a_group_that_cannot_be_made_is_an_error_of_the_engines_and_is_made_at_the_next_attempt(
    fleet: EngineFleet, folders: list[str]
) -> None:
    class Once(TRANSPORT.sender):  # type: ignore[misc]
        failures = 0

        def join(self, buckets: Any, name: str, world_size: int) -> None:
            if not self.failures:
                self.failures, self._rendezvous = 1, None  # the sender stops listening before the engines have joined
                raise EngineError("it does not join")
            super().join(buckets, name, world_size)

    class Failing(TRANSPORT):  # type: ignore[misc]
        sender = Once

    notices: list[str] = []
    control = fleet.control(30.0)
    trainer = local_senders(Failing, fleet._args, lambda: iter(buckets_of(folders[1])))
    publisher = Publisher(Failing(fleet._args), trainer, control, first_pause_s=0.0, notice=notices.append)
    publisher.publish(1)
    assert len(notices) == 1
    assert set(control.checksums().values()) == {checksum(folders[1])}
