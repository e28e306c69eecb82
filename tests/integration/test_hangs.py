"""A run of which processes hang goes on: each is noticed, named with a stack, ended, and treated as dead."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.testing.tiny import make_tiny_model
from harness.checkpoints import final_weights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

STEPS, GROUPS = 6, 3
TIMEOUT_S = 3.0
HARNESS = Path(__file__).parents[1]

# Each hang happens once, if its name is a part of the folder's name.
HANGS = """
import os, signal, threading, time
from pathlib import Path

import transformers

from buffer_rl.rollout import generate as default
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.processes import descendants


def happens(args, name):
    marker = Path(args.run_dir, name)
    if name not in marker.parent.name.split("-") or marker.exists():
        return False
    marker.write_text(str(time.time()))
    return True


def stop(args, name, pid=0):
    if happens(args, name):
        os.kill(pid or os.getpid(), signal.SIGSTOP)
        if not pid:  # the signal that has it write its stack also wakes it
            wait_for_ever()


async def generate(args, sample, sampling_params, evaluation=False):
    rollout, place = divmod(sample.group_index, 3)
    if not evaluation and place == 2 and sample.sample_index == 0:
        if rollout == 2:
            stop(args, "rollout")
        if rollout == 3 and "reward" in args.run_dir:
            (model,) = [p for p in descendants(TEST) if p.command.startswith("ray::RewardModelWorker")]
            stop(args, "reward", model.pid)
    return await default.generate(args, sample, sampling_params)


def model(args):
    model = transformers.AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)
    passes = []

    def look(_model, _args, inputs):
        if inputs["input_ids"].numel() <= 12:  # it is tried whether the model takes packed rows
            return
        passes.append(1)
        if len(passes) == 2:
            stop(args, "ref")

    if b"FusedProcess" in Path("/proc/self/cmdline").read_bytes():
        model.register_forward_pre_hook(look, with_kwargs=True)
    return model


class Trainer(TorchTrainer):
    def __init__(self, args, rank, world_size, objective):
        super().__init__(args, rank, world_size, objective)
        self.args, self.is_last, self.steps = args, rank == world_size - 1, 0

    def accumulate(self, batch):
        if self.is_last and self.steps == 4:
            stop(self.args, "rank")
            if happens(self.args, "blocked"):
                wait_for_ever()
        self.steps += 1
        return super().accumulate(batch)

    def optimizer_step(self, scale):
        answer = super().optimizer_step(scale)
        with Path(self.args.run_dir, "trained").open("a") as file:
            print(time.time(), file=file)
        return answer

    def load(self, path):
        super().load(path)
        self.steps = int(Path(path).parent.name.removeprefix("step_"))


def wait_for_ever():
    threading.Event().wait()


def reward(args, sample):
    if sample.group_index == 4:
        Path(args.run_dir, "blocked_reward").touch()
        wait_for_ever()
    return sample.response.count("a")
"""

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(
    train: Callable[[Any], Any], options_in: Callable[..., Any], task: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Trains and returns the run's folder: ``run(name, **options)``."""
    folder = tmp_path_factory.mktemp("hangs")
    code = f"import sys\nsys.path.append({str(HARNESS)!r})\nTEST = {os.getpid()}\n" + HANGS
    (folder / "hangs.py").write_text(code)
    sizes: dict[str, Any] = {"characters": "abc=", "hidden_size": 32, "intermediate_size": 48}
    classifier = make_tiny_model(
        folder / "classifier", seed=1, auto_class="AutoModelForSequenceClassification", num_labels=1, **sizes
    )

    def run(name: str, **options: Any) -> Path:
        args = options_in(
            folder / name,
            **{
                "train_backend": f"{folder / 'hangs.py'}:Trainer",
                "custom_model_provider_path": f"{folder / 'hangs.py'}:model",
                "custom_generate_function_path": f"{folder / 'hangs.py'}:generate",
                "custom_rm_path": None,
                "rm_model": classifier,
                "ref_load": str(task / "model"),
                "use_kl_loss": True,
                "kl_loss_coef": 0.1,
                "num_ref_workers": 1,
                "num_train_ranks": 2,
                "num_rollout": STEPS,
                "eval_prompt_data": [],
                "deterministic": True,
                "progress": "plain",
                "hang_timeout_s": TIMEOUT_S,
                "save": str(folder / f"{name}_saves"),
                "save_interval": 2,
                **{
                    key: value.format(folder=folder) if isinstance(value, str) else value
                    for key, value in options.items()
                },
            },
        )
        assert train(args).steps == STEPS
        return Path(args.run_dir)

    return run


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Path:
    """A run in which nothing hangs."""
    return run("undisturbed")


