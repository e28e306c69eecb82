"""Do the schedules end with equal parameters? The quickstart's model and task in every mode, side by side.

    python benchmarks/schedule_equality.py            # about five minutes
    python benchmarks/schedule_equality.py --recorded # the second table alone, about a minute

First table: whole runs of five steps with --deterministic, which gives equal tokens and sums that do not depend on
their order. Each is compared with the run in lockstep of one rank that has the same loss and filter; so that the second
one shows something, runs of two ranks are compared with one rank too.

Second table: without --deterministic. The tokens that an engine samples then depend on which requests are computed
together, so whole runs differ from their second repetition on, whatever the schedule. What can be compared is training
on the same recorded rollouts (--load-debug-rollout-data), with KL: sums in float32 in another order. Adam's first steps
blow such differences of tiny gradients up to the size of the learning rate, unless --adam-eps is above them.

The difference is the largest of any weight, relative to the largest weight of its tensor.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from buffer_rl.cluster.session import ray_session
from buffer_rl.config import compose
from buffer_rl.driver.launch import launch_training
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.plugins import PluginRegistry

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
WORDS = ("cat", "dog", "tree", "house", "water", "green", "stone", "light", "paper", "night", "river", "cloud")
# A random model spells nothing: the reward is for having the answer's first letter somewhere, so that some prompts have
# four equal rewards and some have not.
REWARD = "def score(args, sample):\n    return float(sample.label[0] in sample.response)\n"
FILTER = {"dynamic_sampling_filter_path": "filter_hub.reward_deviation:nonzero"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
PIPELINED = {"schedule": "pipelined"}
STREAMED = {"schedule": "pipelined", "stream_gradients": True}
ROLES = {"num_advantage_workers": 1, "num_actor_fwd_workers": 1}
Weights = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the modes are compared on."""

    kl: bool
    filtered: bool

    @property
    def options(self) -> dict[str, Any]:
        return (KL if self.kl else {}) | (FILTER if self.filtered else {})

    @property
    def roles(self) -> dict[str, Any]:
        return ROLES | ({"num_ref_workers": 1} if self.kl else {})

    def __str__(self) -> str:
        return f"{'KL' if self.kl else 'no KL':<6} {'filter' if self.filtered else 'no filter':<10}"


CASES = [Case(kl=kl, filtered=filtered) for kl in (False, True) for filtered in (False, True)]
_CASE_NAMES = ", ".join(f"{number} {' '.join(str(case).split())}" for number, case in enumerate(CASES))


class Runs:
    """Runs in folders below ``folder``, which gets the task first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        prepare = quickstart()
        prepare.make_model(folder / "model")
        rows = (json.dumps(prepare.make_row(word)) + "\n" for word in WORDS)
        (folder / "train.jsonl").write_text("".join(rows))
        (folder / "letters.py").write_text(REWARD)
        self.initial = load_file(folder / "model" / "model.safetensors")

    def run(self, **changes: Any) -> tuple[Weights, int]:
        """The parameters after five steps, and how many groups a filter dropped."""
        self._count += 1
        folder = self._folder / f"run_{self._count}"
        options: dict[str, Any] = {
            "run_dir": str(folder),
            "prompt_data": str(self._folder / "train.jsonl"),
            "hf_checkpoint": str(self._folder / "model"),
            "num_rollout": 5,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
            "custom_rm_path": f"{self._folder / 'letters.py'}:score",
            "lr": 1e-3,
            "logger": [],
            "progress": "none",
            "engine_context_length": 64,
            "deterministic": True,
        }
        args: Any = compose(CORE_SECTIONS).model_validate(options | changes)
        launch_training(args, PluginRegistry.from_flags([]))
        dropped = sum(
            int(value)
            for record in read_metrics(folder)
            for name, value in record.items()
            if name.startswith("rollout/drop_")
        )
        return load_file(folder / "hf" / "model.safetensors"), dropped


def quickstart() -> Any:
    """The module ``examples/quickstart/prepare.py``."""
    spec = importlib.util.spec_from_file_location("quickstart_prepare", QUICKSTART / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(a: Weights, b: Weights) -> float:
    """Of any tensor, relative to that tensor's largest value."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max() / np.abs(a[name]).max()) for name in a)


def shown(a: Weights, b: Weights) -> str:
    """The difference, or that there is none in any bit."""
    equal = all(a[name].tobytes() == b[name].tobytes() for name in a)
    return "equal bits" if equal else f"{difference(a, b):.1e}"


def whole_runs(runs: Runs, cases: Sequence[Case]) -> Iterator[list[str]]:
    """The rows of the first table, each as its runs have ended."""
    yield ["loss, filter", "ranks", "lockstep", "pipelined", "with roles", "streamed gradients", "moved by", "dropped"]
    for case in cases:
        first: Weights | None = None
        for ranks in (1, 2):
            same = {**case.options, "num_train_ranks": ranks}
            lockstep, dropped = runs.run(**same)
            first = lockstep if first is None else first
            yield [
                str(case),
                str(ranks),
                shown(first, lockstep) if ranks > 1 else "-",
                shown(first, runs.run(**same, **PIPELINED)[0]),
                shown(first, runs.run(**same, **PIPELINED, **case.roles)[0]) if ranks == 1 else "-",
                shown(first, runs.run(**same, **STREAMED)[0]),
                f"{difference(runs.initial, lockstep):.1e}",
                str(dropped),
            ]


def recorded_runs(runs: Runs, folder: Path) -> Iterator[list[str]]:
    """The rows of the second table."""
    yield ["--adam-eps", "pipelined", "streamed gradients", "lockstep, 2 ranks"]
    template = str(folder / "recorded_{rollout_id}.safetensors")
    runs.run(**KL, deterministic=False, save_debug_rollout_data=template)
    for eps in (1e-8, 1e-2):
        same = {**KL, "deterministic": False, "adam_eps": eps, "load_debug_rollout_data": template}
        lockstep, _ = runs.run(**same)
        others = [runs.run(**same, **more)[0] for more in (PIPELINED, STREAMED, {"num_train_ranks": 2})]
        yield [f"{eps:g}", *(shown(lockstep, other) for other in others)]


def main(argv: list[str] | None = None) -> int:
    """Print the tables. Exit status 1 if a whole run differs from another in any bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="the second table alone")
    parser.add_argument("--case", type=int, nargs="+", choices=range(len(CASES)), help="only these, of: " + _CASE_NAMES)
    options = parser.parse_args(argv)
    cases = CASES if options.case is None else [CASES[number] for number in options.case]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, ray_session(None):
        runs = Runs(Path(folder))
        if not options.recorded:
            wrong = print_table("Whole runs, with --deterministic", whole_runs(runs, cases), columns=slice(2, 6))
        print_table("Recorded rollouts, without --deterministic", recorded_runs(runs, Path(folder)))
    return 1 if wrong else 0


def print_table(title: str, rows: Iterator[list[str]], columns: slice = slice(0)) -> int:
    """Print rows as they come. Returns how many cells of ``columns`` are neither equal nor empty."""
    print(f"{title}\n", flush=True)
    wrong = 0
    for number, row in enumerate(rows):
        print("| " + " | ".join(f"{cell:<10}" for cell in row) + " |", flush=True)
        if number == 0:
            print("|" + "---|" * len(row))
        else:
            wrong += sum(cell not in ("equal bits", "-") for cell in row[columns])
    print()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
