"""Memory of another process: read, sealed, gone with its owner, and nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from buffer_rl.cluster.locality import machine_id
from buffer_rl.errors import EngineError
from buffer_rl.weights.shared_bucket import SharedWeights, open_bucket
from buffer_rl.weights.shared_memory import SharedMemory, open_memory

SHARE = """
import torch
from buffer_rl.weights.shared_bucket import SharedWeights
shared = SharedWeights()
print(shared.share([{"a": torch.arange(1000.0)}])[0][0])
"""


def sealed(values: list[int]) -> tuple[SharedMemory, dict[str, Any]]:
    memory = SharedMemory(len(values))
    memory.write(torch.tensor(values, dtype=torch.uint8), 0)
    return memory, memory.seal()


@pytest.mark.usefixtures("no_memory_left")
@pytest.mark.slow
def test_what_a_reader_has_mapped_outlives_the_owner(start_sharing: Callable[..., Any]) -> None:
    owner, handle = start_sharing(SHARE)
    mapped = open_bucket(handle)["a"]
    owner.kill()
    owner.wait()
    assert torch.equal(mapped, torch.arange(1000.0))
    with pytest.raises(EngineError, match="cannot be opened"):
        open_bucket(handle)


@pytest.mark.usefixtures("no_memory_left")
def test_a_reader_cannot_change_what_others_read() -> None:
    memory, handle = sealed([1, 2, 3])
    mine = open_memory(handle, 3)
    mine += 1
    assert open_memory(handle, 3).tolist() == [1, 2, 3]
    memory.close()
    memory.close()


@pytest.mark.usefixtures("no_memory_left")
def test_the_owner_cannot_change_or_shorten_it_once_it_is_handed_out() -> None:
    memory, handle = sealed([1, 2, 3])
    with pytest.raises(PermissionError):
        memory.write(torch.zeros(1, dtype=torch.uint8), 0)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{handle['descriptor']}", 0)
    memory.close()


@pytest.mark.usefixtures("no_memory_left")
def test_memory_that_is_still_written_or_of_another_length_is_refused() -> None:
    memory = SharedMemory(4)
    handle = {"machine": machine_id(), "pid": os.getpid(), "descriptor": memory._descriptor}
    with pytest.raises(EngineError, match="still being written"):
        open_memory(handle, 4)
    memory.seal()
    with pytest.raises(EngineError, match="has 4 bytes"):
        open_memory(handle, 5)
    memory.close()


def test_no_other_file_is_read_through_a_handle() -> None:
    with open("/etc/hostname", "rb") as file:
        handle = {"machine": machine_id(), "pid": os.getpid(), "descriptor": file.fileno()}
        with pytest.raises(EngineError, match="not shared memory of weights"):
            open_memory(handle, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "another"}, "another machine"),
        ({"pid": "1/../2"}, "whole numbers"),
        ({"descriptor": -1}, "whole numbers"),
        ({"descriptor": True}, "whole numbers"),
        ({"descriptor": 10**6}, "cannot be opened"),
    ],
)
def test_a_handle_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    memory, handle = sealed([1])
    with pytest.raises(EngineError, match=message):
        open_memory({**handle, **change}, 1)
    with pytest.raises(EngineError, match="not a handle"):
        open_memory({}, 1)
    memory.close()


@pytest.mark.usefixtures("no_memory_left")
def test_a_bucket_that_cannot_be_shared_frees_those_before_it() -> None:
    def buckets() -> Any:
        yield {"a": torch.zeros(3)}
        raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        SharedWeights().share(buckets())


@pytest.mark.usefixtures("no_memory_left")
def test_sharing_again_frees_the_older_version_and_release_all() -> None:
    shared = SharedWeights()
    old = shared.share([{"a": torch.zeros(3)}])[0][0]
    new = shared.share([{"a": torch.ones(3), "b": torch.empty(0)}], num_receivers=2)[0]
    assert len(new) == 2
    for handle in new:
        assert {name: tensor.tolist() for name, tensor in open_bucket(handle).items()} == {"a": [1, 1, 1], "b": []}
    shared.release()
    for handle in (old, *new):
        with pytest.raises(EngineError):
            open_bucket(handle)


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"kind": "file", "where": {}, "layout": {"num_bytes": 0}}'])
def test_text_that_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(EngineError):
        open_bucket(text)
