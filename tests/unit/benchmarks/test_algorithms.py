"""What the benchmark of the algorithms says of its runs, and when it does one again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

Script = Callable[[str], ModuleType]


def outcome(page: ModuleType, **changes: Any) -> Any:
    values = {"title": "GRPO", "options": "", "before": 0.25, "after": 0.5, "error": 0.05, "num_prompts": 400}
    return page.Outcome(**{**values, "clipped": 0.03, "seconds": 90.0, "rewards": [0.2, 0.3, 0.4], **changes})


def write_run(folder: Path, rewards: dict[tuple[int, str], list[float]]) -> None:
    folder.mkdir(parents=True)
    rows = [
        {"kind": "eval", "rollout_id": step, "prompt": prompt, "reward": reward}
        for (step, prompt), values in rewards.items()
        for reward in values
    ]
    rows.append({"kind": "train", "rollout_id": 0, "prompt": "a=", "reward": 1.0})
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {"step": 0, "kind": "rollout", "rollout/raw_reward": 0.5, "rollout/raw_reward_all": 0.25},
        {"step": 0, "kind": "train", "train/pg_clipfrac": 0.1},
        {"step": 1, "kind": "rollout", "rollout/raw_reward": 0.6, "rollout/raw_reward_all": 0.375},
        {"step": 1, "kind": "train", "train/pg_clipfrac": 0.3},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


def test_the_standard_error_is_that_of_the_paired_differences(script: Script) -> None:
    page = script("algorithms_page")
    # Differences 1/2, 0, 1/4, 1/4: mean 1/4; squares of deviations 1/16, 1/16, 0, 0; s^2 = (1/8) / 3; Var = s^2 / 4.
    before = {"a": 0.25, "b": 1.0, "c": 0.0, "d": 0.5}
    after = {"a": 0.75, "b": 1.0, "c": 0.25, "d": 0.75}
    assert page.error_of_gain(before, after) == pytest.approx((1 / 96) ** 0.5)


def test_evaluations_of_other_prompts_have_no_paired_error(script: Script) -> None:
    page = script("algorithms_page")
    with pytest.raises(ValueError, match="not twice the same"):
        page.error_of_gain({"a": 0.0, "b": 1.0}, {"a": 0.0, "c": 1.0})


def test_a_run_is_measured_by_its_first_and_last_evaluation_and_all_its_groups(script: Script, tmp_path: Path) -> None:
    page = script("algorithms_page")
    scores = {(0, "a="): [0.0, 0.0], (0, "b="): [1.0, 0.0], (2, "a="): [1.0, 0.0], (2, "b="): [1.0, 1.0]}
    write_run(tmp_path / "run", scores)
    found = page.measure(tmp_path / "run", 2, title="GRPO", options="", seconds=60.0)
    assert (found.before, found.after, found.num_prompts, found.error) == (0.25, 0.75, 2, 0.0)
    assert found.rewards == [0.25, 0.375]
    assert found.clipped == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("after", "error", "learned"), [(0.5, 0.1, True), (0.5, 0.125, False), (0.0, 0.01, False), (0.25, 0.0, False)]
)
def test_an_algorithm_has_learned_above_two_standard_errors(
    script: Script, after: float, error: float, learned: bool
) -> None:
    assert outcome(script("algorithms_page"), after=after, error=error).learned is learned


def test_an_algorithm_without_a_result_keeps_its_row(script: Script) -> None:
    page = script("algorithms_page")
    text = page.table({"grpo": outcome(page), "ppo": None}, {"grpo": "GRPO", "ppo": "PPO"}, "--num-rollout 60")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2] == "| GRPO | 0.250 | 0.500 | +0.250 | 0.050 | 5.0 | yes | 3.0% | 1.5 |  |"
    assert "no result" in rows[3]
    assert len({row.count("|") for row in rows}) == 1


def test_the_page_changes_between_its_markers_alone(script: Script) -> None:
    page = script("algorithms_page")
    before = f"head\n{page.BEGIN}\nold\n{page.END}\ntail\n"
    once = page.page_with(before, "new\n")
    assert once == f"head\n{page.BEGIN}\n\nnew\n\n{page.END}\ntail\n"
    assert page.page_with(once, "new\n") == once


def test_the_picture_has_a_panel_an_algorithm_and_fetches_nothing(script: Script) -> None:
    page = script("algorithms_page")
    text = page.draw([outcome(page), outcome(page, title="RLOO <1>"), outcome(page), outcome(page)])
    panels = ElementTree.fromstring(text).findall("{http://www.w3.org/2000/svg}svg")
    assert len(panels) == 4
    assert len({(panel.get("x"), panel.get("y")) for panel in panels}) == 4
    assert text.count("http") == 1  # the name of the SVG namespace


def test_a_run_is_done_again_only_with_other_settings_or_after_a_failure(script: Script, tmp_path: Path) -> None:
    campaign = script("algorithms").Campaign(folder=tmp_path, steps=1, seed=0, timeout_s=30.0)
    (tmp_path / "x").mkdir()
    good = [sys.executable, "-c", "open('../count', 'a').write('.')"]  # the working directory is that of the logs
    bad = [sys.executable, "-c", "raise SystemExit(3)"]
    problem = campaign.once("x", [bad], {"lr": 1})
    assert problem is not None
    assert problem.startswith("exit status 3")
    assert [campaign.once("x", [good], {"lr": lr}) for lr in (1, 1, 2, 2)] == [None] * 4
    assert (tmp_path / "count").read_text() == ".."


def test_a_run_ends_at_its_deadline(script: Script, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    problem = script("algorithms").execute(command, tmp_path / "run.log", 0.2)
    assert problem is not None
    assert problem.startswith("no end after")


def test_flags_without_a_value_are_switches(script: Script) -> None:
    assert script("algorithms").shown_options({"eps_clip": 0.2, "normalize_advantages": True}) == [
        "--eps-clip",
        "0.2",
        "--normalize-advantages",
    ]


def test_what_the_page_says_to_type_for_a_measured_algorithm_is_what_was_measured(script: Script) -> None:
    benchmark = script("algorithms")
    text = benchmark.PAGE.read_text(encoding="utf-8").partition("## What to type\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    typed = {title: flags.split("; ")[0] for title, flags, measured, _ in rows if measured.startswith("yes")}
    assert typed == {
        recipe.title: f"`{' '.join(benchmark.shown_options(recipe.options))}`" if recipe.options else "none"
        for recipe in benchmark.RECIPES.values()
    }
    shared = {name: value for name, value in benchmark.SHARED.items() if name != "dump_samples"}  # trains nothing
    assert " ".join(benchmark.shown_options({"num_rollout": 60, **shared})) in text
