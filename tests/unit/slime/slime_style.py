"""Functions as users of slime write them: its documented signatures, plain lists, ``**kwargs``, ``Sample.Status``."""

from __future__ import annotations

import asyncio
import copy
import os
from dataclasses import dataclass
from typing import Any

import torch

from buffer_rl.records.groups import Sample  # the one line that differs: slime.utils.types there


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


@dataclass
class OtherSample:
    """As the class of another installed package: the attributes of a sample, and its mapping."""

    tokens: list[int]
    response: str
    response_length: int
    reward: Any = None
    status: Any = Sample.Status.COMPLETED
    metadata: dict[str, Any] | None = None
    own: str = "kept"

    def to_dict(self):
        return {**self.__dict__, "status": self.status.value, "spec_info": {}, "prefix_cache_info": {}}


def other_of(sample):
    return OtherSample([3, 4, 7], str(sample.label), 1, reward=0.5, metadata={"turn": 1})


async def generate_others(args, sample, sampling_params):
    return [other_of(sample), other_of(sample)]


def rollout_of_others(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(2)
    samples = [other_of(sample) for group in groups for sample in group]
    if evaluation:
        return {"mine": {"rewards": [0.5] * len(samples), "samples": samples}}
    return TrainOutput(samples=[samples[:2], samples[2:]])


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


def generate_flat(args, rollout_id, data_source, evaluation=False):
    return [sample for group in asyncio.run(_one_rollout(args, data_source)) for sample in group]


def generate_flat_of_own(args, rollout_id, data_source, evaluation=False):
    made = [Sample(prompt="ab", tokens=[1, 2, n], response="x", response_length=1, reward=float(n)) for n in range(4)]
    for sample in made:
        sample.status = Sample.Status.COMPLETED
    return TrainOutput(samples=made)


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


@dataclass
class EvalOutput:
    """As slime's RolloutFnEvalOutput."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def generate_nested(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    return TrainOutput(samples=[[asyncio.run(generate_segments(args, s, {})) for s in group] for group in groups])


def _evaluated(args, data_source):
    groups = asyncio.run(_one_rollout(args, data_source))
    samples = [sample for group in groups for sample in group]
    truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
    return {"aime": {"rewards": [s.reward for s in samples], "truncated": truncated, "samples": samples}}


def eval_rollout(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    return _evaluated(args, data_source)


def eval_rollout_output(args, rollout_id, data_source, evaluation=False):
    return EvalOutput(data=_evaluated(args, data_source), metrics={"eval/turns": 3})


def eval_own_prompts(args, rollout_id, data_source, evaluation=False):
    samples = [Sample(index=i, response="x", response_length=4) for i in range(2)]
    return {"mine": {"rewards": [{"acc": 1.0}, {"acc": 0.0}], "truncated": [True, False], "samples": samples}}


def eval_without_rewards(args, rollout_id, data_source, evaluation=False):
    return {"mine": {"scores": [1.0]}}


def eval_with_a_number(args, rollout_id, data_source, evaluation=False):
    return {"mine": {"rewards": 0.5}}


def eval_with_text(args, rollout_id, data_source, evaluation=False):
    return {"mine": {"rewards": ["good"]}}


def take_first(args, rollout_id, buffer, num_samples):
    count = min(len(buffer), num_samples)
    taken = buffer[:count]
    del buffer[:count]
    return taken


def take_best(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    return sorted(buffer, key=lambda group: -max(sample.reward for sample in group))[:num_samples]


def take_own(args, rollout_id, buffer, num_samples):
    return [[Sample(index=0)]]


def to_columns(args, samples):
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
    }


def read_all(args, samples: list[list[Sample]], data_source) -> None:
    for group in samples:
        group[0].metadata["seen"] = len(samples)


def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool:
    rollout_extra_metrics["rollout/longest"] = max(sample.response_length for sample in samples)
    return False


def log_eval_rollout_data(rollout_id, args, data, extra_metrics) -> bool:
    extra_metrics.update({f"eval/{name}/best": max(found["rewards"]) for name, found in data.items()})
    return False


class CountingSource:
    """As a data source of slime: groups are plain lists, samples without a uid, save and load by rollout id."""

    def __init__(self, args):
        self.args = args
        self.sample_offset = 0
        self.sample_index = 0
        self.metadata = {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for offset in range(self.sample_offset, self.sample_offset + num_samples):
            prompt = Sample(prompt=f"{offset}+1=", label=str(offset + 1), metadata={"offset": offset})
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(prompt)
                sample.group_index = offset
                sample.index = self.sample_index
                self.sample_index += 1
                group.append(sample)
            groups.append(group)
        self.sample_offset += num_samples
        return groups

    def add_samples(self, samples: list[list[Sample]]):
        raise RuntimeError("This is a read-only data source.")

    def save(self, rollout_id):
        state = {"sample_offset": self.sample_offset, "sample_index": self.sample_index, "metadata": self.metadata}
        path = os.path.join(self.args.save, f"rollout/source_{rollout_id:04d}.pt")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path)

    def load(self, rollout_id=None):
        path = os.path.join(self.args.load, f"rollout/source_{rollout_id:04d}.pt")
        state = torch.load(path)
        self.sample_offset = state["sample_offset"]
        self.sample_index = state["sample_index"]
        self.metadata = state["metadata"]

    def __len__(self) -> int:
        return 100


class SavesElsewhere(CountingSource):
    """Puts its state into a folder of its own, which is no file that could be saved with a batch."""

    def save(self, rollout_id):
        path = os.path.join(self.args.run_dir, f"rollout/state_{rollout_id}.pt")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"sample_offset": self.sample_offset}, path)


def eval_segments(args, rollout_id, data_source, evaluation=False):
    """The first sample of each group is five segments without reward, the second is one with a reward of 1."""
    samples = []
    for first, second in data_source.get_samples(args.rollout_batch_size):
        for segment in [first] * 5 + [second]:
            part = copy.copy(segment)
            part.tokens, part.response_length = [3, 4], 1
            part.reward = float(segment is second)
            part.status = "completed" if segment is second else "truncated"
            samples.append(part)
    truncated = [sample.status == "truncated" for sample in samples]
    return {"aime": {"rewards": [s.reward for s in samples], "truncated": truncated, "samples": samples}}


def text_statuses(args, rollout_id, data_source, evaluation=False):
    """The first group is returned, the others are reported; their second samples are truncated."""
    groups = asyncio.run(_one_rollout(args, data_source))
    for group in groups:
        group[1].status = "truncated"
    first, *others = groups
    for group in others:
        data_source.finish(data_source.groups[group[0].uid])
    return [first]


def unknown_statuses(args, rollout_id, data_source, evaluation=False):
    groups = asyncio.run(_one_rollout(args, data_source))
    groups[1][0].status = "done"
    return groups


def own_reward_metric(args, rollout_id, data_source, evaluation=False):
    return TrainOutput(samples=asyncio.run(_one_rollout(args, data_source)), metrics={"rollout/raw_reward": 9.0})


def eval_plain_lists(args, rollout_id, data_source, evaluation=False):
    return asyncio.run(_one_rollout(args, data_source))
