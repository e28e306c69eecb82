"""The experts that computed each token in a real server, from the server behind smg to the client.

They are compared, as sets, with those that transformers chooses for the same tokens with the same weights."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.experts import num_recomputed
from buffer_rl.testing.tiny import make_char_tokenizer, make_tiny_model
from buffer_rl.weights.disk import DiskTransport
from buffer_rl_sglang.options import SglangOptions
from harness.publications import Versions, answers_while_published, publisher_of

from .conftest import ROOT, TIMEOUT_S, command, metrics_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TIMEOUT_S)]
PROMPT = [5, 6, 7, 8, 9, 20, 21, 22]
LAYERS, EXPERTS, TOP_K = 4, 8, 2
TIES, OTHERS = 0.01, 0.03
"""Share of tokens and layers whose experts differ: two that a router finds equal up to rounding; other weights or rows
differ in more."""


def mixture(folder: Path, seed: int = 0) -> str:
    """A model whose layers all have experts."""
    sizes = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    return make_tiny_model(folder, "qwen3_moe", seed=seed, max_position_embeddings=1024, **sizes)


def partly_dense(folder: Path) -> str:
    """A model whose first layer has none."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": LAYERS}
    mix = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "first_k_dense_replace": 1}
    tokenizer = make_char_tokenizer()
    config = transformers.Glm4MoeConfig(
        **sizes, **heads, **mix, vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, num_nextn_predict_layers=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = transformers.Glm4MoeForCausalLM(config)
        for weight in made.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.1)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def chosen(model: str, ids: list[int]) -> np.ndarray:
    """What transformers' routers choose for ``ids``: ``[tokens, layers with experts, TOP_K]``, sorted."""
    return chosen_by(load(model), ids)


