"""Weights that are published to a real server in mid-response: each token's log-probability is that of its span's
version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.tensor import TensorTransport
from buffer_rl_sglang.launcher import SglangServer, launch
from buffer_rl_sglang.options import SglangOptions
from harness.publications import Versions, answers_while_published, publisher_of

from .conftest import TIMEOUT_S

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TIMEOUT_S)]
TOLERANCE, STALE = 1e-4, 1e-2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "hf", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def server(model: str, sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    args: Any = compose([*CORE_SECTIONS, SglangOptions])(
        hf_checkpoint=model,
        engine_device="cpu",
        engine_context_length=512,
        engine_max_running_requests=8,
        sglang_python=sglang_python,
    )
    started = launch(args, 0, str(tmp_path_factory.mktemp("logs") / "server.log"))
    try:
        started.wait_ready(300)
        yield started
    finally:
        started.stop()


async def worst_gap(transport: Any, control: EngineControlClient, versions: Versions, folder: Path) -> float:
    """Of all tokens of answers to requests that run while versions are published."""
    publisher = publisher_of(versions, transport, control, folder)
    assert publisher.try_retraction()
    publisher.publish(0)
    async with EngineClient(control.targets()[0], control.targets()) as client:
        answers, metrics = await answers_while_published(client, publisher, versions, num_tokens=200, most_versions=12)
    publisher.close()
    assert len(answers) == 42
    assert not any("perf/retracted_tokens" in of_one for of_one in metrics)  # it does not report them
    assert any(len(result.spans) > 1 for _, result in answers)
    gaps = []
    for prompt, result in answers:
        spans = [(span.version, span.start, span.end) for span in result.spans]
        gaps.append(versions.gap(prompt, result.output_ids, result.log_probs, spans))
    return max(gaps)


@pytest.mark.parametrize("transport", [DiskTransport, TensorTransport])
async def test_log_probabilities_are_those_of_the_version_that_drew_each_token(
    transport: Any, server: SglangServer, model: str, tmp_path: Path
) -> None:
    with EngineControlClient([server.url]) as control:
        assert await worst_gap(transport, control, Versions(model), tmp_path) < TOLERANCE


class Unflushed(EngineControlClient):
    """Leaves what engines have cached."""

    def flush(self) -> None:
        return


async def test_with_a_cache_of_the_weights_before_they_are_of_no_version(
    server: SglangServer, model: str, tmp_path: Path
) -> None:
    with Unflushed([server.url]) as control:
        assert await worst_gap(TensorTransport, control, Versions(model), tmp_path) > STALE
    with EngineControlClient([server.url]) as control:
        control.flush()