def check_equal(disturbed: Path, undisturbed: Path) -> None:
    assert final_weights(disturbed) == final_weights(undisturbed)
    audit = LedgerAudit(disturbed / "ledger.sqlite")
    assert audit.faults() == []
    assert audit.commits() == [(step, step + 1, GROUPS) for step in range(STEPS)]


def report_recovery(run_dir: Path) -> None:
    """Print the seconds from each hang to the next optimizer step."""
    steps = sorted(map(float, (run_dir / "trained").read_text().split()))
    for name in run_dir.name.split("-"):
        began = float((run_dir / name).read_text())
        print(f"{name}: trained again after {min(step for step in steps if step > began) - began:.1f} s")


def test_a_process_of_each_role_that_is_stopped_is_named_with_a_stack_and_replaced_and_no_bit_changes(
    run: Run, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disturbed = run("ref-rollout-reward-rank")
    said = capfd.readouterr().out
    check_equal(disturbed, undisturbed)
    found = re.findall(r"(\w+(?: \d)?) hung: no answer for (\d+) s (.*?) \(process \d+ on .*?\), stack: (.*?);", said)
    assert [name for name, *_ in found] == ["ref", "rollout", "reward", "train 1"], said
    assert [int(seconds) for _, seconds, *_ in found if int(seconds) > 10] == []
    assert [at for _, _, at, _ in found] == ["in stream", "in run", "between calls", "in train"]
    for (_, _, _, stack), function in zip(found, ("look", "generate", "", "accumulate"), strict=True):
        assert re.search(rf"\w+\.py:\d+ in \w*{function}", stack), said
    report_recovery(disturbed)
    assert "ref hung and is replaced (1 of 2): hung: no answer" in said
    assert "rollout hung and is replaced (1 of 2): hung: no answer" in said
    assert "process 0 of the reward model hung and was replaced (1 of 2" in said
    assert "train 1.train: hung: no answer" in said
    assert "from the checkpoint of step 4 (global restart 1 of 3)" in said
    assert "in accumulate" in (disturbed / "logs" / "train_1.log").read_text()


def test_a_rank_that_is_blocked_is_named_with_its_stack_and_the_one_that_waits_for_it_is_not(
    run: Run, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disturbed = run("blocked")
    said = capfd.readouterr().out
    check_equal(disturbed, undisturbed)
    assert re.findall(r"(train \d) hung: no progress for \d+ s in train \(process \d+ on ", said) == ["train 1"], said
    assert re.search(
        r"stack: (\w+\.py:\d+ in \w+ < )+hangs\.py:\d+ in wait_for_ever < hangs\.py:\d+ in accumulate", said
    )
    assert "from the checkpoint of step 4 (global restart 1 of 3)" in said


def test_a_reward_that_blocks_for_ever_keeps_its_deadline_and_ends_no_process(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"rm_model": None, "custom_rm_path": "{folder}/hangs.py:reward", "rm_timeout_s": 2 * TIMEOUT_S}
    folder = run("waits", **options)
    said = capfd.readouterr().out
    assert (folder / "blocked_reward").exists()
    assert "hung" not in said
    assert LedgerAudit(folder / "ledger.sqlite").faults() == []
    (line,) = (json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines())
    assert (line["reason"], line["attempts"]) == ("reward_failed:timeout", 2)
