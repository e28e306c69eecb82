"""What a resumed run says of the differences to the run that wrote its checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.provenance import option_changes, provenance_of, resume_notices
from buffer_rl.driver.restart import RunSession
from buffer_rl.files.checkpoint import Checkpoint
from buffer_rl.observe.run_folder import read_facts, read_jsonl
from buffer_rl.options.redaction import mask_secrets
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.trainer.learning_rate import learning_rate

COSINE = {"lr": 1e-3, "lr_decay_style": "cosine"}


def options(**changes: Any) -> Any:
    return compose(CORE_SECTIONS)(**{"logger": [], "rm_type": "f1", **changes})


def facts_of(args: Any, **more: Any) -> dict[str, Any]:
    """As a checkpoint has them."""
    return {"options": mask_secrets(args.model_dump(mode="json")), **more}


def test_a_longer_run_says_that_its_learning_rate_jumps_and_how_it_would_not() -> None:
    # Steps 3 of 4 and 4 of 8 of a cosine: 1e-3 (1 + cos(3 pi / 4)) / 2 = 1.46e-4, 1e-3 (1 + cos(pi / 2)) / 2 = 5e-4.
    facts, longer = facts_of(options(num_rollout=4, **COSINE)), options(num_rollout=8, **COSINE)
    changes, jump = resume_notices(facts, 4, longer)
    assert changes == "options that differ from the checkpoint's: --num-rollout 4, now 8"
    assert jump == (
        "the learning rate of the policy goes from 0.000146, of the checkpoint's last optimizer step, to 0.0005: it "
        "falls over 8 optimizer steps, and fell over 4 before; --lr-decay-iters 4 keeps the curve"
    )
    kept = longer.model_copy(update={"lr_decay_iters": 4})
    assert len(resume_notices(facts, 4, kept)) == 1
    before = options(num_rollout=4, **COSINE)
    assert [learning_rate(kept, step) for step in range(9)] == [learning_rate(before, step) for step in range(9)]


def test_a_run_that_the_checkpoint_has_finished_says_so_and_an_evaluation_does_not() -> None:
    then = options(num_rollout=4)
    for step, end in ((4, 4), (5, 4)):
        said = resume_notices(facts_of(then), step, options(num_rollout=end))
        assert said == [
            f"nothing is left to train: the checkpoint has {step} steps, and --num-rollout ends the run after 4 in "
            "all; a larger --num-rollout goes on"
        ]
    assert resume_notices(facts_of(then), 3, then) == []
    evaluation = options(num_rollout=0, run_dir="runs/other/eval")
    assert resume_notices(facts_of(then), 4, evaluation) == []  # what the verb eval sets itself is no change
    (line,) = resume_notices(facts_of(then), 4, options(num_rollout=0, rollout_temperature=0.5))
    assert "--rollout-temperature" in line
    assert "--num-rollout" not in line
    # 200 rows in batches of 20: an epoch has 10 steps.
    epochs = options(num_epoch=1, rollout_batch_size=20)
    facts = facts_of(epochs, num_rollouts=10, data=[{"use": "train", "num_rows": 200}])
    (line,) = resume_notices(facts, 10, epochs)
    assert "and --num-epoch ends the run after 10 in all" in line
    assert resume_notices(facts, 9, epochs) == []


def test_what_a_rollout_has_of_optimizer_steps_counts_and_so_do_epochs_and_a_critic() -> None:
    """200 rows in batches of 20 are 10 rollouts an epoch, of 2 steps each; the policy takes none on the first 4."""
    run = {**COSINE, "rollout_batch_size": 20, "num_steps_per_rollout": 2, "num_critic_only_steps": 4}
    run |= {"advantage_estimator": "ppo", "critic_lr": 1e-2}
    facts = facts_of(options(num_epoch=1, **run), num_rollouts=10, data=[{"use": "train", "num_rows": 200}])
    _, actor, critic = resume_notices(facts, 7, options(num_epoch=2, **run))
    assert "of the policy" in actor
    assert actor.endswith(
        "it falls over 32 optimizer steps, and fell over 12 before; --lr-decay-iters 12 keeps the curve"
    )
    assert "of the critic" in critic
    assert critic.endswith(
        "it falls over 40 optimizer steps, and fell over 20 before; --lr-decay-iters 20 keeps the curve"
    )


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        ({}, {"num_rollout": 8}, []),  # constant
        (COSINE, {**COSINE, "save_interval": 7}, []),
        (COSINE, {**COSINE, "num_rollout": 8, "lr_decay_iters": 4}, []),
        (COSINE, {**COSINE, "num_rollout": 8, "debug_rollout_only": True}, []),
        ({"lr": 1e-3}, {"lr": 1e-4}, ["goes from 0.001, of the checkpoint's last optimizer step, to 0.0001"]),
    ],
)
def test_a_learning_rate_that_goes_on_or_that_is_asked_for_gets_no_advice(
    then: dict[str, Any], now: dict[str, Any], says: list[str]
) -> None:
    found = resume_notices(facts_of(options(**{"num_rollout": 4} | then)), 2, options(**{"num_rollout": 4} | now))
    assert [line.partition("of the policy ")[2] for line in found[1:]] == says


def test_every_option_that_differs_is_listed_once_without_secrets() -> None:
    then = options(num_rollout=4, rm_url="http://me:hunter2@h/a", prompt_data=["a.jsonl"], engine_api_key="hunter3")
    facts = facts_of(then)
    facts["options"] |= {"of_a_plugin": 3}
    facts["options"].pop("seed")
    now = options(num_rollout=4, rm_url="http://me:hunter2@h/b", load="x", prompt_data=["a.jsonl", "b.jsonl"])
    found = {change.option: (change.then, change.now) for change in option_changes(facts, now)}
    assert found == {
        "engine_api_key": ("***", None),
        "of_a_plugin": (3, "absent"),
        "prompt_data": (["a.jsonl"], ["a.jsonl", "b.jsonl"]),
        "rm_url": ("http://***@h/a", "http://***@h/b"),
        "seed": ("absent", now.seed),
    }
    assert "hunter" not in "".join(resume_notices(facts, 1, now))
    assert resume_notices(facts_of(then), 1, then.model_copy(update={"load": "x"})) == []
    assert resume_notices({}, 1, now) == []


def test_a_run_that_resumes_says_it_when_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(options(num_rollout=4, run_dir=str(tmp_path), **COSINE))
    args, registry = options(num_rollout=8, run_dir=str(tmp_path), **COSINE), PluginRegistry()
    with ExitStack() as stack:
        loaded = Checkpoint(folder=tmp_path, step=4, facts=facts)
        RunSession(args, registry, loaded, provenance_of(args, registry), stack)
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "--num-rollout 4, now 8" in shown
    assert "--lr-decay-iters 4 keeps the curve" in shown


def test_a_run_that_resumes_in_the_folder_of_another_run_keeps_that_runs_files_aside(tmp_path: Path) -> None:
    registry = PluginRegistry()
    args = options(num_rollout=8, run_dir=str(tmp_path), progress="none", logger=["tensorboard"])

    def run(step: int, lineage: str | None = None) -> None:
        loaded = Checkpoint(folder=tmp_path, step=step, facts={"lineage": lineage}) if lineage else None
        with ExitStack() as stack:
            session = RunSession(args, registry, loaded, provenance_of(args, registry), stack)
            for number in range(step, step + 2):
                session.observer.step(number, {"train/loss": 0.5})

    def steps(name: str) -> list[int]:
        return sorted({record["step"] for record in read_jsonl(tmp_path / name)})

    run(0)
    own = read_facts(tmp_path).lineage
    run(1, own)
    assert steps("metrics.jsonl") == [0, 1, 2]
    run(1, "another")
    assert (steps("metrics.1.jsonl"), steps("metrics.jsonl")) == ([0, 1, 2], [1, 2])
    assert all(
        (tmp_path / name).exists() for name in ("samples.1.jsonl", "trace.1.json", "tensorboard.1", "run.1.json")
    )
    assert [part["from_step"] for part in read_facts(tmp_path).parts] == [1]


@pytest.mark.parametrize(("facts", "evaluated"), [({}, 4), ({"owes_evaluation": True}, 3)])
def test_a_run_in_another_folder_has_evaluated_its_checkpoint_unless_a_signal_came_first(
    tmp_path: Path, facts: dict[str, Any], evaluated: int
) -> None:
    args, registry = options(num_rollout=8, run_dir=str(tmp_path)), PluginRegistry()
    with ExitStack() as stack:
        loaded = Checkpoint(folder=tmp_path, step=4, facts=facts)
        session = RunSession(args, registry, loaded, provenance_of(args, registry), stack)
        assert session.observer.evaluated == evaluated


def test_an_evaluation_is_owed_to_a_checkpoint_whose_run_was_killed_or_failed_in_it(tmp_path: Path) -> None:
    """No signal is noted in it, so the run's own metrics tell."""
    args, registry, evaluated = options(num_rollout=8, run_dir=str(tmp_path)), PluginRegistry(), [0, 2, 4, 6]
    owed, lineage = [], ""
    for step in (0, 4, 6):  # three parts: the second is cut off in the evaluation of 6, and the third goes on from it
        loaded = Checkpoint(folder=tmp_path, step=step, facts={"lineage": lineage}) if step else None
        with ExitStack() as stack:
            session = RunSession(args, registry, loaded, provenance_of(args, registry), stack)
            lineage = session.lineage
            owed.append(loaded is not None and step > session.observer.evaluated)
            for number in range(step, step + 4):
                session.observer.step(number, {"train/loss": 0.5})
                if number + 1 in evaluated and number + 1 <= 4:
                    session.observer.evaluation(number + 1, {"eval/dev": 1.0})
    assert owed == [False, False, True]
