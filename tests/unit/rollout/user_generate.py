"""What users write: generate functions that call the built-in one."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from buffer_rl.records.groups import Sample, Status
from buffer_rl.rollout.generate import add_observation, generate, generate_turn


async def turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Calls the built-in function, and notes what it was given."""
    sample.metadata["given"] = sample.response_length
    return await generate(args, sample, sampling_params)


async def continuing_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await turns(args, sample, sampling_params)


continuing_turns.continues_partial = True  # type: ignore[attr-defined]


async def two_turns_with_a_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    for turn in range(2):
        if turn:
            add_observation(sample, "7")
        await generate_turn(args, sample, sampling_params | {"max_new_tokens": 20})
        if sample.status is Status.ABORTED:
            break
    return sample


async def best_of_three(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Asks three times at once; the responses are noted, the longest is kept."""
    copies = [copy.copy(sample) for _ in range(3)]
    answers = await asyncio.gather(*[generate(args, each, sampling_params) for each in copies])
    best = max(answers, key=lambda each: each.response_length)
    best.metadata["answers"] = [each.tokens[-each.response_length :] for each in answers]
    return best


async def one_after_another(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two parts with numbers of their own, at once, of two turns each; then a third response in the same object."""
    parts = [copy.copy(sample) for _ in range(2)]
    for number, part in enumerate(parts):
        part.part = number
    await asyncio.gather(*[two_turns_with_a_tool(args, part, sampling_params) for part in parts])
    await generate(args, parts[0], sampling_params)
    return parts


async def with_a_seed(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate(args, sample, sampling_params | {"sampling_seed": 77})


async def gives_up_second_samples(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The label of the second sample is the reward it leaves, or ``none``; ``lost`` is not given up."""
    sample = await generate(args, sample, sampling_params)
    if sample.sample_index == 1:
        sample.tokens, sample.response, sample.response_length, sample.rollout_log_probs = [], "", 0, None
        sample.weight_versions = []
        sample.status, sample.remove_sample = Status.ABORTED, sample.label != "lost"
        sample.reward = None if sample.label in ("none", "lost") else float(sample.label)
    return sample


async def status_from_label(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    sample.status = sample.label
    return sample


async def notes_evaluation(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Sample:
    sample.metadata["evaluation"] = evaluation
    return await generate(args, sample, sampling_params)


async def passes_keywords_on(args: Any, sample: Sample, sampling_params: Any, **kwargs: Any) -> Sample:
    sample.metadata["evaluation"] = "not received"
    return await generate(args, sample, sampling_params, **kwargs)


async def one_at_a_time(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """In turns of the event loop of their own."""
    for _ in range(5 * sample.sample_index):
        await asyncio.sleep(0)
    return await generate(args, sample, sampling_params)


async def as_built_in(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate(args, sample, sampling_params)


async def fifth_is_warmer(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    warmer = {"temperature": 2.0} if sample.sample_index == 5 else {}
    return await generate(args, sample, sampling_params | warmer)


async def in_sessions(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.session_id = f"session {sample.sample_index}"
    return await asks_twice(args, sample, sampling_params)


async def asks_twice(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await generate(args, sample, sampling_params)
    return await generate(args, sample, sampling_params)
