"""Log functions of slime's signatures: what they see, what they may add, what their answer changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import PluginError, RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Status, Ticket
from buffer_rl.rollout.user_functions import LogFunctions
from buffer_rl.rollout.worker import RolloutWorker

TRAIN = {"rollout/raw_reward": 0.5, "rollout/raw_reward_all": 0.25, "perf/rollout_time": 2.0}
EVAL = {"eval/dev": 0.25, "eval/dev/truncated": 0.5, "eval/dev/response_len": 3.0, "perf/rollout_time": 2.0}


def finished(kit: Any) -> list[Any]:
    """Two groups, not in the order of their uids."""
    groups = [kit.make_group(row, data_set="dev") for row in (1, 0)]
    for group in groups:
        for sample in group:
            sample.reward, sample.status = float(group.uid.row), Status.COMPLETED
    groups[0][1].status = Status.TRUNCATED
    return groups


def free_name(folder: Path) -> Path:
    """Modules are imported once, so each needs a name of its own."""
    return folder / f"log_{len(list(folder.iterdir()))}.py"


async def logged(kit: Any, folder: Path, body: str, *, evaluation: bool = False, **options: Any) -> dict[str, float]:
    names = "rollout_id, args, data, extra_metrics"
    if not evaluation:
        names = "rollout_id, args, samples, rollout_extra_metrics, rollout_time"
    path = free_name(folder)
    prefix = "async def" if "await " in body else "def"
    path.write_text(f"import asyncio\n{prefix} log({names}):\n    {body}\n")
    flag = "custom_eval_rollout_log_function_path" if evaluation else "custom_rollout_log_function_path"
    functions = LogFunctions(kit.make_args(**{flag: f"{path}:log"}, **options), PluginRegistry())
    ticket = kit.make_ticket(2, rollout_id=7, evaluation=evaluation)
    return await functions.metrics(ticket, finished(kit), dict(EVAL if evaluation else TRAIN), 1.5)


async def test_without_a_function_metrics_stay_as_they_are(kit: Any) -> None:
    functions = LogFunctions(kit.make_args(), PluginRegistry())
    assert await functions.metrics(kit.make_ticket(1), [], TRAIN, 1.0) is TRAIN


async def test_a_training_function_sees_id_samples_metrics_and_time_and_adds_numbers(kit: Any, tmp_path: Path) -> None:
    body = (
        "rollout_extra_metrics |= {'id': rollout_id, 'time': rollout_time, 'n': len(samples), 'lr': args.lr,"
        " 'first': samples[0].reward, 'last': samples[-1].reward, 'seen': rollout_extra_metrics['rollout/raw_reward']}"
    )
    added = {"id": 7, "time": 1.5, "n": 4, "lr": 1e-3, "first": 0.0, "last": 1.0, "seen": 0.5}
    assert await logged(kit, tmp_path, body, lr=1e-3) == TRAIN | added


async def test_an_evaluation_function_sees_rewards_truncation_and_samples_of_each_set(kit: Any, tmp_path: Path) -> None:
    body = (
        "d = data.pop('dev'); assert not data; extra_metrics['eval/dev/best'] = max(d['rewards']);"
        " assert d['truncated'] == [False, False, False, True]; assert d['rewards'] == [0.0, 0.0, 1.0, 1.0];"
        " assert [s.sample_index for s in d['samples']] == [0, 1, 0, 1]; await asyncio.sleep(0); return False"
    )
    assert await logged(kit, tmp_path, body, evaluation=True) == EVAL | {"eval/dev/best": 1.0}


async def test_an_evaluation_function_does_not_see_samples_whose_rewards_abstain(kit: Any, tmp_path: Path) -> None:
    body = "d = data['dev']; extra_metrics['seen'] = [len(d[n]) for n in ('rewards', 'truncated', 'samples')][0]"
    (tmp_path / "log.py").write_text(f"def log(rollout_id, args, data, extra_metrics):\n    {body}\n")
    options = {"custom_eval_rollout_log_function_path": f"{tmp_path / 'log.py'}:log"}
    functions = LogFunctions(kit.make_args(**options), PluginRegistry())
    groups = finished(kit)
    groups[0][0].reward = None
    metrics = await functions.metrics(kit.make_ticket(2, evaluation=True), groups, dict(EVAL), 1.5)
    assert metrics["seen"] == 3


async def test_true_leaves_only_what_progress_curve_and_early_stop_are_made_of(kit: Any, tmp_path: Path) -> None:
    assert await logged(kit, tmp_path, "return True") == {
        "rollout/raw_reward": 0.5,
        "rollout/raw_reward_all": 0.25,
    }
    assert await logged(kit, tmp_path, "return True", evaluation=True) == {"eval/dev": 0.25}
    stop = "eval/dev/response_len < 2"
    kept = await logged(kit, tmp_path, "return True", evaluation=True, early_stop=stop)
    assert kept == {"eval/dev": 0.25, "eval/dev/response_len": 3.0}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise KeyError('my bug')", "KeyError: 'my bug'"),
        ("return 'yes'", "it returned 'yes'"),
        ("rollout_extra_metrics['x'] = {}", "the metric 'x' is {}"),
    ],
)
async def test_what_goes_wrong_names_function_and_rollout(kit: Any, tmp_path: Path, body: str, problem: str) -> None:
    with pytest.raises(RolloutError, match=problem) as caught:
        await logged(kit, tmp_path, body)
    assert caught.value.where.endswith("log_0.py:log', train_7")


async def test_a_function_of_the_wrong_signature_is_refused_before_a_run(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "log.py").write_text("def log(args, samples): ...\n")
    with pytest.raises(PluginError, match="rollout_extra_metrics"):
        LogFunctions(kit.make_args(custom_rollout_log_function_path=f"{tmp_path}/log.py:log"), PluginRegistry())


async def test_a_worker_that_goes_on_where_no_group_is_missing_calls_no_function() -> None:
    """A log function that takes the mean of no rewards would end the run."""
    worker = object.__new__(RolloutWorker)  # without buffer, functions and options, all of which a call would need
    ticket = Ticket(rollout_id=3, evaluation=False, num_groups=0, version=3, incarnation="1", worker=2)
    assert await worker.run(ticket) == ({}, [])
