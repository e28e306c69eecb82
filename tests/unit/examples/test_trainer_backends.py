"""The trainer backends of examples/trainer_backends in two processes, beside the default one in one process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.process import reserved_port
from buffer_rl.options.section import compose
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from harness.recorded_rows import recorded_rows
from harness.trainers import LARGE_EPS

pytestmark = pytest.mark.slow

DEADLINE_S = 120
Found = dict[str, list[dict[str, Any]]]
"""By backend, what each rank found (see one_backend_rank.py)."""
BACKENDS = Path(__file__).resolve().parents[3] / "examples" / "trainer_backends"
TENSOR_PARALLEL = f"{BACKENDS / 'tensor_parallel.py'}:TensorParallelTrainer"
IN_STEP = f"{BACKENDS / 'in_step.py'}:InStepTrainer"


def run_ranks(world_size: int, job_file: Path) -> list[list[dict[str, Any]]]:
    """What each rank found for each item of the job."""
    held = reserved_port("127.0.0.1")
    port = str(held.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("one_backend_rank.py"))
    outs = [job_file.with_name(f"out_{world_size}_{rank}") for rank in range(world_size)]
    commands = [
        [sys.executable, script, str(job_file), str(rank), str(world_size), str(out)] for rank, out in enumerate(outs)
    ]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in ranks:
            _, stderr = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, stderr
    finally:
        held.close()
        for process in ranks:
            process.kill()
    return [pickle.loads(out.read_bytes()) for out in outs]


def groups_of(batch: TrainBatch, *numbers: int) -> TrainBatch:
    """The rows of the groups that are the ``numbers``-th of the batch."""
    uids = list(dict.fromkeys(row.uid for row in batch.row_ids))
    chosen = {uids[number] for number in numbers}
    return batch.select(index for index, row in enumerate(batch.row_ids) if row.uid in chosen)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank of each backend found in four optimizer steps on five groups each, of which the second is not
    finite; the other backends than ``torch`` get them in two deals, in the second of which the in-step one has no rows
    for one replica."""
    folder = tmp_path_factory.mktemp("backends")
    model = make_tiny_model(folder / "model", characters="abc=", init_scale=0.3)
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
    job_file.write_bytes(pickle.dumps([(TENSOR_PARALLEL, args, one_replica), (IN_STEP, args, two_replicas)]))
    tensor_parallel, in_step = zip(*run_ranks(2, job_file), strict=True)
    return {"torch": torch_found, TENSOR_PARALLEL: list(tensor_parallel), IN_STEP: list(in_step)}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("backend", [TENSOR_PARALLEL, IN_STEP])
def test_two_ranks_end_with_the_parameters_of_the_default_backend(found: Found, backend: str) -> None:
    (alone,) = found["torch"]
    for rank in found[backend]:
        assert largest_difference(rank["weights"], alone["weights"]) <= 1e-6
        assert largest_difference(rank["weights"], found[backend][0]["weights"]) == 0


@pytest.mark.parametrize("backend", [TENSOR_PARALLEL, IN_STEP])
def test_every_rank_sees_the_same_gradient_norm_and_leaves_out_the_same_step(found: Found, backend: str) -> None:
    (alone,) = found["torch"]
    ranks = [rank["steps"] for rank in found[backend]]
    for expected, *steps in zip(alone["steps"], *ranks, strict=True):
        assert all(("error" in step) == ("error" in expected) for step in steps)
        assert len({step.get("grad_norm") for step in steps}) == 1
        assert steps[0].get("grad_norm", 0) == pytest.approx(expected.get("grad_norm", 0), rel=1e-5)
        assert steps[0].get("lr") == expected.get("lr")
    assert ["error" in step for step in alone["steps"]] == [False, True, False, False]


@pytest.mark.parametrize("backend", [TENSOR_PARALLEL, IN_STEP])
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


def test_a_replica_without_rows_has_no_log_probabilities(found: Found) -> None:
    assert [len(rows) for rows in found[IN_STEP][1]["steps"][0]["actor"]] == [8, 0]


@pytest.mark.parametrize("backend", [TENSOR_PARALLEL, IN_STEP])
def test_a_trainer_goes_on_from_what_was_saved(found: Found, backend: str) -> None:
    for rank in found[backend]:
        assert largest_difference(rank["resumed"], rank["weights"]) == 0
        assert "absent" in rank["load_error"]


@pytest.mark.parametrize("backend", [TENSOR_PARALLEL, IN_STEP])
def test_transformers_loads_the_folder_with_the_exported_weights(found: Found, backend: str) -> None:
    rank = found[backend][0]
    model, loaded = AutoModelForCausalLM.from_pretrained(rank["hf"], output_loading_info=True)
    assert not any(loaded.values())
    state = model.state_dict()
    assert largest_difference({name: state[name] for name in rank["weights"]}, rank["weights"]) == 0
    assert len(AutoTokenizer.from_pretrained(rank["hf"])) == 7
