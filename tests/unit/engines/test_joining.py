"""Replacements that come while one version after another is published: the weights that they start with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.registry import EngineRegistry, EngineState, Published, Replica
from buffer_rl.engines.supervisor import Supervisor
from buffer_rl.errors import EngineError
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import local_senders
from harness.processes import holds_within


@pytest.fixture(autouse=True)
def deaths_show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_rl.engines.registry.DEATH_TIMEOUT_S", 0.02)


class Process:
    """The process of a fake engine, which ends when the test says so. loaded: ``(version named, version in the
    folder)`` of each update that it answered."""

    def __init__(self, stack: ExitStack) -> None:
        self.engine = stack.enter_context(FakeEngine(version=0))
        self.url = self.engine.url
        self.failure: EngineError | None = None

    def wait_ready(self, timeout_s: float) -> None:
        return

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        return

    def loaded(self) -> list[int]:
        return [int(update["weight_version"]) for update in self.engine.log.updates]


class Router:
    """Lists whatever it is told to."""

    def add(self, url: str, timeout_s: float) -> None:
        return

    def remove(self, url: str) -> None:
        return


class Trainer:
    """version: what it has; its one weight is that number."""

    def __init__(self) -> None:
        self.version = 0

    def export(self) -> Iterator[dict[str, torch.Tensor]]:
        yield {"number": torch.tensor(self.version)}


@contextmanager
def fleet(folder: Path) -> Iterator[tuple[EngineRegistry, list[Process], Publisher, EngineControlClient, Trainer]]:
    """Two engines, whose replacements are in the list as well, and a publisher by disk."""
    with ExitStack() as stack:
        processes = [Process(stack), Process(stack)]
        replicas = [Replica(index=i, engine=one, state=EngineState.SERVING) for i, one in enumerate(processes)]
        registry = EngineRegistry(replicas=replicas)
        control = EngineControlClient(registry, timeout_s=30.0)
        stack.callback(control.close)

        def launch(index: int, log_name: str) -> Process:
            processes.append(Process(stack))
            return processes[-1]

        args: Any = SimpleNamespace(
            run_dir=str(folder),
            update_weight_disk_dir=None,
            publish_delta=False,
            hf_checkpoint=str(folder),
            engine_max_restarts=100,
            engine_start_timeout_s=30.0,
            update_weights_timeout_s=30.0,
            engine_api_key=None,
            rollout_external_engine_addrs=[],
        )
        router: Any = Router()
        supervisor = Supervisor(args, registry, router, launch, lambda line: None)
        trainer = Trainer()
        senders = local_senders(DiskTransport, args, trainer.export)
        publisher = Publisher(DiskTransport(args), senders, control, first_pause_s=0.0)
        supervisor.start()
        try:
            yield registry, processes, publisher, control, trainer
        finally:
            supervisor.stop()
            supervisor.join()


def joined(registry: EngineRegistry, number: int) -> bool:
    return len(registry.in_state(EngineState.SERVING)) == number


def test_a_replacement_that_comes_in_a_publication_takes_its_version_and_not_the_one_before(tmp_path: Path) -> None:
    with fleet(tmp_path) as (registry, processes, publisher, control, trainer):
        trainer.version = 1
        publisher.publish(1)
        control.pause()  # of the publication of version 2
        processes[1].failure = EngineError("it was killed", where="1")
        assert holds_within(60, lambda: bool(registry.in_state(EngineState.LOADING)))
        folder = tmp_path / "weights" / "v000002"
        control.update_weights_from_disk(str(folder), 2)
        folder.mkdir()
        control.versions()
        assert processes[2].loaded() == []
        control.resume()
        assert holds_within(60, lambda: joined(registry, 2))
        assert processes[2].loaded() == [2]
        assert registry.published == Published(version="2", folder=str(folder))


def test_replacements_that_come_at_any_time_serve_the_published_version_or_a_newer_one(tmp_path: Path) -> None:
    end = threading.Event()
    with fleet(tmp_path) as (registry, processes, publisher, _, trainer):
        trainer.version = 1
        publisher.publish(1)

        def publish() -> None:
            while not end.is_set():
                trainer.version += 1  # it is ahead of the engines until the publication
                publisher.publish(trainer.version)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for number in range(2, 8):
                published = registry.published
                assert published is not None
                processes[-1].failure = EngineError("it was killed", where=str(number))
                assert holds_within(60, lambda: len(processes) == number + 1 and joined(registry, 2))  # noqa: B023
                with registry.publication:
                    newest = registry.published
                    assert newest is not None
                    serve = {replica.url for replica in registry.in_state(EngineState.SERVING)}
                    versions = [one.engine.version for one in processes if one.url in serve]
                assert versions == [int(newest.version)] * 2
                assert min(processes[-1].loaded()) >= int(published.version)
        finally:
            end.set()
            thread.join()
        for process in processes:
            assert process.loaded() == sorted(process.loaded())
            for update in process.engine.log.updates:
                assert Path(update["model_path"]).name == f"v{int(update['weight_version']):06d}"
        newest = registry.published
        assert newest is not None
        assert newest.folder is not None
        assert load_file(Path(newest.folder, "model-00001.safetensors"))["number"] == int(newest.version)


def test_a_version_that_is_older_than_one_that_was_published_is_refused(tmp_path: Path) -> None:
    with fleet(tmp_path) as (registry, processes, publisher, _, trainer):
        trainer.version = 2
        publisher.publish(2)
        publisher.publish(2)  # engines alone have lost it
        with pytest.raises(AssertionError, match="version 1 after version 2"):
            publisher.publish(1)
        assert [one.engine.version for one in processes] == [2, 2]
        assert registry.published == Published(version="2", folder=str((tmp_path / "weights" / "v000002").absolute()))
