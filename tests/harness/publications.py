"""Weight versions of a tiny model, and how far the log-probabilities of an answer are from those of its versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient, GenerateResult
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.options.section import compose
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import local_senders

NOISE = 0.1
"""Relative change of each weight of a version; log-probabilities change by 0.1 nats and more."""


class Versions:
    """The weights in ``folder`` are version 0. Each other version is these with random changes of its own.

    number: the newest, which a trainer would have.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        load: Any = AutoModelForCausalLM.from_pretrained
        self._module = load(folder, dtype=torch.float32).eval()
        self._base = load_file(Path(folder, "model.safetensors"))
        self._loaded: int | None = None
        self.number = 0

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """The weights of a version, by their names in the folder."""
        if version == 0:
            return dict(self._base)
        random = torch.Generator().manual_seed(version)
        return {
            name: tensor * (1 + NOISE * torch.randn(tensor.shape, generator=random))
            for name, tensor in sorted(self._base.items())
        }

    def export(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """The buckets of the newest version, as of a trainer."""
        yield self.tensors(self.number)

    def module(self, version: int) -> Any:
        """transformers' model of a version; the one before is gone."""
        if version != self._loaded:
            self._module.load_state_dict(self.tensors(version), strict=False)
            self._module.tie_weights()
            self._loaded = version
        return self._module

    @torch.no_grad()
    def log_probs(self, prompt: Sequence[int], output: Sequence[int], version: int) -> list[float]:
        """At temperature 1, of the output tokens, in nats, by one pass over the whole sequence."""
        ids = torch.tensor([[*prompt, *output]])
        rows = torch.log_softmax(self.module(version)(ids).logits[0].double(), dim=-1)[len(prompt) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, output, strict=True)]

    def gap(self, prompt: Sequence[int], output: Sequence[int], given: Sequence[float], spans: Sequence[Any]) -> float:
        """The largest difference, in nats, between the log-probability that a token was given and that by the model of
        its span's version. spans: ``(version, start, end)`` each; they have to cover every token once."""
        assert [token for _, start, end in spans for token in range(start, end)] == list(range(len(output)))
        worst = 0.0
        for version, start, end in spans:
            right = self.log_probs(prompt, output, int(version))[start:end]
            worst = max(worst, *(abs(a - b) for a, b in zip(right, given[start:end], strict=True)))
        return worst


def publisher_of(
    versions: Versions, transport: Any, engines: EngineControlClient, run_dir: Path, **more: Any
) -> Publisher:
    """Publishes ``versions.number`` through a transport's class."""
    args: Any = compose(CORE_SECTIONS)(run_dir=str(run_dir), hf_checkpoint=versions.folder, engine_device="cpu")
    return Publisher(transport(args), local_senders(transport, args, versions.export), engines, **more)


async def answers_while_published(
    client: EngineClient, publisher: Publisher, versions: Versions, *, num_tokens: int, most_versions: int
) -> tuple[list[tuple[list[int], GenerateResult]], list[dict[str, float]]]:
    """Prompts with their answers, of single requests and of groups, while versions are published one after another
    until all have come; at most ``most_versions``. And the metrics of each publication."""
    params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    prompts = [[5 + i, 6, 7, 8 + i] for i in range(6)]

    async def single(number: int) -> list[tuple[list[int], GenerateResult]]:
        prompt = prompts[number]
        own = {**params, "sampling_seed": number}
        return [(prompt, await client.agenerate(f"single-{number}-", prompt, own))]

    async def group(number: int) -> list[tuple[list[int], GenerateResult]]:
        prompt = prompts[number % 2]  # the same again later: their prefixes are those of the weights before
        rows = await client.agenerate_rows(f"group-{number}-", prompt, 6, params)
        return [(prompt, row) for row in rows]

    tasks = [asyncio.create_task(one(i)) for i in range(len(prompts)) for one in (single, group)]
    metrics = []
    while not all(task.done() for task in tasks) and versions.number < most_versions:
        versions.number += 1
        metrics.append(await asyncio.to_thread(publisher.publish, versions.number))
    return [answer for answers in await asyncio.gather(*tasks) for answer in answers], metrics