def chosen_by(loaded: Any, ids: list[int]) -> np.ndarray:
    """Likewise, by a loaded model."""
    found: list[torch.Tensor] = []

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        found.append(logits.reshape(len(ids), EXPERTS).topk(TOP_K).indices.sort().values)

    routers = [layer.mlp.gate for layer in loaded.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [router.register_forward_hook(note) for router in routers]
    with torch.no_grad():
        loaded(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy()


class SavedVersions(Versions):
    """Reads each version from a folder: the file has a tensor for each expert, the module one for all."""

    def module(self, version: int) -> Any:
        with TemporaryDirectory() as folder:
            shutil.copy(Path(self.folder, "config.json"), folder)
            save_file(self.tensors(version), Path(folder, "model.safetensors"), metadata={"format": "pt"})
            return load(folder)


def load(folder: str) -> Any:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


def differing(experts: Any, expected: np.ndarray) -> float:
    """Share of tokens and layers with other experts; the order of a token's does not matter."""
    assert experts.shape == expected.shape
    return float((np.sort(experts, axis=-1) != expected).any(axis=-1).mean())


@pytest.fixture(scope="module", params=[mixture, partly_dense], ids=["all layers", "but the first"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Callable[[Path], str] = request.param
    return made(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def options(model: str, sglang_python: str) -> Any:
    pytest.importorskip("smg")
    made: Any = compose([*CORE_SECTIONS, SglangOptions])(
        hf_checkpoint=model,
        router="smg",
        rollout_engine="sglang",
        engine_device="cpu",
        engine_context_length=512,
        engine_max_running_requests=8,
        sglang_python=sglang_python,
        replay_routed_experts=True,
    )
    return made


@pytest.fixture(scope="module")
def fleet(options: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """A server behind smg."""
    with EngineFleet(options, str(tmp_path_factory.mktemp("run")), PluginRegistry()) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def args(fleet: EngineFleet, options: Any) -> Any:
    """Of a client of the server."""
    return options.model_copy(update=fleet.addresses)


async def test_experts_are_those_of_transformers_also_for_a_cached_prefix_and_a_continuation(
    args: Any, model: str
) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True}
    async with EngineClient.from_args(args) as client:
        first = await client.agenerate("a", PROMPT, params)
        rows = await client.agenerate_rows("b-", PROMPT, 3, params)
        sent = PROMPT + first.output_ids
        known = len(sent) - 1
        cached = await client.agenerate("c", sent, params, experts_start=known)
    for answer in (first, *rows):
        ids = PROMPT + answer.output_ids
        assert answer.experts_start == 0
        assert differing(answer.experts, chosen(model, ids)[:-1]) < TIES
    assert cached.cached_tokens > len(PROMPT)
    assert cached.experts_start == known
    whole = chosen(model, sent + cached.output_ids)
    assert differing(cached.experts, whole[known:-1]) < TIES
    assert differing(cached.experts, whole[known - 1 : -2]) > OTHERS  # a row further would be noticed


async def test_an_aborted_response_has_the_experts_of_its_tokens(args: Any, model: str) -> None:
    async with EngineClient.from_args(args) as client:
        long = asyncio.create_task(client.agenerate("d", PROMPT, {"max_new_tokens": 400, "ignore_eos": True}))
        await client.agenerate("e", PROMPT, {"max_new_tokens": 20, "ignore_eos": True})  # computed beside it
        await client.abort(["d"])
        answer = await long
    ids = PROMPT + answer.output_ids
    assert 0 < len(answer.output_ids) < 400
    assert differing(answer.experts, chosen(model, ids)[:-1]) < TIES


async def test_after_a_retraction_all_experts_are_those_of_the_newest_weights(
    fleet: EngineFleet, args: Any, model: str, tmp_path: Path
) -> None:
    """Of the tokens, too, that older weights sampled: those that ``num_recomputed`` counts."""
    versions = SavedVersions(model)
    with fleet.control(TIMEOUT_S) as control:
        publisher = publisher_of(versions, DiskTransport, control, tmp_path)
        assert publisher.try_retraction()
        async with EngineClient.from_args(args) as client:
            answers, _ = await answers_while_published(client, publisher, versions, num_tokens=200, most_versions=4)
        publisher.close()
        publisher_of(Versions(model), DiskTransport, control, tmp_path).publish(0)  # for other tests
    spread = [(prompt, answer) for prompt, answer in answers if len(answer.spans) > 1]
    assert spread
    for prompt, answer in spread:
        ids = prompt + answer.output_ids
        newest, oldest = answer.spans[-1].version, answer.spans[0].version
        assert differing(answer.experts, chosen_by(versions.module(newest), ids)[:-1]) < TIES
        assert differing(answer.experts, chosen_by(versions.module(oldest), ids)[:-1]) > OTHERS
        assert num_recomputed(answer.spans) == answer.spans[-1].start > 0


@pytest.mark.parametrize(
    "schedule",
    [(), ("--schedule", "async", "--max-staleness", "2", "--use-tis", "--replay-recomputed-experts")],
    ids=["lockstep", "async"],
)
def test_a_run_replays_the_servers_experts(schedule: tuple[str, ...], sglang_python: str, tmp_path: Path) -> None:
    pytest.importorskip("smg")
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text("".join(f'{{"prompt": "{number}+1", "label": "{number + 1}"}}\n' for number in range(64)))
    flags = ["--hf-checkpoint", mixture(tmp_path / "hf"), "--prompt-data", str(rows), "--rm-type", "exact_match"]
    flags += ["--num-rollout", "4", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]
    flags += ["--rollout-max-response-len", "48", "--lr", "1e-3", "--run-dir", str(folder), "--progress", "plain"]
    flags += ["--engine-device", "cpu", "--train-device", "cpu", "--engine-context-length", "200"]
    flags += ["--rollout-engine", "sglang", "--sglang-python", sglang_python, "--router", "smg"]
    run = subprocess.run(
        command("train", *flags, "--replay-routed-experts", *schedule),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    differ = metrics_of(folder, "train/routed_experts_differ")
    assert len(differ) == 4
    if not schedule:
        assert max(differ) < TIES
        assert max(metrics_of(folder, "train/train_rollout_logprob_abs_diff")) < 1e-4
