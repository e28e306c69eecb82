"""Functions as users of slime write them: its documented signatures, plain lists, ``**kwargs``, ``Sample.Status``."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

from buffer_rl.types import Sample  # the one line that differs: slime.utils.types there


@dataclass
class FilterOutput:
    """As slime's DynamicFilterOutput: two fields, the reason may be None."""

    keep: bool
    reason: str | None = None


@dataclass
class TrainOutput:
    """As slime's RolloutFnTrainOutput."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


async def reward_func(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    if sample.status == Sample.Status.TRUNCATED:
        return -1.0
    return 1.0 if sample.response.endswith(sample.label) else 0.0


async def group_reward_func(args, samples, **kwargs):
    return [float(len(samples) - i) for i, _ in enumerate(samples)]


def check_differ(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    differ = len(set(rewards)) > 1
    return FilterOutput(keep=differ, reason=None if differ else f"zero_std_{round(rewards[0], 1)}")


def check_bool(args, samples, **kwargs):
    return samples[0].index != 0 and len(samples[1:]) == len(samples) - 1


async def custom_generate(args, sample: Sample, sampling_params: dict) -> Sample:
    assert sampling_params["max_new_tokens"] == args.rollout_max_response_len
    prompt = [ord(c) % 50 for c in sample.prompt]
    answer = [7, 8, 9]
    sample.tokens = prompt + answer
    sample.response = sample.response + str(sample.label) * (sample.index % 2)
    sample.response_length = len(answer)
    sample.loss_mask = [1, 0, 1]
    sample.rollout_log_probs = [-0.1, -0.2, -0.3]
    sample.status = Sample.Status.COMPLETED
    return sample


async def generate_segments(args, sample, sampling_params):
    segments = []
    for length in (1, 2):
        part = copy.copy(sample)
        part.tokens, part.response_length, part.loss_mask = [3] * (length + 1), length, [1] * length
        part.reward = 0.5
        part.status = Sample.Status.COMPLETED
        segments.append(part)
    return segments


async def _one_rollout(args, data_source):
    groups = data_source.get_samples(args.rollout_batch_size)

    async def fill(sample):
        sample = await custom_generate(args, sample, {"max_new_tokens": args.rollout_max_response_len})
        sample.reward = await reward_func(args, sample)
        return sample

    return [await asyncio.gather(*[fill(sample) for sample in group]) for group in groups]


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert not evaluation
    return asyncio.run(_one_rollout(args, data_source))


def generate_rollout_keyword_only(args, rollout_id, data_buffer, *, evaluation=False):
    return TrainOutput(samples=asyncio.run(_one_rollout(args, data_buffer)), metrics={"turns": 2})


def generate_rollout_output(args, rollout_id, data_source, evaluation):
    return TrainOutput(samples=asyncio.run(_one_rollout(args, data_source)))


def give_back_all_but_one(args, rollout_id, data_source, evaluation=False):
    first, *others = asyncio.run(_one_rollout(args, data_source))
    data_source.add_samples(others)
    return [first]


def mask_wrong(args, groups: list[list[Sample]]) -> None:
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.reward < 0.5


def centre(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [reward - min(raw) for reward in raw]
