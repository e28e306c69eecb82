"""Prompts to responses outside a run: no Buffer, no rewards, the sampling of a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.reader import read_dataset
from buffer_rl.engine.client import EngineClient
from buffer_rl.rollout.generate import sampling_params_for, sampling_seed
from buffer_rl.rollout.prompts import PromptEncoder, load_tokenizer
from buffer_rl.types import GroupUid, Sample


def prompt_samples(args: Any, texts: Sequence[str], count: int) -> list[Sample]:
    """``count`` samples for each text, then for each row of ``args.prompt_data``. Raises DataError."""
    prompts: list[tuple[GroupUid, Any, Any, dict[str, Any]]] = [
        (GroupUid("prompt", row, 0), text, None, {}) for row, text in enumerate(texts)
    ]
    for path in args.prompt_data or ():
        dataset = read_dataset(path, RowKeys.from_args(args))
        prompts += [(GroupUid(dataset.source_hash, row.row, 0), row.prompt, row.label, row.metadata) for row in dataset]
    return [
        Sample(uid=uid, sample_index=index, prompt=prompt, label=label, metadata=dict(metadata))
        for uid, prompt, label, metadata in prompts
        for index in range(count)
    ]


async def ask_engine(args: Any, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One answer a sample, in their order: uid, sample_index, prompt, label, response, status and its tokens' number.

    args: with ``router_url`` and ``engine_urls``. Raises DataError for a prompt that cannot be rendered, EngineError
    and DeadlineError.
    """
    encoder = PromptEncoder.from_args(
        args, load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    )
    gate = asyncio.Semaphore(args.rollout_concurrency)
    params = sampling_params_for(args, evaluation=False)
    async with EngineClient.from_args(args) as client:
        tasks = [asyncio.create_task(_answer(args, client, gate, encoder, params, sample)) for sample in samples]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after the first error the others need not end
                task.cancel()


async def _answer(
    args: Any,
    client: EngineClient,
    gate: asyncio.Semaphore,
    encoder: PromptEncoder,
    params: dict[str, Any],
    sample: Sample,
) -> dict[str, Any]:
    seed = sampling_seed(args.rollout_seed, sample.row_id.uid, sample.sample_index)
    async with gate:
        result = await client.agenerate(
            f"ask:{sample.row_id}", encoder.encode(sample), {**params, "sampling_seed": seed}
        )
    return {
        "uid": str(sample.uid),
        "sample_index": sample.sample_index,
        "prompt": sample.prompt,
        "label": sample.label,
        "response": result.text,
        "status": str(result.status),
        "tokens": len(result.output_ids),
    }
