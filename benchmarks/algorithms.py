"""Does each algorithm learn? Trains one warmed-up model with each of them, and evaluates it before and after.

    python benchmarks/algorithms.py [--only NAME ...] [--steps N] [--write]
    python benchmarks/algorithms.py --quick       # two steps of one run: does everything work?

The model, the words and the warm-up are those of ``examples/quickstart``. Words and their order, seeds, number of
rollouts and held-out words are equal in all runs; what differs is in ``RECIPES``. Logs, metrics and ``results.json``
are in ``build/algorithms``. A run that fails, or takes longer than ``--timeout-s``, gives a row without numbers, and
the next one starts. A run that has ended with the same settings is not done again, unless ``--again``; the project's
code is not among the settings. ``--write`` writes the table of ``docs/algorithms.md`` and the picture
``docs/algorithms.svg``.

Exit status 1 if an algorithm has no result, or a gain of at most two standard errors, which ``--quick`` does not judge.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algorithms_page import EVAL_SET, MOST_PROMPTS, Outcome, draw, measure, page_with, table

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
PAGE = ROOT / "docs" / "algorithms.md"
PICTURE = ROOT / "docs" / "algorithms.svg"
FINISHED = "finished.json"
GRACE_S = 60.0

SHARED: Mapping[str, Any] = {
    # Optimizer steps on each rollout; the quickstart has one. With one, every ratio is 1, nothing is clipped, and GRPO
    # and CISPO have the same gradient.
    "num_steps_per_rollout": 4,
    # The samples of all held-out words go to samples.jsonl: the scores of each word are paired.
    "dump_samples": MOST_PROMPTS,
}
"""Options of all runs that differ from ``train.yaml`` of the quickstart, beside the number of rollouts."""

QUICK_PROMPTS = 32
"""Of each evaluation."""
QUICK: Mapping[str, Any] = {
    "dynamic_sampling_filter_path": "none",  # a model that is hardly warmed up has no prompt with unequal rewards
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
}
"""Options of a run that shows that everything works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """title: for the page. options: where they differ from ``SHARED`` and ``train.yaml`` (learning rate 3e-4, clip
    range 0.2 and 0.28, token-mean)."""

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)


RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe(title="GRPO"),
    "rloo": Recipe(title="RLOO", options={"advantage_estimator": "rloo"}),
    "reinforce_plus_plus": Recipe(title="REINFORCE++", options={"advantage_estimator": "reinforce_plus_plus"}),
    "ppo": Recipe(
        title="PPO with a critic",
        options={
            "advantage_estimator": "ppo",
            # The critic is trained from scratch on top of the model, so it must move further than the policy.
            "critic_lr": 1e-3,
            # The critic knows nothing at first, and its advantages would be the rewards themselves. These rollouts
            # count among the steps: the policy has five fewer than in the other runs.
            "num_critic_only_steps": 5,
            "value_clip": 0.2,
            # Nothing is discounted: the reward comes at the end of at most twelve tokens.
            "gamma": 1.0,
            "lambd": 0.95,
            # Nothing else brings these advantages to the size of GRPO's; implementations of PPO do it as well.
            "normalize_advantages": True,
        },
    ),
    "gspo": Recipe(
        title="GSPO",
        # The range of the paper: the ratio of a response is the geometric mean of its tokens', and closer to 1.
        options={"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    ),
    "cispo": Recipe(
        title="CISPO",
        # The paper has no lower bound, and 0.99 is as good as none.
        options={"advantage_estimator": "cispo", "eps_clip": 0.99},
    ),
    "decoupled_ppo": Recipe(
        title="decoupled PPO with TIS",
        options={
            # Its weight from the engine's policy to the proximal one, cut off at the cap, is truncated importance
            # sampling: --use-tis would apply it twice, and is refused with this loss.
            "loss_type": "decoupled_ppo",
            # With an engine that computes as the trainer does, the weight of every token is 1. In bfloat16 it is about
            # 0.006 nats apart from it; it samples the evaluations of this run too.
            "engine_dtype": "bfloat16",
            # Usual are 2 to 5, for tokens of weights several steps old. No token of this run would reach them.
            "decoupled_behave_cap": 1.01,
        },
    ),
}
"""By the name for ``--only``; each has GRPO's estimator unless it names one."""


def shown_options(options: Mapping[str, Any]) -> list[str]:
    """Flags of ``buffer-rl train``."""
    flags: list[str] = []
    for name, value in options.items():
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags


def execute(command: Sequence[str], log: Path, timeout_s: float) -> str | None:
    """Run ``command``, its output in ``log``, until the deadline; None if it succeeded, else what went wrong."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w", encoding="utf-8") as output:
        streams: Mapping[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=log.parent, env=environ, start_new_session=True, **streams)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"no end after {timeout_s:.0f} s; see {log}"
        except BaseException:
            _end(process)
            raise
    return None if status == 0 else f"exit status {status}; see {log}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate, so that the run ends its own processes; after ``GRACE_S`` kill what is left. A run that was started in
    the background may ignore interrupts."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Where the runs are, and what is equal for all of them."""

    folder: Path
    steps: int
    seed: int
    timeout_s: float
    again: bool = False
    quick: bool = False

    def once(self, name: str, commands: Sequence[Sequence[str]], settings: Mapping[str, Any]) -> str | None:
        """Run the commands, unless they ran before with equal settings; None if all is well, else what went wrong."""
        folder = self.folder / name
        if not self.again and finished(folder, settings) is not None:
            print(f"{name}: as it is, with the same settings", flush=True)
            return None
        (folder / FINISHED).unlink(missing_ok=True)
        print(f"{name}: {time.strftime('%H:%M:%S')}", flush=True)
        started = time.monotonic()
        for number, command in enumerate(commands):
            if (problem := execute(command, self.folder / "logs" / f"{name}_{number}.log", self.timeout_s)) is not None:
                print(f"{name}: {problem}", flush=True)
                return problem
        seconds = time.monotonic() - started
        (folder / FINISHED).write_text(json.dumps({"settings": settings, "seconds": seconds}), encoding="utf-8")
        return None

    def train(self, config: str, options: Mapping[str, Any]) -> list[str]:
        """The command of a run of the quickstart."""
        code = "import sys; from buffer_rl.cli import main; sys.exit(main())"
        seeds = {"seed": self.seed, "rollout_seed": self.seed}
        flags = shown_options({**seeds, "prompt_data": self.folder / "warmup/data/train.jsonl", **options})
        return [sys.executable, "-c", code, "train", "--config", str(QUICKSTART / config), *flags]

    def eval_set(self, name: str, file: Path) -> str:
        """For ``--eval-prompt-data``."""
        return f"{name}={file}" + (f"@[0:{QUICK_PROMPTS}]" if self.quick else "")

    def warm_up(self) -> str | None:
        """Make words, model and its warm-up, which all runs start from."""
        folder = self.folder / "warmup"
        options = {
            "hf_checkpoint": folder / "model",
            "eval_prompt_data": self.eval_set("dev", folder / "data/dev.jsonl"),
            "run_dir": folder / "sft",
        }
        prepare = [sys.executable, str(QUICKSTART / "prepare.py"), "--output", str(folder), "--seed", str(self.seed)]
        if self.quick:
            options["num_rollout"] = 2
        settings = {"seed": self.seed, "files": _digest(QUICKSTART / "prepare.py", QUICKSTART / "sft.yaml")}
        return self.once("warmup", [prepare, self.train("sft.yaml", options)], settings)

    def settings(self, name: str) -> dict[str, Any]:
        """What the result of an algorithm depends on, as JSON values."""
        warm = self.folder / "warmup"
        return {
            "options": {**SHARED, **(QUICK if self.quick else {}), "num_rollout": self.steps, **RECIPES[name].options},
            "seed": self.seed,
            "files": _digest(QUICKSTART / "train.yaml", warm / "sft/hf/model.safetensors", warm / "data/heldout.jsonl"),
        }

    def algorithm(self, name: str) -> str | None:
        """Train with one algorithm."""
        warm, settings = self.folder / "warmup", self.settings(name)
        options = {
            "hf_checkpoint": warm / "sft/hf",
            "eval_prompt_data": self.eval_set(EVAL_SET, warm / "data/heldout.jsonl"),
            "eval_interval": self.steps,
            "run_dir": self.folder / name,
            **settings["options"],
        }
        return self.once(name, [self.train("train.yaml", options)], settings)

    def outcome(self, name: str) -> Outcome | None:
        """The numbers of a run that has ended with these settings; None if there is none."""
        if (seconds := finished(self.folder / name, self.settings(name))) is None:
            return None
        options = " ".join(shown_options(RECIPES[name].options))
        return measure(self.folder / name, self.steps, title=RECIPES[name].title, options=options, seconds=seconds)


def finished(folder: Path, settings: Mapping[str, Any]) -> float | None:
    """Seconds of the run in ``folder``; None if it did not end, or had other settings."""
    try:
        record = json.loads((folder / FINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return float(record["seconds"]) if record["settings"] == settings else None


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="train with these alone"
    )
    parser.add_argument("--steps", type=int, default=60, help="rollouts of each run")
    parser.add_argument("--seed", type=int, default=0, help="of words, model, warm-up and runs")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="deadline of one run, in seconds")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "algorithms", help="folder of the runs")
    parser.add_argument("--again", action="store_true", help="also what has ended with the same settings")
    short_or_published = parser.add_mutually_exclusive_group()
    short_or_published.add_argument("--quick", action="store_true", help="two steps of one run: does everything work?")
    short_or_published.add_argument("--write", action="store_true", help="write the table and the picture in docs/")
    args = parser.parse_args(argv)
    if args.quick:
        args.only, args.steps, args.output = args.only[:1], 2, args.output / "quick"
    folder = args.output.absolute()
    campaign = Campaign(
        folder=folder, steps=args.steps, seed=args.seed, timeout_s=args.timeout_s, again=args.again, quick=args.quick
    )
    if (problem := campaign.warm_up()) is not None:
        print(f"there is no model to train: {problem}")
        return 1
    for name in args.only:
        campaign.algorithm(name)
    outcomes = {name: campaign.outcome(name) for name in RECIPES}
    found = {name: outcome.as_json() for name, outcome in outcomes.items() if outcome is not None}
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    titles = {name: recipe.title for name, recipe in RECIPES.items()}
    shared = " ".join(
        shown_options({"num_rollout": args.steps, "num_steps_per_rollout": SHARED["num_steps_per_rollout"]})
    )
    text = table(outcomes, titles, shared)
    picture = draw([outcome for outcome in outcomes.values() if outcome is not None])
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / PICTURE.name).write_text(picture, encoding="utf-8")
    print(text)
    if args.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
        PICTURE.write_text(picture, encoding="utf-8")
    asked = [outcomes[name] for name in args.only]
    return 0 if all(outcome is not None and (outcome.learned or args.quick) for outcome in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
