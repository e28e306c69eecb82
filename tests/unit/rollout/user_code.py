"""What users write: rewards, filters and generate functions, well and badly behaved ones."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import time
from typing import Any

import numpy as np

from buffer_rl.kinds.marks import at_once, scoped
from buffer_rl.kinds.reward import Abstain
from buffer_rl.records.groups import FilterDecision, Sample, SampleGroup, Status

_SEEN: set[Any] = set()


def length(args: Any, sample: Sample) -> float:
    """A good reward: the number of response tokens."""
    return float(sample.response_length)


def as_mapping(args: Any, sample: Sample) -> dict[str, float]:
    return {"score": float(sample.response_length), "other": 0.0}


def numpy_scalar(args: Any, sample: Sample) -> Any:
    return np.float32(0.25)


def told_by_label(args: Any, sample: Sample) -> Any:
    """Behaves as the row's label says; every other label is the reward."""
    match sample.label:
        case "raise":
            raise KeyError("no such answer")
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "die":
            os._exit(7)
        case "segfault":
            os.kill(os.getpid(), 11)
        case "hang":
            time.sleep(3600)
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "none":
            return None
        case "list":
            return [1.0]
        case "text":
            return "1.0"
    return float(sample.label)


@at_once
def told_at_once(args: Any, sample: Sample) -> Any:
    """As ``told_by_label``, where the samples are; ``pid`` asks where that is."""
    return float(os.getpid()) if sample.label == "pid" else told_by_label(args, sample)


def prints_and_hangs(args: Any, sample: Sample) -> float:
    print(f"about to score {sample.label}")
    time.sleep(3600)
    return 0.0


async def fails_at_first(args: Any, sample: Sample) -> Any:
    """The first answer of a sample's process is a failure."""
    if sample.uid not in _SEEN:
        _SEEN.add(sample.uid)
        raise TimeoutError("busy")
    return 1.0


async def slow_async(args: Any, sample: Sample) -> Any:
    if sample.label == "hang":
        await asyncio.sleep(3600)
    if sample.label == "raise":
        raise KeyError("no such answer")
    if sample.label == "exit":
        raise SystemExit(3)
    if sample.label == "none":
        return None
    return float(sample.label)


class CallableReward:
    async def __call__(self, args: Any, sample: Sample) -> float:
        return 2.0


callable_object = CallableReward()


def answers_with_a_coroutine(args: Any, sample: Sample) -> Any:
    """Looks synchronous, is not."""
    return slow_async(args, sample)


def process_id(args: Any, sample: Sample) -> float:
    return float(os.getpid())


def block_for_label(args: Any, sample: Sample) -> float:
    time.sleep(float(sample.label))
    return 1.0


def process_id_after_50_ms(args: Any, sample: Sample) -> float:
    time.sleep(0.05)
    return float(os.getpid())


def keep_odd_rows(args: Any, group: SampleGroup) -> FilterDecision:
    return FilterDecision(keep=group.uid.row % 2 == 1, reason="even")


def keep_label(args: Any, group: SampleGroup) -> bool:
    return group[0].label == "1"


def drop_all(args: Any, group: SampleGroup) -> FilterDecision:
    return FilterDecision(keep=False, reason="never_good_enough")


async def async_filter(args: Any, group: SampleGroup) -> bool:
    await asyncio.sleep(0)
    return False


def broken_filter(args: Any, group: SampleGroup) -> bool:
    raise IndexError("filter bug")


def filter_without_answer(args: Any, group: SampleGroup) -> Any:
    return None


