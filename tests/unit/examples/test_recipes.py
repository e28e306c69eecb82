"""The recipes: their options are right, and a curve that is too low is found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from buffer_rl.cli import main
from buffer_rl.testing.tiny import make_tiny_model

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "recipes"
FOR_A_GPU = sorted(path.stem for path in FOLDER.glob("*.yaml") if "NOT RUN YET" in path.read_text())


@pytest.fixture(scope="module")
def recipes() -> Any:
    spec = importlib.util.spec_from_file_location("recipes_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_recipe_is_compared_or_says_that_it_has_not_run(recipes: Any) -> None:
    assert sorted([*recipes.NAMES, *FOR_A_GPU]) == sorted(path.stem for path in FOLDER.glob("*.yaml"))
    assert set(json.loads(recipes.EXPECTED.read_text())) == set(recipes.NAMES)
    page = (FOLDER / "README.md").read_text()
    assert page.count("| not run yet |") == len(FOR_A_GPU) == 2


def test_the_page_has_the_expected_figures(recipes: Any) -> None:
    page = (FOLDER / "README.md").read_text()
    for name, of in json.loads(recipes.EXPECTED.read_text()).items():
        row = next(line for line in page.splitlines() if line.startswith(f"| [{name}.yaml]"))
        first, last = list(of["curve"].values())[:: len(of["curve"]) - 1]
        assert f"{first:.3f} to {last:.3f}, {of['seconds']:.0f} s, {of['memory_gb']:.1f} GB" in row


def test_a_curve_is_wrong_if_its_end_is_far_below_the_lowest_of_the_seeds(recipes: Any) -> None:
    found = [
        {"curve": {"0": 0.3, "60": end}, "seconds": s, "memory_gb": 2.0} for end, s in ((0.5, 9), (0.4, 7), (0.45, 8))
    ]
    expected = recipes.joined(found)
    assert expected == {
        "curve": {"0": 0.3, "60": 0.45},
        "lowest": {"0": 0.3, "60": 0.4},
        "seconds": 8,
        "memory_gb": 2.0,
        "seeds": 3,
    }
    assert recipes.fault({"curve": {"0": 0.1, "60": 0.351}}, expected) == ""
    assert "0.349 after 60 steps is below 0.350" in recipes.fault({"curve": {"0": 0.3, "60": 0.349}}, expected)
    assert "no evaluation after 60 steps" in recipes.fault({"curve": {"0": 0.3, "40": 0.9}}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_A_GPU)
def test_the_options_of_a_recipe_for_a_gpu_are_accepted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model, rows of the same form, and the CPU, in place of what they need."""
    make_tiny_model(tmp_path / "model", characters="abcdefgh0123456789 #+=?")
    row = {"question": "2 + 2 = ?", "answer": "2 + 2 = 4\n#### 4"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    options = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    options |= {
        "hf_checkpoint": str(tmp_path / "model"),
        "prompt_data": [str(tmp_path / "rows.jsonl")],
        "eval_prompt_data": [f"gsm8k={tmp_path / 'rows.jsonl'}"],
        "apply_chat_template": False,
        "rollout_max_prompt_len": 32,
        "rollout_max_response_len": 32,
        "train_device": "cpu",
        "engine_device": "cpu",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "run.yaml", "--dry-run"]) == 0, capsys.readouterr().err
