"""The texts of ``buffer-rl plugins new``: for each plugin kind a working object and its test.

``$name`` is the name of the function or class. The texts are complete files but for the header that
``buffer_rl.verbs.new_plugin`` writes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """imports, code: the plugin's file. test_imports, test: the body of its test function."""

    code: str
    test: str
    imports: str = ""
    test_imports: str = ""


_TYPES = "from buffer_rl.types import {}\n"
_GROUP = """\
    uid = GroupUid("data", 0, 0)
    samples = [Sample(uid=uid, sample_index=i, response="right", label="right", reward=float(i)) for i in range(2)]
    group = SampleGroup(uid=uid, samples=samples)
"""
_GROUP_IMPORTS = _TYPES.format("GroupUid, Sample, SampleGroup")
_PASS = "    assert $name(None, "

SAMPLING = {
    "rollout": Skeleton(
        imports="from buffer_rl.contracts import RolloutBuffer\n"
        "from buffer_rl.rollout.default import DefaultRollout\n" + _TYPES.format("RolloutOutput"),
        code='''\
async def $name(args: Any, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False) -> RolloutOutput:
    """The built-in rollout with one metric more.

    One of your own leases groups with buffer.aget_samples, fills them, and reports each with buffer.afinish or
    buffer.areject, or returns them in RolloutOutput(groups=[...]).
    """
    output = await DefaultRollout(args)(args, rollout_id, buffer, evaluation)
    output.metrics["my_metric"] = float(rollout_id)
    return output
''',
        test="    assert list(inspect.signature($name).parameters) == ['args', 'rollout_id', 'buffer', 'evaluation']\n",
        test_imports="import inspect\n",
    ),
    "generate": Skeleton(
        imports="from buffer_rl.rollout.generate import generate\n" + _TYPES.format("Sample"),
        code='''\
async def $name(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """The built-in generation at half the temperature. A tool call or a second turn would stand behind it."""
    return await generate(args, sample, sampling_params | {"temperature": sampling_params["temperature"] / 2})
''',
        test="    assert list(inspect.signature($name).parameters) == ['args', 'sample', 'sampling_params']\n",
        test_imports="import inspect\n",
    ),
    "reward": Skeleton(
        imports=_TYPES.format("Sample"),
        code='''\
def $name(args: Any, sample: Sample) -> float:
    """1 if the response is the label, else 0. Any finite number will do; "async def" works too."""
    return float(sample.response.strip() == str(sample.label))
''',
        test=_PASS + 'Sample(response=" right", label="right")) == 1.0\n' + _PASS + 'Sample(label="right")) == 0.0\n',
        test_imports=_TYPES.format("Sample"),
    ),
    "group_reward": Skeleton(
        imports=_TYPES.format("SampleGroup"),
        code='''\
def $name(args: Any, group: SampleGroup) -> list[float]:
    """One reward a sample, in order: 1 for the label, shared by all samples that have it."""
    hits = [sample.response.strip() == str(sample.label) for sample in group]
    return [hit / max(1, sum(hits)) for hit in hits]
''',
        test=_GROUP + _PASS + "group) == [0.5, 0.5]\n",
        test_imports=_GROUP_IMPORTS,
    ),
    "filter": Skeleton(
        imports=_TYPES.format("FilterDecision, SampleGroup"),
        code='''\
def $name(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep a group whose rewards differ."""
    rewards = {sample.get_reward_value(args) for sample in group}
    return FilterDecision(keep=len(rewards) > 1, reason="" if len(rewards) > 1 else "all_alike")
''',
        test=_GROUP + _PASS + "group).keep\n    group[0].reward = 1.0\n    assert not $name(None, group).keep\n",
        test_imports=_GROUP_IMPORTS,
    ),
    "sample_filter": Skeleton(
        imports=_TYPES.format("SampleGroup"),
        code='''\
def $name(args: Any, groups: list[SampleGroup]) -> None:
    """Keep empty responses out of the loss."""
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.remove_sample or not sample.response
''',
        test=_GROUP + '    group[1].response = ""\n    $name(None, [group])\n'
        "    assert [sample.remove_sample for sample in group] == [False, True]\n",
        test_imports=_GROUP_IMPORTS,
    ),
    "all_samples_process": Skeleton(
        imports=_TYPES.format("SampleGroup"),
        code='''\
def $name(args: Any, groups: list[SampleGroup]) -> None:
    """Note how many samples were generated for each prompt. Kept groups are trained on as this function leaves them."""
    for group in groups:
        for sample in group:
            sample.metadata["group_size"] = len(group)
''',
        test=_GROUP + "    $name(None, [group])\n    assert group[0].metadata == {'group_size': 2}\n",
        test_imports=_GROUP_IMPORTS,
    ),
    "rollout_log": Skeleton(
        imports=_TYPES.format("Sample"),
        code='''\
def $name(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: dict[str, float], rollout_time: float
) -> bool:
    """Log one number more. True would say that nothing is left to log."""
    rollout_extra_metrics["rollout/empty_responses"] = sum(not sample.response for sample in samples) / len(samples)
    return False
''',
        test=_GROUP + '    metrics = {"rollout/raw_reward": 0.5}\n    group[0].response = ""\n'
        "    assert $name(0, None, group.samples, metrics, 1.0) is False\n"
        '    assert metrics["rollout/empty_responses"] == 0.5\n',
        test_imports=_GROUP_IMPORTS,
    ),
    "eval_rollout_log": Skeleton(
        code='''\
def $name(
    rollout_id: int, args: Any, data: dict[str, dict[str, list[Any]]], extra_metrics: dict[str, float]
) -> bool:
    """Log the best reward of each evaluation set. True would say that nothing is left to log."""
    for name, answers in data.items():
        extra_metrics[f"eval/{name}/best"] = max(answers["rewards"])
    return False
''',
        test="    metrics = {}\n"
        '    assert $name(0, None, {"dev": {"rewards": [0.0, 1.0]}}, metrics) is False\n'
        '    assert metrics == {"eval/dev/best": 1.0}\n',
    ),
    "buffer_filter": Skeleton(
        imports=_TYPES.format("QueueHeader"),
        code='''\
def $name(args: Any, rollout_id: int, buffer: list[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """The queued groups to lease next: those with the fewest attempts, then the oldest."""
    return sorted(buffer, key=lambda header: (header.attempts, header.admitted))[:num_samples]
''',
        test="""\
    attempts = [2, 0, 1]
    queue = [
        QueueHeader(uid=GroupUid("data", i, 0), admitted=i, prompt_length=1, attempts=n) for i, n in enumerate(attempts)
    ]
    assert [header.admitted for header in $name(None, 0, queue, 2)] == [1, 2]
""",
        test_imports=_TYPES.format("GroupUid, QueueHeader"),
    ),
    "reward_post_process": Skeleton(
        imports=_TYPES.format("Sample"),
        code='''\
def $name(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """The raw rewards of one group, and those to train on: centred at the mean."""
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [reward - mean for reward in raw]
''',
        test=_GROUP + _PASS + "group.samples) == ([0.0, 1.0], [-0.5, 0.5])\n",
        test_imports=_GROUP_IMPORTS,
    ),
    "samples_to_train_data": Skeleton(
        imports="import numpy as np\n\n" + _TYPES.format("Column, Sample"),
        code='''\
def $name(args: Any, samples: list[Sample]) -> dict[str, Column]:
    """The training columns of one group, one row a sample; see buffer_rl.types.TrainBatch."""
    rewards = np.asarray([sample.get_reward_value(args) for sample in samples], dtype=np.float32)
    return {
        "tokens": [np.asarray(sample.tokens, dtype=np.int32) for sample in samples],
        "response_length": np.asarray([sample.response_length for sample in samples], dtype=np.int32),
        "loss_mask": [np.ones(sample.response_length, dtype=np.float32) for sample in samples],
        "raw_reward": rewards,
        "reward": rewards - rewards.mean(),
    }
''',
        test="""\
    samples = [Sample(tokens=[5, 6, 7], response_length=2, reward=float(i)) for i in range(2)]
    columns = $name(None, samples)
    assert columns["reward"].tolist() == [-0.5, 0.5]
    assert [len(mask) for mask in columns["loss_mask"]] == [2, 2]
""",
        test_imports=_TYPES.format("Sample"),
    ),
}
