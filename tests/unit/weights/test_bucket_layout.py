"""Layouts: every tensor comes back as it was, and nothing outside the memory is ever read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.errors import EngineError
from buffer_rl.weights.shared_bucket import ALIGNMENT, DTYPES, BucketLayout
from buffer_rl.weights.shared_memory import as_bytes

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).reshape(-1).view(dtype).view(shape)


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6))
def test_tensors_come_back_bit_by_bit_and_aligned(kinds: list[tuple[str, tuple[int, ...]]]) -> None:
    bucket = {f"w{i}": filled(DTYPES[name], shape, i) for i, (name, shape) in enumerate(kinds)}
    layout = BucketLayout.parse(json.loads(json.dumps(BucketLayout.of(bucket).model_dump())))
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for place, tensor in zip(layout.tensors, bucket.values(), strict=True):
        assert place.offset % ALIGNMENT == 0
        assert not flat[place.offset : place.offset + place.num_bytes].any(), "overlaps another tensor"
        flat[place.offset : place.offset + place.num_bytes] = as_bytes(tensor)
    found = layout.views(flat)
    assert list(found) == list(bucket)
    for name, tensor in bucket.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor))


def test_a_transposed_tensor_is_written_in_row_major_order() -> None:
    tensor = torch.arange(6, dtype=torch.uint8).view(2, 3).t()
    assert as_bytes(tensor).tolist() == [0, 3, 1, 4, 2, 5]


GOOD: dict[str, Any] = {"num_bytes": 72, "tensors": [["a", "float32", [2], 0], ["b", "float32", [2], 64]]}


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {**GOOD, "num_bytes": 71},
        {**GOOD, "num_bytes": -1},
        {**GOOD, "num_bytes": 72.0},
        {**GOOD, "tensors": [["a", "float32", [2]]]},
        {**GOOD, "tensors": [["a", "float33", [2], 0]]},
        {**GOOD, "tensors": [["a", ["float32"], [2], 0]]},
        {**GOOD, "tensors": [["a", "float32", [-1], 0]]},
        {**GOOD, "tensors": [["a", "float32", [True], 0]]},
        {**GOOD, "tensors": [["a", "float32", [2], -64]]},
        {**GOOD, "tensors": [["a", "float32", [1], 4]]},
        {**GOOD, "tensors": [["a", "float32", [10**12, 10**12], 0]]},
        {**GOOD, "tensors": [["a", "float32", [1], 0], ["a", "float32", [1], 64]]},
        {**GOOD, "tensors": [["", "float32", [1], 0]]},
        {**GOOD, "tensors": [[7, "float32", [1], 0]]},
    ],
)
def test_a_layout_that_does_not_fit_its_memory_is_refused(bad: Any) -> None:
    BucketLayout.parse(GOOD)
    with pytest.raises(EngineError, match="not a bucket of weights"):
        BucketLayout.parse(bad)


def test_a_dtype_without_a_name_here_cannot_be_published() -> None:
    with pytest.raises(EngineError, match="complex64"):
        BucketLayout.of({"a": torch.zeros(1, dtype=torch.complex64)})
