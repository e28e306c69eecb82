"""The trainer backends of examples/trainer_backends, and the default one split over ranks, in two processes, beside the
default one in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from harness.backend_ranks import groups_of, largest_difference, run_ranks
from harness.recorded_rows import recorded_rows
from harness.trainers import LARGE_EPS

pytestmark = pytest.mark.slow

Found = dict[str, list[dict[str, Any]]]
"""By backend, what each rank found (see ``harness.backend_ranks``)."""
BACKENDS = Path(__file__).resolve().parents[3] / "examples" / "trainer_backends"
TENSOR_PARALLEL = f"{BACKENDS / 'tensor_parallel.py'}:TensorParallelTrainer"
IN_STEP = f"{BACKENDS / 'in_step.py'}:InStepTrainer"
SPLIT = "torch, --fsdp-size 2"
ALL = [TENSOR_PARALLEL, IN_STEP, SPLIT]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, forked_processes: None) -> Found:
    """What each rank of each backend found in four optimizer steps on five groups each, of which the second is not
    finite; the other backends than ``torch`` get them in two deals, in the second of which one replica of those that
    work in step has no rows."""
    folder = tmp_path_factory.mktemp("backends")
    model = make_tiny_model(folder / "model", characters="abcd=", init_scale=0.3)
    args = compose(CORE_SECTIONS)(
        hf_checkpoint=model,
        train_device="cpu",
        lr=1e-2,
        lr_warmup_iters=2,
        weight_decay=0.1,
        **LARGE_EPS,
        clip_grad=0.05,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coef=0.01,
        max_tokens_per_gpu=60,
    )
    batches = [recorded_rows(number, 5) for number in range(4)]
    batches[1].columns["reward"][0] = np.float32(3e38)
    whole = [[[batch]] for batch in batches]
    one_replica = [[[groups_of(batch, 0, 1, 2)], [groups_of(batch, 3, 4)]] for batch in batches]
    two_replicas = [
        [[groups_of(batch, 0, 1), groups_of(batch, 2, 3)], [groups_of(batch, 4), groups_of(batch)]] for batch in batches
    ]
    job_file = folder / "job"
    job_file.write_bytes(pickle.dumps([("torch", args, whole)]))
    (torch_found,) = run_ranks(1, job_file)
    split = ("torch", args.model_copy(update={"fsdp_size": 2}), two_replicas)
    job_file.write_bytes(pickle.dumps([(TENSOR_PARALLEL, args, one_replica), (IN_STEP, args, two_replicas), split]))
    others = zip(ALL, zip(*run_ranks(2, job_file), strict=True), strict=True)
    return {"torch": torch_found, **{name: list(ranks) for name, ranks in others}}


@pytest.mark.parametrize("backend", ALL)
def test_two_ranks_end_with_the_parameters_of_the_default_backend(found: Found, backend: str) -> None:
    (alone,) = found["torch"]
    for rank in found[backend]:
        assert largest_difference(rank["weights"], alone["weights"]) <= 1e-6
        assert largest_difference(rank["weights"], found[backend][0]["weights"]) == 0


@pytest.mark.parametrize("backend", ALL)
def test_every_rank_sees_the_same_gradient_norm_and_leaves_out_the_same_step(found: Found, backend: str) -> None:
    (alone,) = found["torch"]
    ranks = [rank["steps"] for rank in found[backend]]
    for expected, *steps in zip(alone["steps"], *ranks, strict=True):
        assert all(("error" in step) == ("error" in expected) for step in steps)
        assert len({step.get("grad_norm") for step in steps}) == 1
        assert steps[0].get("grad_norm", 0) == pytest.approx(expected.get("grad_norm", 0), rel=1e-5)
        assert steps[0].get("lr") == expected.get("lr")
    assert ["error" in step for step in alone["steps"]] == [False, True, False, False]


@pytest.mark.parametrize("backend", ALL)
def test_losses_and_divisors_of_the_heads_add_up_to_those_of_the_default_backend(found: Found, backend: str) -> None:
    (alone,) = found["torch"]
    heads = found[backend][: 1 if backend == TENSOR_PARALLEL else 2]
    for number in (0, 2, 3):
        expected = alone["steps"][number]
        assert heads[0]["steps"][number]["divisor"] == expected["divisor"]
        loss = sum(head["steps"][number]["loss"] for head in heads)
        assert loss == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("model", ["actor", "ref"])
def test_both_tensor_parallel_ranks_have_the_log_probabilities_of_the_default_backend(found: Found, model: str) -> None:
    (alone,) = found["torch"]
    for rank in found[TENSOR_PARALLEL]:
        for expected, step in zip(alone["steps"], rank["steps"], strict=True):
            rows = [row for deal in step[model] for row in deal]
            for row, wanted in zip(rows, expected[model][0], strict=True):
                np.testing.assert_allclose(row, wanted, atol=5e-5)


@pytest.mark.parametrize("backend", [IN_STEP, SPLIT])
def test_a_replica_without_rows_has_no_log_probabilities(found: Found, backend: str) -> None:
    assert [len(rows) for rows in found[backend][1]["steps"][0]["actor"]] == [8, 0]


@pytest.mark.parametrize("backend", ALL)
def test_a_trainer_goes_on_from_what_was_saved(found: Found, backend: str) -> None:
    for rank in found[backend]:
        assert largest_difference(rank["resumed"], rank["weights"]) == 0
        assert "absent" in rank["load_error"]


@pytest.mark.parametrize("backend", ALL)
def test_transformers_loads_the_folder_with_the_exported_weights(found: Found, backend: str) -> None:
    rank = found[backend][0]
    model, loaded = AutoModelForCausalLM.from_pretrained(rank["hf"], output_loading_info=True)
    assert not any(loaded.values())
    state = model.state_dict()
    assert largest_difference({name: state[name] for name in rank["weights"]}, rank["weights"]) == 0
    assert len(AutoTokenizer.from_pretrained(rank["hf"])) == 8
