"""One step off, with everything that overlaps in it, against the same work one after another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.state import BufferState
from buffer_rl.driver.launch import _Run
from buffer_rl.driver.provenance import provenance_of
from buffer_rl.driver.restart import Processes, RunSession
from buffer_rl.plan.roles import ACTOR
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.worker import RolloutWorker
from buffer_rl.train.rank import TrainRank
from harness.checkpoints import final_weights

FUNCTIONS = """
def some_a(args, group):
    return any(sample.reward > 0 for sample in group)


async def gives_one_back(args, rollout_id, buffer, evaluation=False):
    '''Leases its groups, gives the second one back, and leases again: the one after it comes before it.'''
    from buffer_rl.rollout.generate import generate

    groups = await buffer.aget_samples(3)
    await buffer.aadd_samples([groups.pop(1)])
    groups += await buffer.aget_samples(1)
    for group in groups:
        for sample in group:
            await generate(args, sample, {"max_new_tokens": 6, "temperature": 1.0})
            sample.reward = float(sample.response.count("a"))
    return groups
"""
STEPS = 5


def sequential(args: Any, limit_s: float = 120.0) -> None:
    """Train ``args``: rollout r + 1 is generated with the weights of version r, before step r is taken."""
    registry = PluginRegistry.from_flags(args.plugin)
    with ExitStack() as stack:
        session = RunSession(args, registry, None, provenance_of(args, registry, []), stack, None)
        processes = stack.enter_context(Processes())
        run = _Run(args, registry, None, session, processes)
        run.start()
        publisher, train = run.publisher(), run.trained[ACTOR]
        assert publisher is not None
        assert run.rollout is not None

        def generate(number: int) -> None:
            ticket = run.buffer.call(BufferState.generate, number)
            run.rollout.call(RolloutWorker.run, ticket, timeout_s=limit_s)  # type: ignore[union-attr]
            run.buffer.call(BufferState.end_ticket, ticket)

        run.buffer.call(BufferState.release, 0)
        generate(0)
        for step in range(STEPS):
            if step + 1 < STEPS:
                generate(step + 1)
            run.buffer.call(BufferState.close_selection, step)
            train.call(TrainRank.fetch, step, timeout_s=limit_s)
            train.call(TrainRank.train, timeout_s=limit_s)
            run.buffer.call(BufferState.commit, step, step + 1)
            publisher.publish(step + 1)
            run.buffer.call(BufferState.release, step + 1)
        publisher.close()
        run.save_hf(str((Path(args.run_dir) / "hf").absolute()))


@pytest.mark.parametrize(
    "changes",
    [
        {"dynamic_sampling_filter_path": "{folder}/functions.py:some_a"},
        {"rollout_function_path": "{folder}/functions.py:gives_one_back"},
    ],
    ids=["a filter", "a requeue"],
)
@pytest.mark.slow
def test_one_step_off_ends_with_the_bits_of_the_same_work_one_after_another(
    train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path: Path, changes: dict[str, str]
) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    weights = []
    for name in ("overlapped", "sequential"):
        args = options_in(
            tmp_path / name,
            schedule="one-step-off",
            deterministic=True,
            use_tis=True,
            num_rollout=STEPS,
            eval_interval=None,
            eval_prompt_data=[],
            **{key: value.format(folder=tmp_path) for key, value in changes.items()},
        )
        if name == "overlapped":
            assert train(args).steps == STEPS
        else:
            sequential(args)
        weights.append(final_weights(tmp_path / name))
    assert weights[0] == weights[1]
