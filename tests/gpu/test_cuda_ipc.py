"""Weights on a CUDA device, read by another process without leaving it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from buffer_rl.errors import EngineError
from buffer_rl.weights.shared_bucket import SharedWeights
from buffer_rl.weights.shared_memory import copy_cuda_memory, share_cuda_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

READ = """
import sys
from buffer_rl.weights.shared_bucket import open_bucket
for name, tensor in open_bucket(sys.argv[1]).items():
    print(name, tensor.device.type, tensor.dtype, tensor.float().sum().item())
"""


def read(handle: str) -> list[str]:
    answer = subprocess.run([sys.executable, "-c", READ, handle], capture_output=True, text=True, check=True)
    return answer.stdout.splitlines()


def test_each_receiver_copies_the_tensors_on_their_device() -> None:
    bucket = {
        "a": torch.arange(1000, device="cuda", dtype=torch.float32),
        "b": torch.ones(3, 5, device="cuda", dtype=torch.bfloat16),
    }
    shared = SharedWeights(use_cuda_ipc=True)
    (handles,) = shared.share([bucket], num_receivers=2)
    assert handles[0] != handles[1]
    for handle in handles:
        assert read(handle) == ["a cuda torch.float32 499500.0", "b cuda torch.bfloat16 15.0"]
    shared.release()


def test_without_inter_process_handles_the_machine_s_memory_is_used() -> None:
    shared = SharedWeights()
    ((handle,),) = shared.share([{"a": torch.arange(10, device="cuda", dtype=torch.float32)}])
    assert read(handle) == ["a cpu torch.float32 45.0"]
    shared.release()


def test_a_device_that_this_process_does_not_see_is_refused() -> None:
    handle = share_cuda_memory(torch.zeros(64, dtype=torch.uint8, device="cuda"))
    with pytest.raises(EngineError, match="does not see"):
        copy_cuda_memory({**handle, "device_uuid": "00000000-0000-0000-0000-000000000000"}, 64)
