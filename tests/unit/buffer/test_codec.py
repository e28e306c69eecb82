"""Groups are the same after JSON; columns arrive as they were sent, in few arrays."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.buffer.codec import IN_MESSAGE_BYTES, Columns, RowIds, for_queue, group_from_json, group_to_json
from buffer_rl.buffer.columns import BatchPlan, Cell, GroupSlice, assemble
from buffer_rl.buffer.storage import split_payloads
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid, RowId, Sample, SampleGroup, Status
from buffer_rl.records.sample import RenderedPrompt

DTYPES = ("int32", "int64", "float32", "float64", "bool", "float16")


def test_prompts_survive_the_way_through_json_bytes_of_images_included() -> None:
    uid = GroupUid("a:b", 3, 1)
    image = {"bytes": b"\x00\xff", "path": None}
    sample = Sample(
        uid=uid, index=5, group_index=2, prompt="p", label=[1], metadata={"a": {"b": 1}},
        multimodal_inputs={"image": [image], "raw": b""},
    )  # fmt: skip
    group = SampleGroup(uid=uid, samples=[sample], attempt=4)
    assert group_from_json(orjson.loads(orjson.dumps(group_to_json(group)))) == group


def test_a_response_comes_back_from_the_queue_with_what_a_function_has_added_to_it() -> None:
    uid, source = GroupUid("a", 3, 1), [{"role": "user", "content": "hello"}]
    sample = Sample(uid=uid, session_id="s-1", prompt=RenderedPrompt.of("<user>hello", source))
    sample.tokens, sample.response_length, sample.reward, sample.status = [5, 6], 1, 0.5, Status.COMPLETED
    sample.non_generation_time = 2.5
    sample.hidden = torch.tensor([[1.0, 2.0]], requires_grad=True)
    sample.seen = {"of": (np.float32(0.25), b"\x00")}
    (group,) = for_queue([SampleGroup(uid=uid, samples=[sample], attempt=4)])
    (again,) = group_from_json(orjson.loads(orjson.dumps(group_to_json(group))))
    assert (again.prompt, again.session_id, again.status, again.reward) == (source, "s-1", Status.COMPLETED, 0.5)
    assert (again.non_generation_time, again.seen) == (2.5, {"of": [0.25, b"\x00"]})
    again.hidden[0, 0] = 3.0  # an array of its own, which may be changed
    assert_same(again.hidden, np.array([[3.0, 2.0]], dtype=np.float32))


def test_what_a_queue_cannot_hold_is_named() -> None:
    sample = Sample(uid=GroupUid("a", 0, 0), prompt="p", response_length=1)
    sample.note = {"path": [Path("x")]}
    with pytest.raises(RolloutError, match=r"row a:0:0/0.0: sample.note: it is of type pathlib"):
        for_queue([SampleGroup(uid=sample.uid, samples=[sample])])


def sent(value: Any) -> tuple[Any, int]:
    """What arrives, and how many arrays travelled beside the message, as Ray sends them."""
    beside: list[pickle.PickleBuffer] = []
    message = pickle.dumps(value, 5, buffer_callback=beside.append)
    return pickle.loads(message, buffers=beside), len(beside)


def assert_same(mine: Any, other: Any) -> None:
    assert type(mine) is type(other)
    if isinstance(mine, list):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            assert_same(one, two)
    elif isinstance(mine, np.ndarray):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(mine, other)
    else:
        assert mine == other


@st.composite
def columns(draw: st.DrawFn, num_rows: int) -> dict[str, Any]:
    """Columns of ``num_rows`` rows: dense, ragged, of equal and of mixed dtypes and shapes, empty rows included."""
    made: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)):
        kind = draw(st.sampled_from(("dense", "ragged", "mixed", "deep")))
        dtypes = [draw(st.sampled_from(DTYPES))] * num_rows
        if kind == "dense":
            made[name] = np.arange(num_rows).astype(dtypes[0] if dtypes else "int32")
            continue
        if kind == "mixed":
            dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(num_rows)]
        lengths = [draw(st.integers(0, 4)) for _ in range(num_rows)]
        shape = (2,) if kind == "deep" else ()
        made[name] = [np.ones((n, *shape), dtype) * n for n, dtype in zip(lengths, dtypes, strict=True)]
    return made


@given(st.integers(0, 4).flatmap(columns))
def test_columns_arrive_as_they_were_sent(made):
    arrived, _ = sent(Columns(made))
    assert list(arrived) == list(made)
    for name, column in made.items():
        assert_same(arrived[name], column)


def test_what_is_no_column_travels_as_it_is():
    strange = {"objects": np.array([{"a": 1}], dtype=object), "cell": Cell(num_rows=2), "numbers": [1, 2], "none": []}
    arrived, _ = sent(Columns(strange))
    assert arrived.pop("objects")[0] == {"a": 1}
    assert arrived == {"cell": Cell(num_rows=2), "numbers": [1, 2], "none": []}


def test_arrays_that_joining_would_change_travel_as_they_are():
    big_endian = [np.arange(3, dtype=">i4"), np.arange(2, dtype=">i4")]
    padded = np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True))
    masked = np.ma.masked_array([1.0, 2.0, 3.0], mask=[0, 1, 0])
    columns = {"big_endian": big_endian, "padded": [padded, padded], "dense": padded, "one": np.arange(3, dtype=">f8")}
    arrived, _ = sent(Columns(columns, masked=masked, masks=[masked, masked]))
    for name, column in columns.items():
        assert_same(arrived[name], column)
    for mine in (arrived["masked"], *arrived["masks"]):
        assert (type(mine), mine.tolist()) == (np.ma.MaskedArray, [1.0, None, 3.0])


def test_rows_travel_as_one_array_and_small_fields_inside_the_message():
    rows = [np.full(IN_MESSAGE_BYTES // 8, i, dtype=np.float32) for i in range(4)]
    arrived, num_beside = sent(Columns(large=rows, small=[row[:3] for row in rows]))
    assert num_beside == 1
    assert_same(arrived["large"], rows)
    assert_same(arrived["small"], [row[:3] for row in rows])


def plan_of(groups: list[dict[str, Any]], positions: list[list[int]]) -> BatchPlan:
    slices = []
    for number, (cells, chosen) in enumerate(zip(groups, positions, strict=True)):
        uid = GroupUid("s", number, 0)
        cells = {name: c if isinstance(c, Cell) else Cell.of(c) for name, c in cells.items()}
        slices.append(GroupSlice(row_ids=[RowId(uid, i) for i in chosen], positions=chosen, cells=cells))
    return BatchPlan(rollout_id=3, task="train_3", slices=slices)


def test_large_columns_of_a_call_travel_apart_and_the_others_in_its_arguments():
    columns = Columns(at_the_limit=[np.zeros(5), np.zeros(5)], below=np.zeros(9), above=np.zeros(11))
    args, payloads = split_payloads(("uid", columns, 3), min_bytes=80)
    assert (args[0], list(args[1]), type(args[1]), args[2]) == ("uid", ["below"], Columns, 3)
    assert {name: payloads[name] is columns[name] for name in payloads} == {"at_the_limit": True, "above": True}
    assert split_payloads(("uid", 3), min_bytes=0) == (("uid", 3), {})


def test_a_plan_arrives_as_it_was_sent():
    groups = [
        {
            "tokens": [np.arange(n + i, dtype=np.int32) for i in range(n)],
            "reward": np.arange(n, dtype=np.float32),
            "dtype_differs": np.arange(n).astype(dtype),
            "rows_differ": [np.zeros(1, dtype)] * n,
            "stored": Cell(num_rows=n, ref=f"ref-{n}", storage="storage-0"),
        }
        for n, dtype in ((2, "int32"), (3, "int64"), (1, "int32"))
    ]
    groups[1]["half_stored"] = np.zeros(3)
    for n, other in ((2, groups[0]), (1, groups[2])):
        other["half_stored"] = Cell(num_rows=n, ref=f"half-{n}", storage="storage-0")
    plan = plan_of(groups, [[0, 1], [2, 0], [0]])
    arrived, _ = sent(plan)
    assert (arrived.rollout_id, arrived.task) == (3, "train_3")
    for mine, other in zip(arrived.slices, plan.slices, strict=True):
        assert (mine.row_ids, mine.positions) == (other.row_ids, other.positions)
        assert list(mine.cells) == list(other.cells)
        for name, cell in other.cells.items():
            assert (mine.cells[name].num_rows, mine.cells[name].ref) == (cell.num_rows, cell.ref)
            assert_same(mine.cells[name].inline, cell.inline)


def test_a_group_in_several_slices_is_sent_once():
    cells = {"tokens": Cell.of([np.full(25_000, i, dtype=np.int32) for i in range(8)])}
    uid = GroupUid("s", 0, 0)
    slices = [GroupSlice(row_ids=[RowId(uid, i)], positions=[i], cells=cells) for i in (3, 0, 7, 1)]
    plan = BatchPlan(rollout_id=3, task="train_3", slices=slices)
    assert len(pickle.dumps(plan, 5)) < 1.1 * 800_000
    arrived, _ = sent(plan)
    assert [row[0] for row in assemble(arrived).columns["tokens"]] == [3, 0, 7, 1]


@pytest.mark.parametrize("groups", [[], [{}], [{"a": np.zeros(2)}, {"b": np.zeros(2)}]])
def test_plans_without_common_fields_arrive(groups):
    plan = plan_of(groups, [[0, 1] for _ in groups])
    arrived, _ = sent(plan)
    assert [list(part.cells) for part in arrived.slices] == [list(part.cells) for part in plan.slices]


def test_a_step_of_many_rows_is_assembled_from_few_arrays():
    groups = [
        {name: [np.full(100, 10 * g + i, np.float32) for i in range(4)] for name in ("x", "y", "z")} for g in range(64)
    ]
    plan = plan_of(groups, [[0, 1, 2, 3]] * 64)
    arrived, num_beside = sent(plan)
    assert num_beside <= 3  # 768 rows
    mine, other = assemble(arrived), assemble(plan)
    for name in ("x", "y", "z"):
        assert_same(mine.columns[name], other.columns[name])


def test_rows_arrive_as_what_they_were_and_share_the_uid_of_their_group():
    uid = GroupUid("s", 3, 1)
    (first, second), _ = sent([RowId(uid, 0), RowId(uid, 1, 2)])
    assert (first, second) == (RowId(uid, 0, 0), RowId(uid, 1, 2))
    assert first.uid is second.uid
    assert {first: "found"}[RowId(GroupUid("s", 3, 1), 0)] == "found"


def test_row_ids_arrive_as_a_list_in_their_order():
    one, two = GroupUid("s", 1, 0), GroupUid("s", 2, 3)
    rows = [RowId(one, 3), RowId(one, 0, 1), RowId(two, 3), RowId(one, 3, 2)]
    arrived, _ = sent(RowIds(rows))
    assert_same(arrived, rows)
    assert sent(RowIds())[0] == []
