"""What batches know of samples whose parts they may lack."""

from __future__ import annotations

import numpy as np

from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.pool import DataPool, ReadRequest
from buffer_rl.buffer.readers import Share
from buffer_rl.records.groups import GroupUid, RowId


def test_every_row_says_how_many_tokens_its_whole_sample_trains_on_and_samples_are_counted_once() -> None:
    """A sample of two parts, one that is masked entirely and one of one part; in another group one of three parts."""
    plane = ColumnStore()
    pool = DataPool(0, "train_0", plane, num_groups=2)
    first, second = GroupUid("data", 4, 0), GroupUid("data", 7, 0)
    trained = {
        first: {RowId(first, 0, 0): 3, RowId(first, 1): 0, RowId(first, 0, 1): 2, RowId(first, 2): 4},
        second: {RowId(second, 5, 0): 1, RowId(second, 5, 1): 1, RowId(second, 5, 2): 6},
    }
    expected = dict(zip([*trained[first], *trained[second]], [5, 0, 5, 4, 8, 8, 8], strict=True))
    for uid, rows in trained.items():
        masks = [np.asarray([1] * tokens + [0], dtype=np.float32) for tokens in rows.values()]
        tokens = [np.zeros(9, dtype=np.int32) for _ in rows]
        wrong = np.full(len(rows), 77.0)  # from the user's converter, say
        plane.put(uid, list(rows), {"tokens": tokens, "loss_mask": masks, "sample_total_tokens": wrong})
        pool.join(uid)
    request = ReadRequest(reader="ref", fields=frozenset({"tokens", "sample_total_tokens"}), num_rows=100)
    ready = pool.get_meta(request).row_ids
    pool.select([first, second])
    plans = [
        pool.plan_rows(ready),
        pool.share(Share(0, 2)),
        pool.share(Share(1, 2)),
        pool.share(Share(0, 1, 2, 0)),
        pool.share(Share(0, 1, 2, 1)),
    ]
    for plan in plans:
        batch = assemble(plan)
        assert batch.columns["sample_total_tokens"].tolist() == [expected[row] for row in batch.row_ids]
        parts = {first: {0: 2, 1: 1, 2: 1}, second: {5: 3}}
        assert batch.columns["sample_parts"].tolist() == [parts[row.uid][row.sample_index] for row in batch.row_ids]
    assert [len(assemble(plan).row_ids) for plan in plans] == [7, 4, 3, 4, 3]
