"""User code that fails for the prompt ``bad``, or for row 0, in ways that show late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp

from buffer_rl.records.groups import Sample, SampleGroup
from buffer_rl.rollout.generate import generate


def is_bad(samples: Any) -> bool:
    return bool(samples[0].prompt == "bad")


def not_found() -> Exception:
    request: Any = SimpleNamespace(real_url="http://tool")
    return aiohttp.ClientResponseError(request, (), status=404)


async def by_index(args: Any, sample: Sample) -> float:
    return float(sample.sample_index)


async def huge_reward(args: Any, sample: Sample) -> float:
    return 1e39 if is_bad([sample]) else 1.0


async def huge_group_reward(args: Any, group: SampleGroup) -> list[float]:
    return [-1e39 if is_bad(group) else 1.0 for _ in group]


async def refused_reward(args: Any, sample: Sample) -> float:
    if is_bad([sample]):
        raise not_found()
    return 1.0


async def short_log_probs(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    if is_bad([sample]):
        sample.rollout_log_probs = (sample.rollout_log_probs or [])[:-1]
    return sample


async def long_loss_mask(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    if is_bad([sample]):
        sample.loss_mask = [1] * (sample.response_length + 1)
    return sample


async def mask_is_a_number(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    if is_bad([sample]):
        sample.loss_mask = 1  # type: ignore[assignment]
    return sample


async def hangs(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await asyncio.sleep(3600)
    return sample


async def hangs_at_row_0(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.row_id.uid.row == 0:
        await asyncio.sleep(3600)
    return await generate(args, sample, sampling_params)


async def refused_at_row_0(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.row_id.uid.row == 0:
        raise not_found()
    return await generate(args, sample, sampling_params)


def _rewards(samples: list[Sample]) -> list[float]:
    return [float(sample.sample_index) for sample in samples]


def post_raises(args: Any, samples: list[Sample]) -> Any:
    if is_bad(samples):
        raise KeyError("no rank for this one")
    return _rewards(samples), _rewards(samples)


def post_is_huge(args: Any, samples: list[Sample]) -> Any:
    factor = 1e39 if is_bad(samples) else 1.0
    return _rewards(samples), [factor * (1 + reward) for reward in _rewards(samples)]


def post_doubles(args: Any, samples: list[Sample]) -> Any:
    """Changes the samples, as functions do that were written for a single call."""
    for sample in samples:
        sample.reward = 2 * sample.get_reward_value(args)
    values = [sample.get_reward_value(args) for sample in samples]
    return values, values


def _columns(samples: list[Sample]) -> dict[str, Any]:
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_length": [sample.response_length for sample in samples],
        "loss_mask": [[1] * sample.response_length for sample in samples],
        "reward": _rewards(samples),
    }


def convert_raises(args: Any, samples: list[Sample]) -> Any:
    if is_bad(samples):
        raise IndexError("no such column")
    return _columns(samples)


def convert_always_raises(args: Any, samples: list[Sample]) -> Any:
    raise ZeroDivisionError("never")


def convert_forgets_the_mask(args: Any, samples: list[Sample]) -> Any:
    columns = _columns(samples)
    if is_bad(samples):
        del columns["loss_mask"]
    return columns


def convert_counts(args: Any, samples: list[Sample]) -> Any:
    samples[0].metadata["converted"] = samples[0].metadata.get("converted", 0) + 1
    return _columns(samples)


def looks_on(args: Any, groups: list[SampleGroup]) -> None:
    """A sample filter that lets everything pass."""
