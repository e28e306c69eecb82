"""Whole runs whose user code raises what would end a process or an event loop: its sample fails, and is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import WorkerError
from buffer_rl.observe.metrics import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

ENDS = """
import asyncio
import sys

from buffer_rl.rollout.generate import generate as ask

failed, seen = set(), set()

async def tool():
    sys.exit(3)

async def gathers():
    await asyncio.gather(tool(), asyncio.sleep(60))

async def raises():
    raise asyncio.CancelledError

async def is_cancelled():
    asyncio.current_task().cancel()
    await asyncio.sleep(60)

WAYS = (tool, gathers, raises, is_cancelled)

async def generate(args, sample, sampling_params):
    if sample.sample_index == 0 and len(failed) < len(WAYS) and sample.uid not in failed:
        failed.add(sample.uid)
        await WAYS[len(failed) - 1]()
    seen.add(sample.uid)
    if len(seen) > len(WAYS):  # in the second step
        asyncio.get_running_loop().call_soon(sys.exit, 4)
        await asyncio.sleep(60)
    return await ask(args, sample, sampling_params)
"""


def test_code_that_exits_fails_its_sample_and_a_callback_that_exits_ends_the_run_by_name(
    train: Callable[[Any], Any], make_options: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "ends.py"
    path.write_text(ENDS)
    options: dict[str, Any] = {"eval_prompt_data": [], "eval_interval": None, "rollout_batch_size": 4}
    args = make_options(custom_generate_function_path=f"{path}:generate", **options)
    with pytest.raises(WorkerError, match="code ended the event loop of the process: SystemExit: 4"):
        train(args)
    (failures,) = (line["rollout/data_failures"] for line in read_metrics(args.run_dir) if line["kind"] == "rollout")
    assert failures == 4
