"""Rewards that fail for the prompt ``bad``, in the way that ``args.rm_url`` ends with (``http://HOST/raise``)."""

from __future__ import annotations

import time
from typing import Any

import aiohttp

from buffer_rl.records.groups import Sample, SampleGroup

VALUES: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "none": None,
    "short_list": [1.0],
    "string": "1.0",
}


async def _bad(args: Any) -> Any:
    behaviour = args.rm_url.rpartition("/")[2]
    if behaviour == "raise":
        raise KeyError("no such answer")
    if behaviour == "http_500":
        async with aiohttp.ClientSession() as session, session.post(args.rm_url, json={"prompt": "bad"}) as response:
            response.raise_for_status()
    return VALUES[behaviour]


async def single(args: Any, sample: Sample) -> Any:
    if sample.prompt == "bad" and sample.sample_index == 1:
        return await _bad(args)
    return float(sample.sample_index)


async def group(args: Any, group: SampleGroup) -> Any:
    rewards = [float(sample.sample_index) for sample in group]
    if group[0].prompt == "bad":
        bad = await _bad(args)
        return [rewards[0], bad] if isinstance(bad, float) else bad
    return rewards


def single_hangs(args: Any, sample: Sample) -> float:
    if sample.prompt == "bad" and sample.sample_index == 1:
        time.sleep(3600)
    return float(sample.sample_index)


def group_hangs(args: Any, group: SampleGroup) -> list[float]:
    if group[0].prompt == "bad":
        time.sleep(3600)
    return [float(sample.sample_index) for sample in group]
