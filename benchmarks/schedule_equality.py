"""Do the schedules end with equal parameters? The quickstart's model and task in every mode, side by side.

    python benchmarks/schedule_equality.py              # about fifteen minutes
    python benchmarks/schedule_equality.py --recorded   # the second table alone, about a minute
    python benchmarks/schedule_equality.py --algorithms # the third

First table: whole runs of five steps with --deterministic, which gives equal tokens and sums that do not depend on
their order. Each is compared with the run in lockstep of one rank that has the same loss and filter; so that the second
one shows something, runs of two ranks are compared with one rank too. All must have equal bits.

Second table: without --deterministic. The tokens that an engine samples then depend on which requests are computed
together, so whole runs differ from their second repetition on, whatever the schedule. What can be compared is training
on the same recorded rollouts (--load-debug-rollout-data), with KL: sums in float32 in another order. Adam's first steps
blow such differences of tiny gradients up to the size of the learning rate, unless --adam-eps is above them. So with
--adam-eps 0.01 the difference must be at most 1e-6; with the default 1e-8 nothing is promised, and the difference is
printed for information.

Third table: whole runs with --deterministic as in the first, one algorithm a line. Streamed gradients are refused where
an estimator needs the whole rollout; then the error's first line is shown.

The difference is the largest of any weight, relative to the largest weight of its tensor.

Exit status 1 if one of these is missed, and where the comparison would show nothing: training left a tensor of the
lockstep run as it was or moved all of them hardly more than 1e-6, or a filter dropped nothing.
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

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.launch import launch_training
from buffer_rl.driver.role_checks import check_roles
from buffer_rl.errors import ConfigError
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.trainer.options import check_role_options

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
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum"},
    "rloo": {"advantage_estimator": "rloo"},
    "pass_at_k": {"advantage_estimator": "pass_at_k", "pass_at_k": 2},
    "gpg": {"advantage_estimator": "gpg"},
    "remax": {"advantage_estimator": "remax"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "ppo": {"advantage_estimator": "ppo", "lambd": 0.9, "num_critic_only_steps": 1},
    "gspo": {"advantage_estimator": "gspo"},
    "gspo_token": {"loss_type": "gspo_token"},
    "cispo": {"advantage_estimator": "cispo"},
    "gmpo": {"loss_type": "gmpo"},
    "sapo": {"loss_type": "sapo"},
    "dpo": {"loss_type": "dpo", "use_kl_loss": True},
    "decoupled_ppo": {"loss_type": "decoupled_ppo", "decoupled_behave_cap": 1.01},
    "use_tis": {"use_tis": True, "tis_mode": "token"},
}
Weights = dict[str, np.ndarray]
WHOLE = ("loss, filter", "ranks", "lockstep", "pipelined", "with roles", "streamed gradients", "moved by", "dropped")
OF_ALGORITHMS = ("algorithm", "pipelined", "streamed gradients", "moved by")
RECORDED = ("--adam-eps", "pipelined", "streamed gradients", "lockstep, 2 ranks", "moved by", "promised")
SAME = 1e-6
LEAST_MOVE = 100 * SAME
LEAST_PROMISED_EPS = 1e-2


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
    """Runs of ``num_steps`` steps in folders below ``folder``, which gets the task first."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._folder = folder
        self._num_steps = num_steps
        self._count = 0
        prepare = quickstart()
        prepare.make_model(folder / "model")
        rows = (json.dumps(prepare.make_row(word)) + "\n" for word in WORDS)
        (folder / "train.jsonl").write_text("".join(rows))
        (folder / "letters.py").write_text(REWARD)
        self.initial = load_file(folder / "model" / "model.safetensors")

    def run(self, **changes: Any) -> tuple[Weights, int]:
        """The parameters after the last step, and how many groups a filter dropped. Raises ConfigError where such a run
        is refused."""
        self._count += 1
        folder = self._folder / f"run_{self._count}"
        options: dict[str, Any] = {
            "run_dir": str(folder),
            "prompt_data": str(self._folder / "train.jsonl"),
            "hf_checkpoint": str(self._folder / "model"),
            "num_rollout": self._num_steps,
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
        registry = PluginRegistry.from_flags([])
        check_role_options(args)
        check_roles(args, registry)
        launch_training(args, registry)
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


def equal(a: Weights, b: Weights) -> bool:
    """Whether no bit differs."""
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def shown(a: Weights, b: Weights) -> str:
    """The difference, or that there is none in any bit."""
    return "equal bits" if equal(a, b) else f"{difference(a, b):.1e}"


def unmoved(before: Weights, after: Weights) -> list[str]:
    """Why a comparison of ``after`` with another run shows nothing: tensors that training left as they were."""
    names = [name for name in before if before[name].tobytes() == after[name].tobytes()]
    return [f"training left {len(names)} of {len(before)} tensors as they were, such as {names[0]}"] if names else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table, and what in it is not as it should be."""

    cells: list[str]
    faults: list[str]


def whole_row(initial: Weights, first: Weights, runs: dict[str, Weights | None], case: Case, dropped: int) -> Row:
    """Of the first table. first: lockstep's weights on one rank. runs: those of ``lockstep`` and of the other columns;
    None where there is nothing to compare."""
    others = {name: weights for name, weights in runs.items() if weights is not None}
    faults = [
        f"{name} differs: {shown(first, weights)}" for name, weights in others.items() if not equal(first, weights)
    ]
    faults += unmoved(initial, first)
    if case.filtered and not dropped:
        faults.append("the filter dropped nothing")
    cells = ["-" if weights is None else shown(first, weights) for weights in runs.values()]
    return Row(cells=[*cells, f"{difference(initial, first):.1e}", str(dropped)], faults=faults)


def recorded_row(initial: Weights, lockstep: Weights, runs: dict[str, Weights], eps: float) -> Row:
    """Of the second table. runs: the weights of its other columns."""
    cells = [shown(lockstep, weights) for weights in runs.values()]
    moved = difference(initial, lockstep)
    faults = unmoved(initial, lockstep)
    if is_promised := eps >= LEAST_PROMISED_EPS:
        if not moved >= LEAST_MOVE:
            faults.append(f"training moved no weight by more than {moved:.1e}: {SAME:g} says little then")
        faults += [
            f"{name} differs by {difference(lockstep, weights):.1e}, more than {SAME:g}"
            for name, weights in runs.items()
            if not difference(lockstep, weights) <= SAME
        ]
    promise = f"{SAME:g}" if is_promised else "nothing (for information)"
    return Row(cells=[f"{eps:g}", *cells, f"{moved:.1e}", promise], faults=faults)


def whole_runs(runs: Runs, cases: Sequence[Case]) -> Iterator[Row]:
    """The rows of the first table, each as its runs have ended."""
    for case in cases:
        first: Weights | None = None
        for ranks in (1, 2):
            same = {**case.options, "num_train_ranks": ranks}
            lockstep, dropped = runs.run(**same)
            is_first, first = first is None, lockstep if first is None else first
            found = {
                "lockstep": None if is_first else lockstep,
                "pipelined": runs.run(**same, **PIPELINED)[0],
                "with roles": runs.run(**same, **PIPELINED, **case.roles)[0] if is_first else None,
                "streamed gradients": runs.run(**same, **STREAMED)[0],
            }
            row = whole_row(runs.initial, first, found, case, dropped)
            faults = [f"{ranks} rank(s): {fault}" for fault in row.faults]
            yield Row(cells=[str(case), str(ranks), *row.cells], faults=faults)


def recorded_runs(runs: Runs, folder: Path) -> Iterator[Row]:
    """The rows of the second table."""
    template = str(folder / "recorded_{rollout_id}.safetensors")
    runs.run(**KL, deterministic=False, save_debug_rollout_data=template)
    for eps in (1e-8, LEAST_PROMISED_EPS):
        same = {**KL, "deterministic": False, "adam_eps": eps, "load_debug_rollout_data": template}
        lockstep, _ = runs.run(**same)
        others = zip(RECORDED[1:4], (PIPELINED, STREAMED, {"num_train_ranks": 2}), strict=True)
        found = {name: runs.run(**same, **more)[0] for name, more in others}
        yield recorded_row(runs.initial, lockstep, found, eps)


def algorithm_runs(runs: Runs, names: Sequence[str]) -> Iterator[Row]:
    """The rows of the third table."""
    for name in names:
        options = ALGORITHMS[name]
        lockstep, _ = runs.run(**options)
        faults, cells = unmoved(runs.initial, lockstep), []
        for schedule in (PIPELINED, STREAMED):
            try:
                weights, _ = runs.run(**options, **schedule)
            except ConfigError as error:
                cells.append(f"refused: {error.what}")
                continue
            cells.append(shown(lockstep, weights))
            if not equal(lockstep, weights):
                faults.append(f"{schedule} differs: {cells[-1]}")
        yield Row(cells=[name, *cells, f"{difference(runs.initial, lockstep):.1e}"], faults=faults)


def main(argv: list[str] | None = None) -> int:
    """Print the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="the second table alone")
    parser.add_argument(
        "--algorithms", nargs="*", choices=list(ALGORITHMS), help="the third table alone, of these where any are named"
    )
    parser.add_argument("--whole", action="store_true", help="the first table alone")
    parser.add_argument("--case", type=int, nargs="+", choices=range(len(CASES)), help="only these, of: " + _CASE_NAMES)
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    options = parser.parse_args(argv)
    algorithms = options.algorithms or list(ALGORITHMS)
    cases = CASES if options.case is None else [CASES[number] for number in options.case]
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ray_session(None):
        runs = Runs(Path(folder), options.steps)
        if not (options.recorded or options.algorithms is not None):
            faults += print_table("Whole runs, with --deterministic", WHOLE, whole_runs(runs, cases))
        if not (options.whole or options.algorithms is not None):
            rows = recorded_runs(runs, Path(folder))
            faults += print_table("Recorded rollouts, without --deterministic", RECORDED, rows)
        if not (options.whole or options.recorded):
            faults += print_table("Algorithms, with --deterministic", OF_ALGORITHMS, algorithm_runs(runs, algorithms))
    return verdict(faults)


def print_table(title: str, heading: Sequence[str], rows: Iterator[Row]) -> list[str]:
    """Print rows as they come. Returns what in them is not as it should be."""
    print(f"{title}\n", flush=True)
    print("| " + " | ".join(f"{cell:<10}" for cell in heading) + " |", flush=True)
    print("|" + "---|" * len(heading))
    faults = []
    for row in rows:
        print("| " + " | ".join(f"{cell:<10}" for cell in row.cells) + " |", flush=True)
        faults += [f"{row.cells[0].strip()}: {fault}" for fault in row.faults]
    print()
    return faults


def verdict(faults: Sequence[str]) -> int:
    """Say what is not as it should be. Returns the exit status."""
    for fault in faults:
        print(f"not as promised: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