async def two_parts(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A generate function that fans out."""
    parts = [Sample(prompt=sample.prompt, label=sample.label) for _ in range(2)]
    for number, part in enumerate(parts):
        part.tokens = [5, 6 + number]
        part.response_length = 1
        part.reward = float(number)
        part.status = Status.COMPLETED
    return parts


def sync_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.response_length, sample.reward = [5, 6, 7], 2, 1.0
    sample.status = Status.COMPLETED
    return sample


async def broken_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise ZeroDivisionError("generate bug")


async def forgets_status(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample


def rank_rewards(args, samples):
    """The order of the rewards in place of their size."""
    raw = [sample.reward for sample in samples]
    return raw, [float(sorted(raw).index(value)) for value in raw]


def too_few_rewards(args, samples):
    return [0.0], [0.0]


def raising_post_process(args, samples):
    raise RuntimeError("no rank today")


def last_token_only(args, samples):
    """Train on the last token of each response."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_length": [1 for _ in samples],
        "loss_mask": [[1] for _ in samples],
        "reward": [sample.reward for sample in samples],
        "note": ["x" for _ in samples],
    }


def no_loss_mask(args, samples):
    return {"tokens": [], "response_length": [], "reward": []}


def wrong_mask(args, samples):
    return {**last_token_only(args, samples), "loss_mask": [[1, 1] for _ in samples]}


def weighted_mask(args, samples):
    return {**last_token_only(args, samples), "loss_mask": [[0.5] for _ in samples]}


def rank_in_group(args, group):
    """Each sample's place in the order of the labels of its group; behaves as the first label says."""
    first = group[0].label
    if first.startswith("drop"):  # a sample out of the group that it was given
        group.samples.pop()
    if first in ("raise", "hang", "nan"):
        told_by_label(args, group[0]) if first != "nan" else None
        return [float("nan")] * len(group)
    if first == "short":
        return [1.0]
    labels = sorted(sample.label for sample in group)
    return [labels.index(sample.label) for sample in group]


async def rank_in_group_later(args, group):
    await asyncio.sleep(0)
    return rank_in_group(args, group)


def drop_second_samples(args, groups):
    """Remove the second sample of every group but the first."""
    for group in groups[1:]:
        group[1].remove_sample = True


def raising_sample_filter(args, groups):
    raise LookupError("no such sample")


SEEN_ROLLOUTS: list[Any] = []


def sees_all_samples(args: Any, groups: list[SampleGroup]) -> None:
    SEEN_ROLLOUTS.append([(group.uid.row, [sample.reward for sample in group]) for group in groups])
    for group in groups:
        group[0].remove_sample = True


async def sees_all_samples_in_slimes_form(args: Any, all_samples: list[SampleGroup], data_source: Any) -> None:
    SEEN_ROLLOUTS.append((len(all_samples), data_source.get_buffer_length()))


def raising_all_samples(args: Any, groups: list[SampleGroup]) -> None:
    raise OSError("disk full")


