"""SGLang's pickled form: another process reads the tensors, and the memory goes with the sender."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as torch_multiprocessing

from buffer_rl.weights.shared_bucket import SharedWeights
from harness.processes import holds_within

READ = """
import base64, pickle, sys
for name, tensor in pickle.loads(base64.b64decode(sys.argv[1])):
    print(name, tensor.dtype, tensor.float().tolist())
del tensor
"""
SHARE = """
import torch
from buffer_rl.weights.shared_bucket import SharedWeights
shared = SharedWeights()
print(shared.share_pickled([{"a": torch.arange(4096.0)}])[0][0])
"""


def files_of(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")]


def test_a_process_that_is_no_child_reads_the_named_tensors_and_release_frees_them() -> None:
    strategy = torch_multiprocessing.get_sharing_strategy()
    shared = SharedWeights()
    bucket = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0], [4.0]], dtype=torch.bfloat16)}
    first, second = shared.share_pickled([bucket], num_receivers=2)[0]
    assert files_of(os.getpid())
    for pickled in (first, second):
        answer = subprocess.run([sys.executable, "-c", READ, pickled], capture_output=True, text=True, check=True)
        assert answer.stdout.splitlines() == ["a torch.float32 [1.0, 2.0]", "b torch.bfloat16 [[3.0], [4.0]]"]
    assert torch_multiprocessing.get_sharing_strategy() == strategy
    shared.release()
    assert files_of(os.getpid()) == []


@pytest.mark.slow
def test_a_killed_sender_leaves_nothing(start_sharing: Callable[..., Any]) -> None:
    sender, _ = start_sharing(SHARE)
    assert files_of(sender.pid)
    sender.kill()
    sender.wait()
    assert holds_within(10, lambda: not files_of(sender.pid))
