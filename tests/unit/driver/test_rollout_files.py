from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.data.source import PromptDataSource
from buffer_rl.driver.local_roles import RecordedRollouts
from buffer_rl.errors import DataError
from buffer_rl.files.row_file import read_rollout, rollout_path, write_rollout
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from harness.local_buffer import local_state
from harness.tickets import close_rollout


def make_batch() -> TrainBatch:
    """Two groups; one response of no tokens; a uid with a colon."""
    rows = [RowId(GroupUid("a:b", 3, 1), 0), RowId(GroupUid("a:b", 3, 1), 1, 2), RowId(GroupUid("c", 0, 0), 0)]
    lengths = [2, 0, 3]
    return TrainBatch(
        rollout_id=7,
        task="train_7",
        row_ids=rows,
        columns={
            "tokens": [np.arange(4 + n, dtype=np.int32) for n in lengths],
            "response_length": np.asarray(lengths, dtype=np.int32),
            "loss_mask": [np.ones(n, dtype=np.float32) for n in lengths],
            "reward": np.asarray([0.1, -0.0, 1e-30], dtype=np.float32),
            "raw.reward": np.asarray([1.0, 2.0, 3.0]),
        },
    )


def test_a_rollout_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = rollout_path(str(tmp_path / "new" / "r{rollout_id}.safetensors"), 7)
    assert path.name == "r7.safetensors"
    batch = make_batch()
    write_rollout(path, batch)
    again = read_rollout(path)
    assert (again.row_ids, again.rollout_id, again.task) == (batch.row_ids, 7, "train_7")
    assert again.columns.keys() == batch.columns.keys()
    for name, column in batch.columns.items():
        assert isinstance(again.columns[name], np.ndarray) == isinstance(column, np.ndarray)
        for row, expected in zip(again.columns[name], column, strict=True):
            assert row.dtype == expected.dtype
            assert row.tobytes() == expected.tobytes()
    assert [file.name for file in path.parent.iterdir()] == ["r7.safetensors"]


def test_a_recorded_sample_counts_once_whatever_its_parts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p", "label": "1"}\n')
    args = compose(CORE_SECTIONS)(prompt_data=str(rows), rollout_batch_size=1, n_samples_per_prompt=2)
    state = local_state(args, Ledger.in_memory())
    (uid,) = [group.uid for group in PromptDataSource(args).get_samples(1)]
    batch = make_batch()
    batch.rollout_id, batch.task = 0, "train_0"
    batch.row_ids = [RowId(uid, 0), RowId(uid, 1, 0), RowId(uid, 1, 1)]
    batch.columns["raw_reward"] = np.asarray([1.0, 0.0, 0.0], dtype=np.float32)
    template = str(tmp_path / "r{rollout_id}.safetensors")
    args = args.model_copy(update={"load_debug_rollout_data": template})
    ticket, buffer = state.generate(0), cast("BufferClient", state)
    write_rollout(rollout_path(template, 0), replace(batch, rollout_id=7))
    with pytest.raises(DataError, match="these are the rows of rollout 7"):
        RecordedRollouts(args, buffer).run(ticket)
    write_rollout(rollout_path(template, 0), batch)
    with pytest.raises(DataError, match="recorded without it, and have no kept_counts"):
        RecordedRollouts(args.model_copy(update={"replay_kept_tokens": True}), buffer).run(ticket)
    metrics, _ = RecordedRollouts(args, buffer).run(ticket)
    assert (close_rollout(state, ticket).num_rows, metrics) == (3, {"rollout/raw_reward": 0.5})


def test_a_missing_damaged_or_strange_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rollout"
    with pytest.raises(DataError, match="no such file"):
        read_rollout(path)
    write_rollout(path, make_batch())
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(DataError, match=str(path)):
        read_rollout(path)
    save_file({"tokens": np.zeros(3)}, path)
    with pytest.raises(DataError, match="no rollout can be read"):
        read_rollout(path)
    path.write_bytes(content.replace(b'\\"format\\": 1', b'\\"format\\": 2'))
    with pytest.raises(DataError, match="format 2"):
        read_rollout(path)


def test_rows_may_have_more_dimensions_that_are_those_of_all(tmp_path: Path) -> None:
    batch = make_batch()
    batch.columns["experts"] = [np.arange(4 * n, dtype=np.uint8).reshape(n, 2, 2) for n in (2, 0, 3)]
    write_rollout(tmp_path / "rollout", batch)
    again = read_rollout(tmp_path / "rollout").columns["experts"]
    assert [row.tolist() for row in again] == [row.tolist() for row in batch.columns["experts"]]
    assert {row.dtype for row in again} == {np.dtype(np.uint8)}
    for unlike in (np.zeros((2, 3)), np.float32(1)):
        batch.columns["pixels"] = [np.zeros((2, 2)), np.zeros((1, 2)), unlike]
        with pytest.raises(DataError, match="pixels"):
            write_rollout(tmp_path / "other", batch)
    assert [file.name for file in tmp_path.iterdir()] == ["rollout"]
