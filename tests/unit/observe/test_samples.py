from __future__ import annotations

import json
import math

import numpy as np

from buffer_rl.observe.run_folder import SampleDump, sample_record
from buffer_rl.types import GroupUid, Sample, Status, VersionSpan


def test_a_sample_is_dumped_with_what_one_reads_it_for(tmp_path):
    sample = Sample(
        uid=GroupUid("abc", 7, 1),
        sample_index=3,
        prompt="cat=",
        response="tac",
        label="tac",
        reward=1.0,
        status=Status.COMPLETED,
        weight_versions=[VersionSpan(4, 0, 4)],
    )
    dump = SampleDump(tmp_path)
    dump.write(4, [sample_record(sample)])
    dump.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {
        "rollout_id": 4,
        "uid": "abc:7:1",
        "sample_index": 3,
        "prompt": "cat=",
        "response": "tac",
        "label": "tac",
        "reward": 1.0,
        "status": "completed",
        "versions": [[4, 0, 4]],
    }


def test_values_that_json_lacks_are_written_as_text_or_plain_numbers(tmp_path):
    dump = SampleDump(tmp_path)
    dump.write(0, [{"reward": {"a": math.nan, "b": np.float32(0.5)}, "label": {1, 2}.__class__, "prompt": [{"x": 1}]}])
    dump.close()
    record = json.loads((tmp_path / "samples.jsonl").read_text())
    assert record["reward"] == {"a": "nan", "b": 0.5}
    assert record["prompt"] == [{"x": 1}]
    assert isinstance(record["label"], str)