async def deaf_to_aborts(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Without the engine: the first rows never end."""
    if sample.uid is not None and sample.uid.row < 2:
        await asyncio.sleep(3600)
    sample.tokens, sample.response_length, sample.rollout_log_probs = [3, 4], 1, [-1.0]
    sample.status = Status.COMPLETED
    return sample


async def by_sample_index(args: Any, sample: Sample) -> float:
    return float(sample.sample_index)


HUNG: list[int] = []


async def hangs_on_first_row_once(args: Any, sample: Sample) -> float:
    if sample.uid is not None and sample.uid.row == 0 and len(HUNG) < 2:
        HUNG.append(0)
        await asyncio.sleep(3600)
    return 1.0


def starts_a_daemon(args: Any, sample: Sample) -> float:
    """The process id of a daemon: it has a session of its own, and its parent has ended."""
    if (between := os.fork()) == 0:
        os.setsid()
        if (daemon := os.fork()) == 0:
            os.closerange(0, 256)
            time.sleep(3600)
        with open(sample.label, "w") as file:
            file.write(str(daemon))
        os._exit(0)
    os.waitpid(between, 0)
    if sample.sample_index == 1:
        time.sleep(3600)
    with open(sample.label) as file:
        return float(file.read())


def keep_positive(args: Any, group: SampleGroup) -> bool:
    return all(sample.reward > 0 for sample in group)


async def strikes_the_engine(args: Any, sample: Sample) -> float:
    """While it works, the engine fails (see ``FakeEngine.strike_fault``)."""
    import aiohttp  # here, for most rewards are without it, and each is imported by processes of its own

    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session, session.get(f"{args.router_url}/strike"):
            pass
    await asyncio.sleep(0)
    return 1.0


async def parts_by_label(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A label such as ``1 0 0`` is the rewards of as many parts; those of 0 are truncated, the n-th has n tokens."""
    parts = []
    for number, reward in enumerate(map(float, sample.label.split()), start=1):
        status = Status.COMPLETED if reward else Status.TRUNCATED
        part = Sample(prompt=sample.prompt, tokens=[5] * (number + 1), response_length=number)
        part.reward, part.status = reward, status
        parts.append(part)
    return parts


async def keeps_differing(args: Any, group: SampleGroup) -> bool:
    return len({sample.get_reward_value(args) for sample in group}) > 1


async def reward_that_sets_a_status(args: Any, sample: Sample) -> float:
    sample.status = sample.label
    return 1.0


async def length_async(args: Any, sample: Sample) -> float:
    """The number of response tokens; behaves as the labels ``greedy_raises`` and ``greedy_abstains`` say."""
    if sample.label == "greedy_abstains" and sample.sample_index == 2:
        raise Abstain("cannot tell")
    if sample.label == "greedy_raises" and sample.sample_index == 2:
        raise KeyError("no such answer")
    return float(sample.response_length)


async def size_of_group(args: Any, group: SampleGroup) -> list[float]:
    return [float(len(group))] * len(group)


async def greedy_as_label_says(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """A response of one token; one at temperature 0 gets the status of the label, or has parts of 1 and 2 tokens."""
    greedy = sampling_params["temperature"] == 0
    lengths = (1, 2) if greedy and sample.label == "parts" else (1,)
    parts = [copy.copy(sample) for _ in lengths]
    for part, length in zip(parts, lengths, strict=True):
        part.tokens, part.response_length, part.rollout_log_probs = [5] * (length + 1), length, [-1.0] * length
        part.status = sample.label if greedy and sample.label in set(Status) else Status.COMPLETED
        part.train_metadata = {"mine": 7}
    return parts


def two_with_a_baseline(args: Any, group: SampleGroup) -> FilterDecision:
    """Keeps groups of two samples whose baseline is more than 3."""
    baselines = [sample.train_metadata["baseline_reward"] for sample in group]
    return FilterDecision(keep=len(group) == 2 and min(baselines) > 3, reason="low_baseline")


@scoped("row", needs=("baseline_reward",))
def minus_baseline(args: Any, batch: Any) -> None:
    rewards = batch.columns["reward"] - batch.columns["baseline_reward"]
    pairs = zip(rewards, batch.columns["response_length"], strict=True)
    batch.columns["advantages"] = [np.full(length, reward, dtype=np.float32) for reward, length in pairs]
    batch.columns["returns"] = batch.columns["advantages"]


def last_token_with_baseline(args, samples):
    return {**last_token_only(args, samples), "baseline_reward": [0.5 for _ in samples]}


def raises_a_lone_surrogate(args: Any, sample: Sample) -> float:
    raise ValueError(f"bad text \ud800 in {sample.label}")


def rewards_with_a_lone_surrogate(args: Any, sample: Sample) -> dict[str, Any]:
    print("\udcff")
    return {"score": 1.0, "why": "\ud800"}


def notes(args: Any, sample: Any) -> float:
    """Writes into the metadata what a filter may want to read."""
    sample.metadata["parts"] = {"format": 1.0, "steps": [int(sample.label), None]}
    sample.metadata["seen"]["times"] += 1
    sample.metadata["object"] = object()
    del sample.metadata["scratch"]
    return 1.0


def notes_of_group(args: Any, group: Any) -> list[float]:
    for sample in group:
        sample.metadata["rank"] = sample.sample_index
    return [0.0 for _ in group]
