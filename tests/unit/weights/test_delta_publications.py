"""Fifty publications of what changed: every engine serves what a whole publication would give it, also one that joins
late, misses versions, dies, or has a fault in what it keeps or gets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.embedded.launcher import EmbeddedEngine, launch
from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.registry import EngineRegistry, EngineState, Replica
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.model import weight_buckets
from buffer_rl.weights.disk import DiskTransport, read_contents
from buffer_rl.weights.distributed import DistributedTransport
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import local_senders
from harness.sglang_service import launch_imitating_sglang

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_STEPS = 50
LR = 1e-5
"""Of weights with a standard deviation of 0.1: few of their bfloat16 numbers change."""
TRANSPORTS = [DiskTransport, DistributedTransport]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, forked_processes: None) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Control(EngineControlClient):
    """Engines that come and go. bases: of the updates that began."""

    def __init__(self) -> None:
        self.registry = EngineRegistry(replaces=False)
        super().__init__(self.registry, timeout_s=60.0)
        self.bases: list[str | None] = []

    def choose(self, engines: Sequence[EmbeddedEngine]) -> None:
        """Those that are there now."""
        self.registry.replicas = [
            Replica(index=index, engine=engine, state=EngineState.SERVING) for index, engine in enumerate(engines)
        ]

    def begin_weight_update(self, base: str | None = None) -> None:
        self.bases.append(base)
        super().begin_weight_update(base)


class Run:
    """A trainer's weights in float32, steps of them, and engines in bfloat16 that get them by a transport."""

    def __init__(self, transport: Any, folder: str, path: Path) -> None:
        self.args: Any = compose(CORE_SECTIONS)(
            hf_checkpoint=folder, run_dir=str(path), engine_device="cpu", engine_dtype="bfloat16", publish_delta=True
        )
        self.engines: list[EmbeddedEngine] = []
        self.notices: list[str] = []
        self.weights = load_file(Path(folder, "model.safetensors"))
        self.version, self._random = 0, torch.Generator().manual_seed(0)
        self.sent_share: float | None = None
        self._whole = LoadedModel(LoadOptions(model_path=folder, dtype="bfloat16"))
        self.spoils = False

        class Sender(transport.sender):  # type: ignore[misc]  # whichever it is
            def write_held(own, *arguments: Any) -> None:
                self.spoiling(own, super().write_held, arguments)

            def broadcast_held(own, *arguments: Any) -> None:
                self.spoiling(own, super().broadcast_held, arguments)

        class Spoiling(transport):  # type: ignore[misc]  # as above
            sender = Sender

        self.control, self.transport = Control(), Spoiling(self.args)
        senders = local_senders(Spoiling, self.args, lambda: weight_buckets(self.weights.items(), 80_000))
        self.publisher = Publisher(
            self.transport, senders, self.control, first_pause_s=0.0, notice=self.notices.append, compare=True
        )

    def spoiling(self, sender: Any, send: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Send with one bit of the delta flipped, if that is asked for."""
        if not self.spoils:
            return send(*arguments)
        values = next(part for part in sender._held._delta[0].items() if part[0].endswith(":values"))[1]
        bits = values.view(torch.int16)
        bits[0] ^= 1
        try:
            return send(*arguments)
        finally:
            bits[0] ^= 1
            self.spoils = False

    def engine(self, launcher: Any = launch) -> EmbeddedEngine:
        """Another one."""
        number = len(self.engines)
        self.engines.append(launcher(self.args, number, str(Path(self.args.run_dir, f"engine_{number}.log"))))
        self.engines[-1].wait_ready(120)
        return self.engines[-1]

    def step(self, *engines: EmbeddedEngine) -> None:
        """An optimizer step, its publication, and the comparison of the engines with a whole one."""
        self.weights = {
            name: tensor + LR * torch.randn(tensor.shape, generator=self._random)
            for name, tensor in sorted(self.weights.items())
        }
        self.version += 1
        self.control.choose(engines)
        self.sent_share = self.publisher.publish(self.version).get("perf/publish_sent_share")
        self._whole.replace(self.weights)
        wanted = checksum_answer(self._whole.decoder.named_weights())["per_engine_checksum"]
        assert set(self.control.checksums().values()) == {wanted}
        assert set(self.control.versions().values()) == {str(self.version)}

    def close(self) -> None:
        self.publisher.close()
        self.control.close()
        for engine in self.engines:
            engine.stop()


@pytest.fixture
def start(folder: str, tmp_path: Path) -> Iterator[Callable[[Any], Run]]:
    runs: list[Run] = []

    def start_run(transport: Any) -> Run:
        runs.append(Run(transport, folder, tmp_path))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_that_join_late_die_and_miss_versions_serve_what_a_whole_publication_gives(
    start: Callable[[Any], Run], transport: Any
) -> None:
    run = start(transport)
    first, second = run.engine(), run.engine()
    whole = []
    for step in range(1, NUM_STEPS + 1):
        if step == 8:
            late = run.engine()
        if step == 30:
            os.kill(second.process.pid, signal.SIGKILL)
        if step == 33:
            second = run.engine()
        if step == 40:
            run.spoils = True
        engines = [first] if step in range(30, 33) else [first, second]
        run.step(*engines, *([late] if step in range(8, 15) or step >= 22 else []))
        assert len(run.notices) == (step >= 40), run.notices
        if transport is DiskTransport:
            contents = read_contents(run.transport._target(run.version))
            assert contents is not None
            whole += [step] if contents.base is None else []
            is_whole = contents.base is None
        else:
            is_whole = run.control.bases[-1] is None
        assert run.sent_share is not None
        assert run.sent_share == 1 if is_whole else 0 < run.sent_share < 0.5
    assert "digest" in run.notices[0]
    if transport is DiskTransport:  # engines read what they lack; the deltas are together as large as a version once
        expected = [1, 40]
        assert [step for step in whole if step in expected] == expected
        assert len(whole) <= 6
    else:
        sent = [base is None for base in run.control.bases]
        # The first; an engine that joins, that missed versions, that is new; after the fault.
        assert sent.count(True) == 5
        assert len(sent) == NUM_STEPS + 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_takes_whole_tensors_gets_them_and_so_do_those_beside_it(
    start: Callable[[Any], Run], transport: Any
) -> None:
    run = start(transport)
    ours, theirs = run.engine(), run.engine(launch_imitating_sglang)
    for engines in [[ours], [ours], [ours, theirs], [ours, theirs]]:
        run.step(*engines)
        assert (run.sent_share is None) == (theirs in engines)
    assert run.notices == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_version_that_is_published_once_more_reaches_an_engine_that_came_since(
    start: Callable[[Any], Run], transport: Any
) -> None:
    run = start(transport)
    first = run.engine()
    run.step(first)
    run.step(first)
    run.control.chosen = [first, run.engine()]
    run.publisher.publish(run.version)
    assert len(set(run.control.checksums().values())) == 1
    assert run.notices == []
    if transport is DiskTransport:  # what is written already is read, and not written as a whole
        contents = read_contents(run.transport._target(run.version))
        assert contents is not None
        assert contents.base is not None
    run.step(*run.control.chosen)
