from __future__ import annotations

import orjson

from buffer_rl.buffer.codec import group_from_json, group_to_json
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup


def test_prompts_survive_the_way_through_json_bytes_of_images_included() -> None:
    uid = GroupUid("a:b", 3, 1)
    image = {"bytes": b"\x00\xff", "path": None}
    sample = Sample(
        uid=uid, index=5, group_index=2, prompt="p", label=[1], metadata={"a": {"b": 1}},
        multimodal_inputs={"image": [image], "raw": b""},
    )  # fmt: skip
    group = SampleGroup(uid=uid, samples=[sample], attempt=4)
    assert group_from_json(orjson.loads(orjson.dumps(group_to_json(group)))) == group
