"""What memory of a GPU a trainer and an engine that sleep give back."""

from __future__ import annotations

import gc
import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.embedded.launcher import launch
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.sharding import whole
from harness.megatron_rows import make_rows
from harness.trainers import make_trainer, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(300),
]
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}


def test_a_sleeping_torch_trainer_has_moved_everything_and_goes_on_as_it_was(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", **LARGE)
    options = {"hf_checkpoint": model, "train_device": "cuda", "use_kl_loss": True, "kl_loss_coef": 0.1}
    args: Any = compose(CORE_SECTIONS)(**options, run_dir=str(tmp_path), deterministic=True, num_rollout=3)
    product = torch.ones(64, 64, device="cuda", requires_grad=True)
    (product @ product).sum().backward()  # cuBLAS keeps a workspace for each thread that computes: 32 MiB on an H100
    del product
    workspaces = torch.cuda.memory_allocated()
    found = []
    for sleeps in (False, True):
        trainer = make_trainer(args)
        for seed in range(3):
            batch = make_rows(12, seed)
            batch.columns["ref_log_probs"] = trainer.log_probs("ref", batch)
            step(trainer, batch)
            if sleeps:
                used = torch.cuda.memory_allocated()
                trainer.sleep()
                assert torch.cuda.memory_allocated() - workspaces < 0.05 * (used - workspaces)
                trainer.wake_up()
        found.append([tensor.cpu().clone() for bucket in trainer.export() for tensor in bucket.values()])
        del trainer
    assert all(torch.equal(kept, slept) for kept, slept in zip(*found, strict=True))


def used_by(pid: int) -> int:
    """Bytes of the device that a process has."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return next((int(line.split(",")[1]) for line in lines if int(line.split(",")[0]) == pid), 0) * 2**20


def test_an_embedded_engine_gives_weights_and_cache_back(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", **LARGE)
    options = {"hf_checkpoint": model, "engine_device": "cuda", "engine_max_running_requests": 512}
    args: Any = compose(CORE_SECTIONS)(**options, run_dir=str(tmp_path))
    engine = launch(args, 0, str(tmp_path / "log"))

    def post(path: str, **body: Any) -> None:
        data = json.dumps(body).encode()
        urllib.request.urlopen(urllib.request.Request(engine.url + path, data), timeout=100).close()

    try:
        engine.wait_ready(120)
        params = {"max_new_tokens": 200, "ignore_eos": True}
        post("/generate", input_ids=[[token, 5] for token in range(3, 99)], sampling_params=params)
        used = used_by(engine.process.pid)
        if not used:
            pytest.skip("nvidia-smi does not see this container's processes")
        post("/release_memory_occupation")
        # 8 layers x 4 x 512 x 512 and 3 x 512 x 2048 weights of 4 bytes, and 96 rows of 256 positions in the cache
        assert used_by(engine.process.pid) < used - 100 * 2**20
        post("/resume_memory_occupation")
        post("/update_weights_from_disk", model_path=model, weight_version="1")
        post("/generate", input_ids=[5, 6], sampling_params=params)
    finally:
        engine.stop()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_moments_on_the_host_change_no_bit(half: bool, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", **LARGE)
    found, used = [], []
    for offload in (False, True):
        options = {"hf_checkpoint": model, "train_device": "cuda", "bf16": half, "optimizer_cpu_offload": offload}
        args: Any = compose(CORE_SECTIONS)(**options, run_dir=str(tmp_path), deterministic=True, num_rollout=3)
        trainer = make_trainer(args)
        for seed in range(3):
            step(trainer, make_rows(12, seed))
        used.append(torch.cuda.memory_allocated())
        found.append([whole(tensor).cpu().clone() for bucket in trainer.export() for tensor in bucket.values()])
        del trainer
        gc.collect()  # modules of FSDP2 hold each other
    assert all(torch.equal(kept, moved) for kept, moved in zip(*found, strict=True))
    # 8 layers x (4 x 512 x 512 - shared keys and values, and 3 x 512 x 2048) weights, of two moments of 4 bytes
    assert used[0] - used[1] > 8 * 3 * 512 * 2048 * 8
