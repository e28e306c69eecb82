"""What a user of slime brings along: a rollout function with its own requests, a reward, a filter, an evaluation."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass
from typing import Any

from buffer_rl.records.groups import Sample  # the one line that differs: slime.utils.types there


@dataclass
class FilterOutput:
    keep: bool
    reason: str | None = None


async def reward_func(args, sample, **kwargs):
    return float(sample.response.count("a"))


def check_not_all_zero(args, samples, **kwargs):
    keep = any(sample.get_reward_value(args) > 0 for sample in samples)
    return FilterOutput(keep=keep, reason=None if keep else "zero")


def load(path):
    return globals()[path.rpartition(":")[2]]  # as load_function of a path to this file


def post(url, payload, key):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(payload).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


async def generate(args, sample: Sample, sampling_params):
    prompt_ids = [ALPHABET[character] for character in sample.prompt]
    payload = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
    answer = await asyncio.to_thread(post, f"{args.router_url}/generate", payload, args.engine_api_key)
    found = answer["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_ids + [entry[1] for entry in found]
    sample.rollout_log_probs = [entry[0] for entry in found]
    sample.response_length = len(found)
    sample.response = answer["text"]
    stopped = answer["meta_info"]["finish_reason"]["type"] == "stop"
    sample.status = Sample.Status.COMPLETED if stopped else Sample.Status.TRUNCATED
    sample.reward = await load(args.custom_rm_path)(args, sample)
    return sample


async def generate_groups(args, data_source):
    params = {"temperature": args.rollout_temperature, "max_new_tokens": args.rollout_max_response_len}
    keep = load(args.dynamic_sampling_filter_path)
    data: list[list[Sample]] = []
    dropped = 0
    while len(data) < args.rollout_batch_size:
        (group,) = data_source.get_samples(1)
        group = await asyncio.gather(*[generate(args, sample, dict(params)) for sample in group])
        if keep(args, group).keep:
            data.append(group)
        else:
            dropped += 1
    return data, {"rollout/slime_dropped": dropped}


@dataclass
class TrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


async def evaluate(args, data_source):
    params = {"temperature": 0, "max_new_tokens": args.rollout_max_response_len}
    groups = data_source.get_samples(4)
    samples = [await generate(args, sample, dict(params)) for group in groups for sample in group]
    return {
        "letters": {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    }


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        return asyncio.run(evaluate(args, data_source))
    samples, metrics = asyncio.run(generate_groups(args, data_source))
    return TrainOutput(samples=samples, metrics=metrics)


ALPHABET = {character: 3 + index for index, character in enumerate("abc=")}
