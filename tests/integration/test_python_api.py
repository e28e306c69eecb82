"""``buffer_rl.train``: runs from a script and from a notebook, with functions that only these have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import buffer_rl
from buffer_rl.api import FOLDER
from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.observe.run_folder import read_jsonl
from harness.processes import holds_within
from integration.conftest import options_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "train.ipynb"


def test_closures_and_lambdas_of_the_caller_reach_the_processes_that_call_them(task: Path, tmp_path: Path) -> None:
    letter = "b"

    def reward(args: Any, sample: Any) -> float:
        return float(sample.response.count(letter))

    given = options_of(task, tmp_path / "run").model_dump(exclude_unset=True)
    del given["custom_rm_path"]
    result = buffer_rl.train(given, reward=reward, filter=lambda args, samples: True, num_rollout=2)
    assert list(result.metrics) == [0, 1]
    assert "rollout/" not in repr(result)  # all metrics of all steps would fill a screen
    assert sorted(path.name.partition("_")[0] for path in (result.run_dir / FOLDER).glob("*.*")) == [
        "custom",
        "dynamic",
        "options",
    ]
    shown = [line for line in read_jsonl(result.paths["samples"]) if line["kind"] == "train"]
    assert shown
    assert all(line["reward"] == line["response"].count("b") for line in shown)
    assert set(result.evaluation) == {"held"}
    assert result.paths["report"].is_file()
    png = result._repr_png_()
    assert png is not None
    assert png.startswith(b"\x89PNG")


def test_ctrl_c_ends_the_run_with_all_of_its_processes_before_it_reaches_the_caller(task: Path, tmp_path: Path) -> None:
    """SIGINT for this process alone, as a notebook's interrupt."""
    given = options_of(task, tmp_path / "run").model_dump(exclude_unset=True, mode="json")
    given |= {"num_rollout": 10_000, "progress": "plain"}
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import buffer_rl
        try:
            buffer_rl.train({given!r})
        except KeyboardInterrupt:
            print("interrupted")
        """)
    )
    process = subprocess.Popen([sys.executable, "-u", str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 2/"):
            os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 0, seen
    assert seen[-1] == "interrupted\n"
    assert set(buffer_rl.__all__) <= set(dir(buffer_rl))
    assert 1 in buffer_rl.TrainResult.of(given["run_dir"]).metrics
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout.split()
    assert left == []


def test_a_run_whose_program_is_terminated_ends_well_with_a_checkpoint(task: Path, tmp_path: Path) -> None:
    given = options_of(task, tmp_path / "run").model_dump(exclude_unset=True, mode="json")
    given |= {
        "num_rollout": 10_000,
        "progress": "plain",
        "save": str(tmp_path / "saves"),
        "rollout_stop": ["${x}", "😀"],
    }
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", f"import buffer_rl; buffer_rl.train({given!r})"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.terminate()
    assert process.wait(timeout=60) == -signal.SIGTERM
    assert holds_within(60.0, lambda: any((tmp_path / "saves").glob("step_*/manifest.json")))
    assert holds_within(60.0, lambda: subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout == b"")


def test_the_notebook_learns_and_shows_its_curve(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    training = next(cell for cell in notebook.cells if "buffer_rl.train(" in cell.source)
    again = training.source.replace("num_rollout=60", "num_rollout=1")  # "change it, and run the cells again"
    notebook.cells.append(nbformat.v4.new_code_cell(again))
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = next(output["text"] for output in outputs if "held-out words" in output.get("text", ""))
    before, after = (float(word) for word in text.splitlines()[0].split()[2::2])
    assert after > before + 0.1
    assert any(output.get("text", "").startswith("step 60/60 ") for output in outputs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lrr": 1}, r"^train\(lrr=\): unknown option 'lrr'\n.*did you mean lr\?$"),
        ({"rewrd": lambda: 1}, r"^train\(rewrd=\): unknown option 'rewrd'\n.*did you mean reward_key\?$"),
        ({"lr": lambda: 1}, "this option takes no function"),
        ({"logger": ["tensorboard", lambda args: 1]}, "(?s)<lambda> at .* is of no module.*name it as module:fn"),
        ({"logger": [partial(print)]}, r"^train: functools.partial\(.*is of no module"),
        ({"rollout_stop": ["a", "b"], "lr": "fast"}, r"'fast' is not a number .*\(train\(lr=\)\)$"),
        ({"reward": lambda sample: 1}, "--num-rollout"),
        ({"reward": len, "custom_rm_path": "no.such:thing"}, "given twice"),
        ({"rollout_stop": [object()]}, "no value of an option"),
        ({"plugin": "no_such_plugin"}, "no_such_plugin"),
    ],
)
def test_a_wrong_option_is_an_error_of_the_caller(task: Path, tmp_path: Path, options: Any, said: str) -> None:
    given = {"hf_checkpoint": task / "model", "prompt_data": task / "train.jsonl", "run_dir": tmp_path / "run"}
    with pytest.raises((ConfigError, PluginError), match=said):
        buffer_rl.train(given, **options)
