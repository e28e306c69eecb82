"""The tokens that a real server's sampling kept, from the server behind smg to the trainer's forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.pretrained import load_model
from buffer_rl_sglang.options import SglangOptions

from .conftest import TIMEOUT_S

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TIMEOUT_S)]
TOLERANCE = 1e-4
PROMPT = [5, 6, 7, 8]
CUTS: list[dict[str, Any]] = [
    {"top_k": 4, "temperature": 0.7},
    {"top_k": 4096, "top_p": 0.6},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.2, "temperature": 1.3},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "hf", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def args(model: str, sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a run whose server and router have started."""
    pytest.importorskip("smg")
    chosen: Any = compose([*CORE_SECTIONS, SglangOptions])(
        hf_checkpoint=model,
        router="smg",
        rollout_engine="sglang",
        engine_device="cpu",
        engine_context_length=512,
        engine_max_running_requests=8,
        sglang_python=sglang_python,
        replay_kept_tokens=True,
        rollout_top_k=4096,
    )
    with EngineFleet(chosen, str(tmp_path_factory.mktemp("run")), PluginRegistry()) as fleet:
        fleet.wait_ready()
        yield chosen.model_copy(update=fleet.addresses)


def reference(model: str, output_ids: list[int], kept: list[bytes], temperature: float) -> np.ndarray:
    """Log-probabilities of ``output_ids``, each renormalised over the ids that were kept for it."""
    loaded = load_model(model, torch.device("cpu"), "--hf-checkpoint")
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([PROMPT + output_ids])).logits[0].double() / temperature
    found = []
    for place, (token, raw) in enumerate(zip(output_ids, kept, strict=True), len(PROMPT) - 1):
        ids = np.frombuffer(raw, dtype=np.int32).tolist()
        found.append(float(logits[place, token] - torch.logsumexp(logits[place, ids], dim=0)))
    return np.array(found)


@pytest.mark.parametrize("cut", CUTS, ids=str)
async def test_log_probabilities_are_over_the_tokens_that_were_kept(args: Any, model: str, cut: dict[str, Any]) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True, **cut}
    async with EngineClient.from_args(args) as client:
        alone = await client.agenerate("a", PROMPT, params)
        rows = await client.agenerate_rows("b-", PROMPT, 2, params)
        whole = await client.agenerate("c", PROMPT, {**params, "top_k": -1})
    assert whole.kept is None
    for answer in (alone, *rows):
        assert answer.kept is not None
        sizes = [len(raw) // 4 for raw in answer.kept]
        assert 1 < max(sizes) <= min(cut["top_k"], 1000)
        temperature = cut.get("temperature", 1.0)
        ours = reference(model, answer.output_ids, answer.kept, temperature)
        assert np.abs(ours - np.array(answer.log_probs)).max() < TOLERANCE
        everything = [np.arange(32, dtype=np.int32).tobytes()] * len(sizes)
        assert np.abs(reference(model, answer.output_ids, everything, temperature) - ours).max() > 0.1
