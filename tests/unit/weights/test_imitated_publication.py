"""Publication to an engine that takes weights as SGLang does: bucket by bucket, in a session that stays open."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.embedded.launcher import EmbeddedEngine
from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.model import weight_buckets
from buffer_rl.trainer.pretrained import load_model
from buffer_rl.weights.disk import DiskSender, DiskTransport
from buffer_rl.weights.distributed import DistributedTransport
from buffer_rl.weights.publish import ATTEMPTS, LogProbCheck, Publisher, TrainerLogProbs
from buffer_rl.weights.tensor import TensorTransport
from harness.fake_roles import local_senders
from harness.sglang_service import launch_imitating_sglang

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("models")
    return [make_tiny_model(base / f"seed-{seed}", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    args = compose(CORE_SECTIONS)(hf_checkpoint=folders[0], engine_device="cpu")
    started = launch_imitating_sglang(args, 0, str(tmp_path_factory.mktemp("logs") / "0.log"))
    try:
        started.wait_ready(120)
        yield started
    finally:
        started.stop()


class Failing(EngineControlClient):
    """Fails before the second bucket of an attempt, ``failures`` times."""

    failures = 0
    num_buckets = 0

    def begin_weight_update(self) -> None:
        self.num_buckets = 0
        super().begin_weight_update()

    def post(self, path: str, *args: Any, **how: Any) -> None:
        if path in ("/update_weights_from_tensor", "/update_weights_from_distributed"):
            self.num_buckets += 1
            if self.num_buckets == 2 and self.failures:
                self.failures -= 1
                raise EngineError("broken")
        super().post(path, *args, **how)


@pytest.fixture
def control(engine: EmbeddedEngine, folders: list[str]) -> Iterator[Failing]:
    """The weights of seed 0 as version 0."""
    with Failing([engine.url]) as client:
        client.update_weights_from_disk(folders[0], 0)
        yield client


def is_paused(engine: EmbeddedEngine) -> bool:
    with urllib.request.urlopen(engine.url + "/server_info", timeout=60) as answer:
        return bool(json.load(answer)["paused"])


def checksum_of(folder: str) -> Any:
    model = LoadedModel(LoadOptions(model_path=folder))
    return checksum_answer(model.decoder.named_weights())["per_engine_checksum"]


def log_probs_of(folder: str) -> TrainerLogProbs:
    """Of transformers with the weights in ``folder``, at temperature 1."""
    model: Any = load_model(folder, torch.device("cpu"), "--hf-checkpoint")

    @torch.no_grad()
    def compute(sequences: Sequence[Sequence[int]], num_tokens: int) -> list[list[float]]:
        ids = torch.tensor(sequences)
        every = torch.log_softmax(model(ids).logits[:, :-1].double(), dim=-1)
        return every.gather(-1, ids[:, 1:, None])[:, -num_tokens:, 0].tolist()  # type: ignore[no-any-return]

    return compute


def publisher(
    transport: Any, control: Failing, folder: str, notice: Callable[[str], object] = lambda _: None, **options: Any
) -> Publisher:
    args: Any = compose(CORE_SECTIONS)(hf_checkpoint=folder, **options)
    tensors: dict[str, torch.Tensor] = load_file(Path(folder, "model.safetensors"))
    trainer = local_senders(transport, args, lambda: weight_buckets(tensors.items(), bucket_bytes=50_000))
    check = LogProbCheck(log_probs_of(folder), temperature=1.0, max_diff=1e-4)
    return Publisher(transport(args), trainer, control, first_pause_s=0.0, notice=notice, check=check)


@pytest.mark.parametrize("transport", [TensorTransport, DistributedTransport])
def test_a_publication_that_fails_between_two_buckets_is_made_again_and_nothing_is_sampled_meanwhile(
    engine: EmbeddedEngine, control: Failing, folders: list[str], transport: Any
) -> None:
    control.failures = 1
    between: list[tuple[bool, bool]] = []

    def look(_: str) -> None:
        mixed = control.checksums()[engine.url] not in map(checksum_of, folders)
        between.append((is_paused(engine), mixed))

    publisher(transport, control, folders[1], look).publish(1)
    assert between == [(True, True)]
    assert control.versions() == {engine.url: "1"}
    assert control.checksums() == {engine.url: checksum_of(folders[1])}
    assert not is_paused(engine)


@pytest.mark.parametrize("transport", [TensorTransport, DistributedTransport])
def test_an_engine_with_mixed_weights_stays_paused_until_a_whole_version_is_in(
    engine: EmbeddedEngine, control: Failing, folders: list[str], transport: Any
) -> None:
    control.failures = ATTEMPTS
    with pytest.raises(EngineError, match="broken"):
        publisher(transport, control, folders[1]).publish(1)
    assert is_paused(engine)
    publisher(transport, control, folders[1]).publish(1)
    assert not is_paused(engine)
    assert control.checksums() == {engine.url: checksum_of(folders[1])}


@pytest.mark.parametrize("transport", [TensorTransport, DistributedTransport])
def test_a_session_that_a_killed_run_left_open_is_closed_and_the_publication_made_again(
    engine: EmbeddedEngine, control: Failing, folders: list[str], transport: Any
) -> None:
    control.begin_weight_update()
    publisher(transport, control, folders[1]).publish(1)
    assert control.checksums() == {engine.url: checksum_of(folders[1])}


class Renaming(DiskSender):
    """Writes a tensor under another name, ``times`` times."""

    times = 0

    def write(self, buckets: Iterator[Mapping[str, Any]], folder: str) -> None:
        if type(self).times:
            type(self).times -= 1
            buckets = iter([{f"a.{name}": tensor for bucket in buckets for name, tensor in bucket.items()}])
        super().write(buckets, folder)


class RenamingTransport(DiskTransport):
    sender = Renaming


def test_weights_that_an_engine_confirms_without_taking_them_are_found_by_what_it_samples(
    engine: EmbeddedEngine, control: Failing, folders: list[str], tmp_path: Path
) -> None:
    Renaming.times = 1
    chosen = publisher(RenamingTransport, control, folders[1], run_dir=str(tmp_path))
    with pytest.raises(EngineError) as caught:
        chosen.publish(1)
    assert "do not sample from the weights of version 1" in caught.value.what
    assert engine.url in caught.value.what
    assert "nats a token from the trainer's" in caught.value.what
    assert control.versions() == {engine.url: "1"}
    assert is_paused(engine)
    chosen.publish(1)
    assert not is_paused(engine)
