"""The losses of examples/losses: their formulas, and that streamed gradients equal those of lockstep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.buffer.columns import assemble
from buffer_rl.buffer.readers import ALL_ROWS
from buffer_rl.kinds.marks import Unit
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status
from buffer_rl.testing.tiny import make_tiny_model
from harness.losses import MODES, WAYS, gradient, loss_args, objective_of, outcome, rows_of, two_groups
from harness.trainers import make_trainer

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "losses"
GSPO, WEIGHTED = f"{FOLDER}/gspo.py:gspo", f"{FOLDER}/weighted.py:weighted"
CONVERTER = f"{FOLDER}/weighted.py:with_difficulty"
LOG_4, LOG_121 = math.log(4), math.log(1.21)


@pytest.mark.parametrize("mode", MODES)
def test_gspo_matches_hand_computed_numbers_under_any_aggregation(mode: str) -> None:
    """Ratios of sequences, geometric means over unmasked tokens: 2, 1/2, 1 and 1.1."""
    log_probs = [[LOG_4 - 1, -2], [-LOG_4, -1, 7], [-3], [LOG_121 - 1, -1]]
    batch = rows_of(
        loss_mask=[[1, 1], [1, 1, 0], [1], [1, 1]],
        old_log_probs=[[-1, -2], [0, -1, -2], [-3], [-1, -1]],
        advantages=[[1, 1], [-1, -1, 9], [3], [-2, -2]],
    )
    objective = objective_of(custom_loss_function_path=GSPO, loss_agg_mode=mode, eps_clip=0.2, eps_clip_high=0.3)
    assert objective.unit is Unit.ROW
    found = outcome(objective, batch, log_probs)
    # -min(2, 1.3) x 1; max(0.5, 0.8) x 1; -1 x 3; 1.1 x 2
    assert found.means["loss"] == pytest.approx((-1.3 + 0.8 - 3 + 2.2) / 4)
    assert found.means["sequence_clipfrac"] == 0.5
    assert found.means["ppo_kl"] == pytest.approx(-LOG_121 / 8)
    # the slope of a ratio that is not clipped: the ratio itself, shared by the row's tokens
    for row, expected in zip(found.log_prob_gradients, [[0, 0], [0, 0, 0], [-3], [1.1, 1.1]], strict=True):
        np.testing.assert_allclose(row, np.array(expected) / 4, rtol=1e-5, atol=1e-7)


def test_the_example_of_gspo_gives_the_numbers_of_the_built_in_one() -> None:
    pool = two_groups()
    rows = assemble(pool.share(ALL_ROWS))
    given = [np.linspace(-3, -1, int(n)) for n in rows.columns["response_length"]]
    choices = ({"custom_loss_function_path": GSPO}, {"loss_type": "gspo"})
    example, built_in = (outcome(objective_of(**choice), rows, given) for choice in choices)
    assert example.means == pytest.approx(built_in.means, rel=1e-6)
    for ours, theirs in zip(example.log_prob_gradients, built_in.log_prob_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_tokens_of_harder_prompts_weigh_more_and_solved_prompts_leave_the_divisor() -> None:
    batch = rows_of(
        loss_mask=[[1, 1], [1, 0], [1, 1]],
        advantages=[[1, 1], [-3, 5], [8, 8]],
        difficulty=[0.75, 0.5, 0],
    )
    found = outcome(objective_of(custom_loss_function_path=WEIGHTED), batch, [[-1, -2], [-1, -1], [-2, -2]])
    assert found.sums.divisor == 2 * 0.75 + 0.5
    assert found.means["loss"] == pytest.approx((-0.75 * 2 + 0.5 * 3) / 2)
    assert found.means["difficulty"] == pytest.approx(1.25 / 3)
    np.testing.assert_allclose(
        np.stack(found.log_prob_gradients), np.array([[-0.75, -0.75], [1.5, 0], [0, 0]]) / 2, rtol=1e-6
    )


def test_the_difficulty_of_a_prompt_is_that_of_its_samples_whatever_their_parts() -> None:
    uid = GroupUid("data", 0, 0)
    rewards = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 0.0, (2, 0): 0.5}
    samples = [
        Sample(
            **{"uid": uid, "sample_index": index, "part": part, "reward": reward, "status": Status.COMPLETED},
            **{"tokens": [3, 4, 5], "response": "ab", "response_length": 2},
        )
        for (index, part), reward in rewards.items()
    ]
    convert = PluginRegistry.from_flags(()).resolve("samples_to_train_data", CONVERTER)
    columns = convert(loss_args(), samples)
    assert columns["difficulty"].tolist() == [0.5] * 4
    assert {"tokens", "response_length", "loss_mask", "reward", "raw_reward"} < columns.keys()
    assert SampleGroup(uid=uid, samples=samples)[0].reward == 1.0, "the samples stay as they are"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model"), characters="abcdefghijklmnopqrstuvwxyz=", init_scale=0.3)


@pytest.mark.parametrize("loss", [GSPO, WEIGHTED])
def test_streamed_gradients_and_those_of_two_ranks_equal_those_of_one(loss: str, model_path: str) -> None:
    def difficulty(rng: np.random.Generator, lengths: np.ndarray) -> Any:
        return np.full(len(lengths), rng.random(), dtype=np.float32)

    pool = two_groups(difficulty=difficulty)
    options = {"use_kl_loss": False, "entropy_coef": 0.1, "max_tokens_per_gpu": 30, "train_device": "cpu"}
    trainer = make_trainer(loss_args(hf_checkpoint=model_path, custom_loss_function_path=loss, **options))
    wanted, *others = (gradient(trainer, pool, way) for way in WAYS)
    assert sum(float(slope.norm()) for slope in wanted[1].values()) > 0.01
    for found in others:
        assert found[0] == pytest.approx(wanted[0], abs=1e-5)
        for name, slope in wanted[1].items():
            assert (found[1][name] - slope).norm() <= 1e-4 * slope.norm(), name
