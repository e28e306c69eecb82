"""The example of the code reward: its rows, and that its reward tells right programs from wrong ones."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from buffer_rl.cli import main
from buffer_rl.observe.gains import EvalGain
from buffer_rl.records.groups import Sample, Status
from buffer_rl_code.reward import score, score_fraction

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "code"
ARGS = SimpleNamespace(code_sandbox=None, plugin=[], code_timeout_s=2.0, code_memory_mb=2048)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"code_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_are_taken_from_left_to_right_and_programs_have_brackets_where_they_must() -> None:
    prepare = load("prepare")
    steps = (("+", 12), ("*", 3))
    assert prepare.value(steps, 2) == 42
    assert prepare.program(steps) == "def f(x): return (x+12)*3"
    assert prepare.program((("*", 3), ("*", 2))) == "def f(x): return x*3*2"
    row = prepare.task(steps)
    assert row["prompt"] == "+12 *3;"
    assert row["metadata"]["tests"][2] == {"fn": "f", "args": [0], "expected": 36}


def test_no_steps_are_in_two_files_and_every_shown_program_is_right(tmp_path: Path) -> None:
    prepare = load("prepare")
    prepare.make_data(tmp_path)
    prompts = []
    for name, size in prepare.SIZES.items():
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        assert len(rows) == size
        prompts += [row["prompt"] for row in rows]
        for row in rows if name == "shown" else ():
            names: dict[str, object] = {}
            exec(row["label"], names)  # programs of the example itself
            for test in row["metadata"]["tests"]:
                assert names["f"](*test["args"]) == test["expected"], row  # type: ignore[operator]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap: apt-get install bubblewrap")
def test_a_program_that_is_nearly_right_is_worth_something_in_training() -> None:
    """Without brackets ``+12 *3`` is right for no x but those at which both agree."""
    tests = load("prepare").task((("-", 3), ("*", 2)))["metadata"]["tests"]
    for code, all_of_them, share in (
        ("def f(x): return (x-3)*2", 1.0, 1.0),
        ("def f(x): return x*2-6", 1.0, 1.0),
        ("def f(x): return x-3*2", 0.0, 1 / 6),
        ("def f(x): return (x-3*2", 0.0, 0.0),
    ):
        sample = Sample(prompt="p", response=code, metadata={"tests": tests}, status=Status.COMPLETED)
        assert (score(ARGS, sample), score_fraction(ARGS, sample)) == (all_of_them, pytest.approx(share)), code


@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap: apt-get install bubblewrap")
def test_its_commands_pass_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("prepare").prepare(tmp_path)
    for name, data in (("sft", "shown"), ("train", "train")):
        own = ["--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / f"{data}.jsonl")]
        own += ["--eval-config", "none", "--eval-prompt-data", f"dev={tmp_path / 'dev.jsonl'}"]
        argv = [
            "train",
            "--config",
            str(EXAMPLE / f"{name}.yaml"),
            *own,
            "--run-dir",
            str(tmp_path / name),
            "--dry-run",
        ]
        assert main(argv) == 0, capsys.readouterr().err


def test_the_script_fails_if_too_little_was_learned() -> None:
    verdict = load("run").verdict
    assert verdict([]) is not None
    assert verdict([EvalGain(name="heldout", first_step=0, before=0.2, last_step=60, after=0.35)]) is not None
    assert verdict([EvalGain(name="heldout", first_step=0, before=0.2, last_step=60, after=0.5)]) is None
