"""The baseline of ReMax (arXiv 2310.10505): for each prompt, the reward of a response at temperature 0.

Where the run's estimator needs the column ``baseline_reward``, the default rollout generates one further response to
each prompt, scores it as it scores the others, and writes the reward to ``train_metadata["baseline_reward"]`` of every
sample of the group, from where the converter takes it. A rollout function of the user's writes it there itself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from buffer_rl.algo.rewards import shaped
from buffer_rl.args import Args
from buffer_rl.errors import RewardError, RolloutError
from buffer_rl.kinds.marks import needs_of
from buffer_rl.kinds.reward import check_group_rewards
from buffer_rl.plan.algorithm import estimator_needs, estimator_of, is_supervised, loss_flag, loss_of
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, SampleGroup, Status
from buffer_rl.rollout.stats import penalised_lengths

BASELINE = "baseline_reward"
GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0})


def needs_baseline(args: Args, registry: PluginRegistry) -> bool:
    """Whether the run's estimator needs baselines that no converter of the user's gives. Raises PluginError."""
    if is_supervised(args) or args.custom_convert_samples_to_train_data_path:
        return False
    return BASELINE in needs_of(registry.resolve("advantage", estimator_of(args)[1]))


def rollout_log_probs_reader(args: Args, registry: PluginRegistry) -> str:
    """The flag by which the run's loss or advantages read the engine's log-probabilities, so that every row needs them;
    empty where there is none. Raises PluginError."""
    if is_supervised(args):
        return ""
    estimator_flag, estimator = estimator_of(args)
    needs = {
        f"{loss_flag(args)} {loss_of(args)}": needs_of(registry.resolve("loss", loss_of(args))),
        estimator_flag: estimator_needs(args, registry.resolve("advantage", estimator)),
    }
    readers = {"--use-rollout-logprobs": args.use_rollout_logprobs, "--use-tis": args.use_tis}
    readers |= {flag: "rollout_log_probs" in columns for flag, columns in needs.items()}
    return next((flag for flag, reads in readers.items() if reads), "")


def greedy_group(group: SampleGroup) -> SampleGroup:
    """The prompt of a leased group as a group of one sample, which is to be generated at temperature 0.

    Its ``sample_index`` follows the last one of the group, so that its seed and request id are its own; ``index`` and
    ``session_id``, which name one sample of the group, are None. It shares nothing that can be changed with the
    group, multimodal values excepted."""
    prompt = group.as_prompts()[0]
    own = copy.deepcopy(prompt.changed(multimodal_inputs=None, index=None, session_id=None))
    own.multimodal_inputs = None if prompt.multimodal_inputs is None else dict(prompt.multimodal_inputs)
    own.sample_index = 1 + max(sample.sample_index for sample in group)
    return replace(group, samples=[own], sampling_params=dict(GREEDY))


def set_baseline(args: Args, group: SampleGroup, greedy: SampleGroup) -> str:
    """Write the reward of the scored ``greedy`` response to the samples of ``group``.

    It is shaped (``buffer_rl.algo.rewards.shaped``) as the rewards are that it is subtracted from; of several parts it
    is the mean. Returns an empty text, or the reason why there is none."""
    for status in (Status.ABORTED, Status.FAILED):
        if any(sample.status is status for sample in greedy):
            return f"baseline_{status}"
    if any(sample.reward is None for sample in greedy):
        return "baseline_abstained"
    rewards = np.asarray([sample.get_reward_value(args) for sample in greedy], dtype=np.float64)
    baseline = float(np.mean(shaped(args, rewards, penalised_lengths(args, greedy))))
    for sample in group:
        sample.train_metadata = {**(sample.train_metadata or {}), BASELINE: baseline}
    return ""


def baseline_of(sample: Sample) -> float:
    """The baseline that the sample's rollout function gave. Raises RolloutError, naming the row, without a finite
    number."""
    value = (sample.train_metadata or {}).get(BASELINE)
    try:
        return check_group_rewards([value], 1, where="")[0]
    except RewardError as error:
        raise RolloutError(
            f'the sample cannot be used: its train_metadata["{BASELINE}"] is {value!r:.80}',
            where=f"row {sample.row_id}",
            expected="a finite number, the reward of a greedy response to its prompt, which the advantage estimator "
            "needs",
            hint="the default rollout function gives it; one of your own sets it on every sample",
        ) from error
