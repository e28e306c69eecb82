"""Answers made to stall or crash a grader, through the real scorer: each is graded, in time, by one living process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from buffer_rl.records.groups import Status
from buffer_rl.rollout.failures import FailureKind

HANG_IF_SLOWER_S = 60.0
DEADLINE_S = 20.0  # of one reward; the first also imports sympy

CONTENTS = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    "9^{9^{9 + x - x}}",
    "9" * 1_000_000,
    "1e" + "9" * 1_000_000,
    "1/" + "0" * 100_000,
    "99999999!",
    "9!!!!!!!!",
    "(" * 100_000,
    "{" * 100_000 + "}" * 100_000,
    "-" * 100_000,
    "((x + y + z + w)^{99})^{99}",
    r"\frac{1}{1 + " * 5_000 + "x" + "}" * 5_000,
    r"\sum_{n=1}^{10^{9}} \frac{1}{n}",
    r"\binom{99999999}{9999999}",
    "a" * 50_000 + "!",
    "a" * 150 + "!",
    "<<" * 50_000,
    "*" * 100_000,
    "[" * 100_000,
    "$" * 100_001,
    "=" * 100_000,
    ("answer is " * 20_000),
    " " * 200_000 + "x",
    "\n" * 200_000 + "x",
    r"\text{" * 20_000,
    "1," * 100_000,
    r"\boxed{" * 50_000,
]
FORMS = ["{}", r"</think>\boxed{{{}}}", "</think>Answer: {}"]

LABELS = {"gpqa": "C", "f1": "east", "f1_exact": "east", "exact_match": "east"}
RULES = {
    "instruction_id_list": [
        "keywords:forbidden_words",
        "length_constraints:number_words",
        "length_constraints:number_paragraphs",
        "detectable_content:number_placeholders",
        "detectable_format:number_bullet_lists",
        "detectable_format:number_highlighted_sections",
        "detectable_format:multiple_sections",
        "detectable_format:json_format",
        "detectable_format:title",
    ],
    "kwargs": [
        {"forbidden_words": ["a a", "x"]},
        {"num_words": 9, "relation": "at least"},
        {"num_paragraphs": 3},
        {"num_placeholders": 3},
        {"num_bullets": 3},
        {"num_highlights": 3},
        {"section_spliter": "=", "num_sections": 3},
        {},
        {},
    ],
}


@asynccontextmanager
async def heartbeat() -> AsyncIterator[list[int]]:
    """Counts turns of the event loop while the body waits."""
    beats = [0]

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.002)
            beats[0] += 1

    task = asyncio.create_task(beat())
    try:
        yield beats
    finally:
        task.cancel()


@pytest.mark.parametrize(
    "reward",
    [
        "numeric",
        "f1",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("math", "deepscaler", "dapo_binary", "gpqa"),
                *("f1_exact", "ifeval", "ifeval_fraction", "exact_match"),
            )
        ),
    ],
)
async def test_every_grader_answers_in_time_and_its_process_lives_on(kit: Any, reward: str) -> None:
    responses = [form.format(content) for content in CONTENTS for form in FORMS]
    warm_up, group = (kit.make_group(row, labels=[LABELS.get(reward, "17")] * len(responses)) for row in (0, 1))
    for sample, response in zip(group, responses, strict=True):
        sample.response, sample.status, sample.metadata = response, Status.COMPLETED, RULES
    warm_up.samples = warm_up.samples[:1]
    warm_up[0].status, warm_up[0].response, warm_up[0].metadata = Status.COMPLETED, "</think> 3", RULES
    async with kit.opened(rm_type=reward, rm_timeout_s=DEADLINE_S) as context, asyncio.timeout(HANG_IF_SLOWER_S):
        assert await context.scorer.score(warm_up.samples) == []
        pids = kit.pids(context)
        async with heartbeat() as beats:
            assert await context.scorer.score(group.samples) == []
        assert kit.pids(context) == pids
    assert beats[0] > 0 or not pids  # exact_match has no process: it is called at once
    assert all(0.0 <= sample.reward < 1.0 for sample in group)


async def test_arithmetic_that_no_signal_interrupts_is_killed_at_the_deadline(kit: Any, tmp_path: Any) -> None:
    path = tmp_path / "eager_reward.py"
    path.write_text("def score(args, sample):\n    return float((9 ** int(sample.label)) % 7)\n")
    group = kit.make_group(0, labels=["2", "387420489"])  # 9**9**9 takes a multiplication of minutes, in C
    opened = kit.opened(custom_rm_path=f"{path}:score", rm_timeout_s=2.0)
    async with opened as context, heartbeat() as beats, asyncio.timeout(HANG_IF_SLOWER_S):
        (failure,) = await context.scorer.score(group.samples)
    assert (group[0].reward, group[1].reward, failure.reward) == (4.0, None, FailureKind.TIMEOUT)
    assert beats[0] >= 5
