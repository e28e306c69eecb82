"""Whole runs whose rewards are the scores of a reward model; its process is killed in mid-rollout, or not."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import WorkerDiedError
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.testing.tiny import make_tiny_model
from harness.checkpoints import final_weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[..., Any]
FIT = Path(__file__).resolve().parents[2] / "examples" / "reward_model" / "fit.py"

KILLER = """
import asyncio, os, signal
from pathlib import Path

from buffer_rl.rollout import generate as default
from buffer_rl.rollout.context import current_context
from harness.processes import descendants


def signal_reward_model(number):
    (model,) = [p for p in descendants(TEST) if p.command.startswith("ray::RewardModelWorker")]
    os.kill(model.pid, number)


async def generate(args, sample, sampling_params, evaluation=False):
    '''In rollout 1 of a run "killed", stops the reward model before the first group is scored, and kills it with the
    third one, when a call waits for its answer.'''
    if args.run_dir.endswith("thrice") and not evaluation and sample.sample_index == 0 and sample.group_index % 3 == 0:
        marker = Path(args.run_dir) / f"seen_{sample.group_index}"
        if not marker.exists() and sample.group_index < 9:
            marker.touch()
            signal_reward_model(signal.SIGKILL)
    chosen = not evaluation and sample.sample_index == 0 and sample.group_index in (3, 5)
    if chosen and args.run_dir.endswith("killed"):
        marker = Path(args.run_dir) / f"seen_{sample.group_index}"
        if not marker.exists():
            marker.touch()
            if sample.group_index == 3:
                signal_reward_model(signal.SIGSTOP)
                Path(args.run_dir, "stopped").touch()
            else:
                while not Path(args.run_dir, "stopped").exists() or not any(current_context().scorer.model.num_asked):
                    await asyncio.sleep(0.01)
                signal_reward_model(signal.SIGKILL)
    return await default.generate(args, sample, sampling_params)
"""


@pytest.fixture(scope="module")
def run(train: Callable[[Any], Any], options_in: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains on the scores of a reward model with random weights; returns the options: ``run(name, **options)``."""
    folder = tmp_path_factory.mktemp("reward_model")
    sizes = {"characters": "abc=", "hidden_size": 32, "intermediate_size": 48}
    kind = "AutoModelForSequenceClassification"
    classifier = make_tiny_model(folder / "classifier", seed=1, auto_class=kind, num_labels=1, **sizes)
    harness = str(Path(__file__).parents[1])
    (folder / "killer.py").write_text(f"import sys\nsys.path.append({harness!r})\nTEST = {os.getpid()}\n" + KILLER)

    def run(name: str, **options: Any) -> Any:
        args = options_in(
            folder / name,
            **{
                "custom_rm_path": None,
                "rm_model": classifier,
                "custom_generate_function_path": f"{folder / 'killer.py'}:generate",
                "deterministic": True,
                "progress": "plain",
                "num_rollout": 6,
                **options,
            },
        )
        train(args)
        return args

    return run


def outcome(args: Any) -> tuple[dict[str, str], list[dict[str, float]]]:
    """The final weights, and the metrics of each step without times."""
    timeless = [
        {name: value for name, value in step.items() if not name.startswith(("perf/", "time"))}
        for step in read_metrics(args.run_dir)
    ]
    return final_weights(Path(args.run_dir)), timeless


@pytest.mark.slow
def test_a_reward_model_that_is_killed_in_mid_rollout_changes_no_bit(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = outcome(run("undisturbed"))
    rewards = [step["rollout/raw_reward"] for step in undisturbed[1] if "rollout/raw_reward" in step]
    assert len(set(rewards)) == 6, rewards  # the policy changes, and its scores with it
    args = run("killed")
    assert outcome(args) == undisturbed
    assert Path(args.run_dir, "seen_5").exists()  # it was killed
    assert "started again" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_run_learns_what_its_reward_model_was_fitted_to(run: Run, task: Path, tmp_path: Path) -> None:
    """The rule, which labelled what the reward model was fitted to, sees only the evaluation."""
    spec = importlib.util.spec_from_file_location("reward_model_fit", FIT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{word}=", "label": "a"}) + "\n" for word in ("ab", "ca", "bcb")))
    assert example.fit(task / "model", data, tmp_path / "fitted", steps=80) < 0.2
    sets = {
        "datasets": [{"name": "held", "path": str(data), "rm_type": "exact_match", "n_samples_per_eval_prompt": 32}]
    }
    (tmp_path / "eval.yaml").write_text(json.dumps(sets))  # JSON is YAML
    options = {"eval_prompt_data": [], "eval_config": str(tmp_path / "eval.yaml"), "eval_interval": None}
    args = run(
        "learns",
        rm_model=str(tmp_path / "fitted"),
        prompt_data=str(data),
        n_samples_per_prompt=16,
        num_rollout=32,
        **options,
    )
    before, after = [step["eval/held"] for step in read_metrics(args.run_dir) if "eval/held" in step]
    assert before < 0.2
    assert after > 0.6


@pytest.mark.slow
def test_the_third_death_of_the_reward_model_starts_the_whole_run_again(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = outcome(run("quiet"))
    assert outcome(run("thrice")) == undisturbed
    restarted = "all processes of the run are started again, from the start (global restart 1 of 3)"
    assert capfd.readouterr().out.count(restarted) == 1


@pytest.mark.slow
def test_one_death_more_than_role_max_restarts_ends_the_run_where_it_may_not_start_again(run: Run) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        run("not_replaced_killed", role_max_restarts=0, max_global_restarts=0)
    assert caught.value.where.startswith("reward")
