"""Runs whose reference model takes the actor's weights every two rollouts, and whose KL coefficient follows a target:
every schedule, either holder of the reference, and resumed runs end with the same parameters, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.observe.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]

STEPS = 5
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_target": 1e-3, "kl_horizon": 24.0, "ref_update_interval": 2}
PIPELINED = {"schedule": "pipelined"}
REF_WORKER = {**PIPELINED, "num_ref_workers": 1}

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains to the fifth step, with a checkpoint after the third, and returns the run's folder."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, **options: Any) -> Path:
        defaults = {"eval_prompt_data": [], "eval_interval": None, "num_rollout": STEPS, "deterministic": True}
        saves = {} if "load" in options else {"save": str(folder / name / "saves"), "save_interval": 3}
        args = options_in(folder / name, **{**KL, **defaults, **saves, **options})
        assert train(args).steps == STEPS
        return Path(args.run_dir)

    return run


@pytest.fixture(scope="module")
def lockstep(run: Run) -> Path:
    """The run that the others are compared with: the trainer holds the reference."""
    return run("lockstep")


def numbers(run_dir: Path, name: str) -> list[float]:
    return [record[name] for record in read_metrics(run_dir) if name in record]


def assert_equal(run_dir: Path, other: Path) -> None:
    """Parameters and coefficients, to the last bit; of a resumed run those of its own rollouts."""
    found = numbers(run_dir, "train/kl_coef")
    assert found == numbers(other, "train/kl_coef")[-len(found) :]
    first, second = (folder / "hf" / "model.safetensors" for folder in (run_dir, other))
    assert first.read_bytes() == second.read_bytes()


def test_the_divergence_is_0_after_each_update_and_the_coefficient_follows_it(lockstep: Path) -> None:
    kl, coefficients = numbers(lockstep, "train/ref_kl"), numbers(lockstep, "train/kl_coef")
    assert [value == 0 for value in kl] == [True, False, True, False, True]
    assert coefficients[0] == 0.5
    # 12 samples and a horizon of 24: at 0 nats times 1 - 0.2 / 2, at more than 1.2e-3 times 1 + 0.2 / 2
    assert min(kl[1], kl[3]) > 1.2e-3
    assert coefficients[1:] == pytest.approx([0.5 * 0.9, 0.5 * 0.9 * 1.1, 0.5 * 0.9**2 * 1.1, 0.5 * 0.9**2 * 1.1**2])


def test_streamed_gradients_on_two_ranks_change_nothing(run: Run, lockstep: Path) -> None:
    assert_equal(run("streamed", **PIPELINED, stream_gradients=True, num_train_ranks=2), lockstep)


def test_a_role_that_holds_the_reference_and_runs_that_are_resumed_with_either_holder_change_nothing(
    run: Run, lockstep: Path
) -> None:
    """The checkpoint's reference is that of step 2, its actor that of step 3."""
    saved = lockstep / "saves" / "step_000003"
    assert_equal(run("resumed_with_a_role", **REF_WORKER, load=str(saved)), lockstep)
    assert (saved / "ref" / "model.safetensors").read_bytes() != (saved / "hf" / "model.safetensors").read_bytes()
    with_role = run("with_a_role", **REF_WORKER)
    assert_equal(with_role, lockstep)
    assert_equal(run("resumed", load=str(with_role / "saves" / "step_000003")), lockstep)


def test_the_coefficient_of_token_rewards_is_the_same_on_every_rank(run: Run) -> None:
    """One rank computes the advantages of a rollout; each has measured its own rows."""
    rewards: dict[str, Any] = {
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_coef": 0.5,
        "kl_target": 0.25,  # near what the second rollout has: its answer is not bounded, and tells shares apart
        "advantage_estimator": "reinforce_plus_plus",
    }
    one = run("rewards", **rewards)
    before, after = numbers(one, "train/kl_coef")[1:3]
    assert 0.91 < after / before < 1.09
    assert_equal(run("rewards_on_two_ranks", **rewards, **PIPELINED, num_train_ranks=2), one)
