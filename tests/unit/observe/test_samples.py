from __future__ import annotations

import json
import math

import numpy as np
import pytest

from buffer_rl.errors import DataError
from buffer_rl.observe.run_folder import (
    MAX_MESSAGE,
    MAX_MESSAGES,
    SampleDump,
    read_jsonl,
    sample_record,
    transcript_of,
)
from buffer_rl.records.groups import GroupUid, Sample, Status, VersionSpan


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


# Line ends of Unicode that JSON writes as they are, and a carriage return, which it escapes.
LINE_ENDS = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1e\re"


def test_a_resumed_run_keeps_every_record_before_its_checkpoint_whatever_the_texts_hold(tmp_path):
    dump = SampleDump(tmp_path)
    for step in range(3):
        dump.write(step, [{"uid": str(step), "prompt": LINE_ENDS, "response": LINE_ENDS}] * 2)
    dump.close()
    SampleDump(tmp_path, resume_step=2).close()
    records = read_jsonl(tmp_path / "samples.jsonl")
    assert [record["rollout_id"] for record in records] == [0, 0, 1, 1]
    assert {text for record in records for text in (record["prompt"], record["response"])} == {LINE_ENDS}


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "samples.jsonl").write_bytes(b'{"a": "\xe2\x80\xa8"}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"samples\.jsonl:2: not JSON"):
        read_jsonl(tmp_path / "samples.jsonl")


def test_the_transcript_of_an_agent_is_recorded_with_its_calls_and_bounded():
    sample = Sample(prompt="p", response="r", status=Status.FAILED, remove_sample=True)
    assert "transcript" not in sample_record(sample)
    call = {"id": "1", "function": {"name": "add", "arguments": "{}"}}
    sample.messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "é"}]},
    ]
    record = sample_record(sample)
    assert record["masked"] is True
    assert record["transcript"] == [
        ["user", "hi"],
        ["assistant", '{"name": "add", "arguments": "{}"}'],
        ["tool", '[{"type": "text", "text": "é"}]'],
    ]
    long = transcript_of([{"role": "user", "content": f"{number} " + "x" * 3000} for number in range(1000)])
    assert len(long) == MAX_MESSAGES + 1
    assert long[MAX_MESSAGES // 2] == ["", "… 960 more messages"]
    assert [text.split()[0] for _, text in (long[0], long[-1])] == ["0", "999"]
    assert max(len(text) for _, text in long) < MAX_MESSAGE + 40
    assert [text for _, text in transcript_of([{"content": 1, "tool_calls": 7}, {}])] == ["1", ""]
