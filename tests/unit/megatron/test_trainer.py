"""A sample of what ``make test-megatron`` compares: two optimizer steps beside those of transformers and AdamW."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.testing.tiny import make_tiny_model
from harness.megatron_ranks import HAS_MEGATRON, REASON, RankError, RankPool
from harness.megatron_rows import CHARACTERS, SEEDS, make_args, make_rows
from harness.megatron_steps import LIMITS, Case, Found, beyond, run_case
from harness.trainers import make_trainer, step

pytestmark = [pytest.mark.skipif(not HAS_MEGATRON, reason=REASON), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model"), characters=CHARACTERS, init_scale=0.2)


@pytest.fixture(scope="module")
def by_transformers(model: str) -> Found:
    trainer = make_trainer(make_args(model))
    first = make_rows(12, SEEDS[0])
    found = Found(outputs=dict(zip(first.row_ids, trainer.log_probs("actor", first), strict=True)))
    found.steps = [step(trainer, make_rows(12, seed)) for seed in SEEDS]
    found.weights = {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}
    return found


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one rank"),
        pytest.param(
            {"num_train_ranks": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
            id="DP2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"num_train_ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            id="TP2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"num_train_ranks": 2, "context_parallel_size": 2, "max_tokens_per_gpu": 32},
            id="CP2",
            marks=pytest.mark.slow,
        ),
        pytest.param({"num_train_ranks": 2, "pipeline_model_parallel_size": 2}, id="PP2", marks=pytest.mark.slow),
    ],
)
def test_two_steps_equal_those_of_transformers_and_adamw(
    changes: dict[str, Any], model: str, by_transformers: Found, ranks: RankPool
) -> None:
    case = Case(args=make_args(model, **changes), batches=[make_rows(12, seed) for seed in SEEDS])
    assert beyond(run_case(ranks, case), by_transformers) == {}


def test_a_trainer_may_bring_a_bridge_of_its_own(model: str, by_transformers: Found, ranks: RankPool) -> None:
    """Four members are all that the trainer asks of it."""
    batches = [make_rows(12, seed) for seed in SEEDS]
    case = Case(args=make_args(model), batches=batches, trainer="harness.megatron_bridged:BridgedTrainer")
    assert beyond(run_case(ranks, case), by_transformers) == {}


@pytest.mark.slow
def test_a_token_that_no_tensor_rank_knows_has_no_probability(model: str, ranks: RankPool, tmp_path: Path) -> None:
    """It is no row of any rank's embeddings, and each rank takes it for another one's."""
    known = make_rows(4, 0)
    tokens = [row.copy() for row in known.columns["tokens"]]
    tokens[-1][-1] = 30
    unknown = replace(known, columns=known.columns | {"tokens": tokens})
    args = make_args(model, num_train_ranks=2, tensor_model_parallel_size=2)
    wanted = r"the token 30 is not in the vocabulary of .*(.|\n)*token ids below 30"
    for batches in ([unknown], [known, unknown]):  # in log-probabilities, in a step
        with pytest.raises(RankError, match=wanted):
            run_case(ranks, Case(args=args, batches=batches))
    larger = make_tiny_model(tmp_path, characters=CHARACTERS, vocab=32)
    of_reference = args.model_copy(update={"hf_checkpoint": larger, "ref_load": model})
    with pytest.raises(RankError, match=wanted):
        run_case(ranks, Case(args=of_reference, batches=[unknown], model="ref"))
    run_case(ranks, Case(args=of_reference, batches=[unknown]))


@pytest.mark.slow
def test_a_reference_that_is_replaced_has_the_configuration_of_its_folder(
    model: str, by_transformers: Found, ranks: RankPool, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 50.0}
    other = make_tiny_model(tmp_path, characters=CHARACTERS, rms_norm_eps=0.05, rope_parameters=rope)
    args = make_args(model, ref_load=other)
    batches = [make_rows(12, SEEDS[0])]
    before, after = (
        run_case(ranks, Case(args=args, batches=batches, model="ref", reference=folder)).outputs
        for folder in (None, model)
    )
    expected = by_transformers.outputs
    assert max(np.abs(after[row] - expected[row]).max(initial=0) for row in expected) < LIMITS["outputs"]
    assert max(np.abs(before[row] - expected[row]).max(initial=0) for row in expected) > 0.1
