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
print(shared.share([{"a": torch.arange(4096.0)}], pickled=True)[0][0])
"""


def files_of(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")]


def test_a_process_that_is_no_child_reads_the_named_tensors_and_release_frees_them() -> None:
    strategy = torch_multiprocessing.get_sharing_strategy()
    shared = SharedWeights()
    bucket = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0], [4.0]], dtype=torch.bfloat16)}
    first, second = shared.share([bucket], num_receivers=2, pickled=True)[0]
    assert files_of(os.getpid())
    for pickled in (first, second):
        answer = subprocess.run([sys.executable, "-c", READ, pickled], capture_output=True, text=True, check=True)
        assert answer.stdout.splitlines() == ["a torch.float32 [1.0, 2.0]", "b torch.bfloat16 [[3.0], [4.0]]"]
    assert torch_multiprocessing.get_sharing_strategy() == strategy
    shared.release()
    assert files_of(os.getpid()) == []


KEEP = """
import base64, pickle, sys
named = pickle.loads(base64.b64decode(sys.argv[1]))
print("read", flush=True)
sys.stdin.readline()
print(named[0][1].sum().item(), flush=True)
del named
print("unmapped", flush=True)
"""


def test_handles_that_no_engine_reads_keep_no_file_and_one_that_reads_keeps_what_it_has_mapped() -> None:
    shared = SharedWeights()
    bucket = {"a": torch.ones(5000), "b": torch.zeros(0)}
    for _ in range(2):  # what is shared next releases it too
        ((first, _, _),) = shared.share([bucket], num_receivers=3, pickled=True)
        assert len(files_of(os.getpid())) == 2
    with subprocess.Popen(
        [sys.executable, "-c", KEEP, first], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "read\n"
        shared.release()
        shared.release()
        assert files_of(os.getpid()) == []
        out, _ = reader.communicate("\n", timeout=60)
    assert (out.splitlines(), reader.returncode) == (["5000.0", "unmapped"], 0)


def test_a_reader_that_died_keeps_no_file() -> None:
    shared = SharedWeights()
    ((handle,),) = shared.share([{"a": torch.ones(5000)}], pickled=True)
    with subprocess.Popen(
        [sys.executable, "-c", KEEP, handle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "read\n"
        reader.kill()
    shared.release()
    assert files_of(os.getpid()) == []


@pytest.mark.slow
def test_a_killed_sender_leaves_nothing(start_sharing: Callable[..., Any]) -> None:
    sender, _ = start_sharing(SHARE)
    assert files_of(sender.pid)
    sender.kill()
    sender.wait()
    assert holds_within(60, lambda: not files_of(sender.pid))
