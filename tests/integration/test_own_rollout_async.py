"""A rollout function that was written for lockstep, as it is, in an asynchronous run; and one that leases too much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.cli import main
from buffer_rl.errors import BufferStateError
from buffer_rl.observe.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]

STEPS = 4
FUNCTIONS = """
import asyncio

from buffer_rl.rollout.generate import generate, sampling_params_for


async def rollout(args, rollout_id, buffer, evaluation=False):
    groups = await buffer.aget_samples(args.rollout_batch_size)
    params = sampling_params_for(args, evaluation)
    await asyncio.gather(*[generate(args, sample, params) for group in groups for sample in group])
    for group in groups:
        for sample in group:
            sample.reward = sample.response.count("a")
    return groups


async def greedy(args, rollout_id, buffer, evaluation=False):
    return [group for _ in range(2) for group in await buffer.aget_samples(args.rollout_batch_size)]
"""


@pytest.fixture
def options_of(make_options: Callable[..., Any], tmp_path: Path) -> Callable[[str], Any]:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    common: dict[str, Any] = {"schedule": "async", "max_staleness": 2, "use_tis": True, "num_rollout": STEPS}
    quiet: dict[str, Any] = {"eval_prompt_data": [], "eval_interval": None}
    return lambda name: make_options(rollout_function_path=f"{path}:{name}", **common, **quiet)


def test_a_rollout_function_of_ones_own_trains_asynchronously_as_it_is(
    train: Callable[[Any], Any], options_of: Callable[[str], Any]
) -> None:
    args = options_of("rollout")
    assert train(args).steps == STEPS
    records = read_metrics(args.run_dir)
    groups = [record["rollout/num_groups"] for record in records if "rollout/num_groups" in record]
    assert groups == [args.rollout_batch_size] * STEPS
    staleness = [record["staleness/max"] for record in records if "staleness/max" in record]
    assert len(staleness) == STEPS
    assert 0 < max(staleness) <= 2
    assert main(["ledger", str(args.run_dir), "--verify"]) == 0


def test_one_that_leases_more_than_its_ticket_is_told_what_to_do(
    train: Callable[[Any], Any], options_of: Callable[[str], Any]
) -> None:
    with pytest.raises(BufferStateError) as ended:
        train(options_of("greedy"))
    assert ended.value.what == "train_0 has 3 groups, and all of them are leased or finished"
    assert "at most buffer.ticket.num_groups" in ended.value.expected
    assert "report the leased groups and return" in ended.value.hint
