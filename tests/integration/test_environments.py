"""Whole runs with environments: some misbehave, and what is repeated has the same bits."""

from __future__ import annotations

import json
import runpy
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.section import compose
from harness.checkpoints import final_weights
from harness.processes import holds_within

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
FUNCTIONS = runpy.run_path(str(HERE / "environments.py"))
LEFT, DEADLINE_S = FUNCTIONS["LEFT"], FUNCTIONS["DEADLINE_S"]
HOW = ("raise", "exit", "hang", "late", "leak", "none", "raise", "leak")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
Run = Callable[..., tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and eight rows, each with its misbehaviour."""
    folder = tmp_path_factory.mktemp("environments")
    runpy.run_path(str(EXAMPLES / "agent" / "prepare.py"))["prepare"](folder)
    prompt = [{"role": "user", "content": "0-9"}]
    rows = [json.dumps({"prompt": prompt, "metadata": {"how": how}}) + "\n" for how in HOW]
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    return folder


@pytest.fixture
def run(task: Path, train: Callable[[Any], Any], tmp_path: Path) -> Run:
    """``run(name, **changes)``: metrics and folder of a run of two steps over all rows."""

    def play(name: str, **changes: Any) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path / name
        options: dict[str, Any] = {
            "run_dir": str(folder),
            "hf_checkpoint": str(task / "model"),
            "prompt_data": str(task / "rows.jsonl"),
            "environment": f"{HERE / 'environments.py'}:Behaves",
            "rollout_sample_filter_path": f"{HERE / 'agent_functions.py'}:note_rows",
            "reward_key": "score",
            "num_rollout": 2,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 4,
            "engine_context_length": 64,
            "lr": 1e-3,
            "logger": [],
            "progress": "none",
            **changes,
        }
        train(compose(CORE_SECTIONS)(**options))
        return read_metrics(folder / "metrics.jsonl"), folder

    return play


def total(metrics: list[dict[str, Any]], name: str) -> float:
    """Of counts per sample of two steps of 16 samples."""
    return sum(16 * line.get(f"rollout/agent/{name}", 0) for line in metrics)


def left_behind() -> list[str]:
    """The processes that the environments have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if command[:2] == [b"sleep", LEFT.encode()]:
            found.append(path.parent.name)
    return found


def test_environments_that_misbehave_are_named_their_siblings_trained_and_nothing_is_left(run: Run) -> None:
    options = {"environment": f"{HERE / 'environments.py'}:Misbehaves", "agent_timeout_s": DEADLINE_S}
    metrics, folder = run("misbehaves", **options)
    assert len([line for line in metrics if "train/loss" in line]) == 2
    assert total(metrics, "failed") == pytest.approx(3)  # two raise, one exits; each is played once more
    assert total(metrics, "end_timeout") == pytest.approx(2)
    assert total(metrics, "left_processes") >= 3  # of the one that hangs; a shell may be killed before it starts others
    text = "".join(path.read_text(errors="replace") for path in (folder / "logs").glob("rollout_*"))
    for said in (
        "its step raised ValueError: it is broken",
        "its step raised SystemExit: it left",
        "was in its step at the end of the play at",
        "left processes behind, which were ended",
    ):
        assert said in text, said
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    trained = Counter(row["row"].rpartition("/")[0] for row in rows if sum(row["mask"]))
    assert sorted(trained.values()) == [4] * 8  # all samples: also those that were cut in their second step
    closed = Counter((folder / "closed.txt").read_text().split())
    assert sorted(closed.values()) == [4] * 5 + [5] * 3  # once a play
    assert len(list(folder.glob("answered_*"))) == 1  # too late
    assert holds_within(10, lambda: not left_behind()), left_behind()
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall() == [("trained", 8)]


def test_deterministic_runs_end_with_equal_bits_also_if_a_rollout_worker_is_killed_in_a_play(
    run: Run, task: Path
) -> None:
    """The seeds that the environments were told are those of the rows, whoever plays first and how often."""
    held_out: dict[str, Any] = {"eval_prompt_data": [f"heldout={task / 'rows.jsonl'}@[0:3]"], "eval_interval": 2}
    held_out["skip_eval_before_train"] = True  # so that it is a play of training that dies
    found = []
    for name, changes in (
        ("first", {}),
        ("second", {"rollout_concurrency": 5}),
        ("killed", {"environment": f"{HERE / 'environments.py'}:Dies", "role_max_restarts": 1}),
    ):
        metrics, folder = run(name, deterministic=True, **held_out, **changes)
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        steps = [line["eval/heldout/steps"] for line in metrics if "eval/heldout/steps" in line]
        assert steps == [2.0]
        found.append((sorted(rows, key=lambda row: row["row"]), final_weights(folder)))
        if name == "killed":
            assert total(metrics, "killed") > 0
            assert total(metrics, "replayed") > 0
            assert total(metrics, "failed") == 0
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 32


def test_rewards_of_steps_train_the_same_in_both_schedules_and_matter(run: Run) -> None:
    """REINFORCE++ with a discount: a reward at its own answer counts for more than one at the end."""
    options = {"deterministic": True, "advantage_estimator": "reinforce_plus_plus", "gamma": 0.5}
    found = {}
    for name, changes in {
        "at_the_end": {},
        "lockstep": {"turn_rewards": True},
        "pipelined": {"turn_rewards": True, "schedule": "pipelined"},
    }.items():
        metrics, folder = run(name, **options, **changes)
        assert all(line["train/grad_norm"] > 0 for line in metrics if "train/grad_norm" in line)
        found[name] = final_weights(folder)
    assert found["lockstep"] == found["pipelined"]
    assert found["lockstep"] != found["at_the_end"]
