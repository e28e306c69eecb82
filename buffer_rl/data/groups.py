"""One row as a group of empty samples."""

from __future__ import annotations

import copy
from typing import Any

from buffer_rl.data.dataset import PromptRow
from buffer_rl.types import GroupUid, Sample, SampleGroup


def make_group(
    row: PromptRow,
    uid: GroupUid,
    *,
    num_samples: int,
    group_index: int,
    index: int,
    data_set: str = "",
    sampling_params: dict[str, Any] | None = None,
    rm_type: str = "",
) -> SampleGroup:
    """A group of empty samples for one row. Samples share nothing that can be changed, multimodal values excepted:
    they may be large.

    group_index: running number of the group; index: running number of its first sample.
    """
    samples = [
        Sample(
            uid=uid,
            sample_index=number,
            group_index=group_index,
            index=index + number,
            prompt=copy.deepcopy(row.prompt),
            multimodal_inputs=None if row.multimodal is None else dict(row.multimodal),
            label=copy.deepcopy(row.label),
            metadata=copy.deepcopy(row.metadata),
        )
        for number in range(num_samples)
    ]
    params = dict(sampling_params or {})
    return SampleGroup(uid=uid, samples=samples, data_set=data_set, sampling_params=params, rm_type=rm_type)
