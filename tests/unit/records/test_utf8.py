"""Text that UTF-8 cannot encode, which user code may give anywhere, is written without an error and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger, RunRecord
from buffer_rl.errors import BufferStateError
from buffer_rl.files.checkpoint import manifest_content, parse_manifest
from buffer_rl.observe.metrics import MetricsFile, read_metrics
from buffer_rl.observe.run_folder import RUN_FILE, SampleDump, read_facts, read_jsonl, write_facts
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid
from buffer_rl.records.utf8 import encodable, lone_surrogate

LONE = "a\ud800b\udcff"
TEXTS = st.text(st.characters(), max_size=8)  # with surrogates
VALUES = st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


@given(VALUES)
@pytest.mark.slow
def test_a_lone_surrogate_is_found_exactly_where_utf_8_fails_and_none_is_left_in_what_is_encodable(value: Any) -> None:
    def is_utf8(value: Any) -> bool:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return False
        return True

    assert bool(lone_surrogate(value)) == (not is_utf8(value))
    assert is_utf8(encodable(value))
    if is_utf8(value):
        assert encodable(value) == value


def test_the_first_one_is_named_as_an_escape() -> None:
    assert lone_surrogate({"a": [1, {LONE: 2}]}) == "\\ud800"
    assert encodable(LONE) == "a\\ud800b\\udcff"


def test_samples_are_written_and_read_again_as_they_are(tmp_path: Path) -> None:
    dump = SampleDump(tmp_path)
    texts = [LONE, "line\u2028separator\x85\x0b", "end"]
    dump.write(0, [{"response": text, "label": {text: [text]}} for text in texts])
    dump.close()
    read = read_jsonl(tmp_path / "samples.jsonl")
    assert [(record["response"], record["label"]) for record in read] == [(text, {text: [text]}) for text in texts]
    SampleDump(tmp_path, resume_step=1).close()  # the lines are written anew
    assert read_jsonl(tmp_path / "samples.jsonl") == read


def test_a_last_line_that_ends_within_a_character_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes('{"a": "ü"}\n{"a": "ü'.encode()[:-1])
    assert read_jsonl(path) == [{"a": "ü"}]


def test_metrics_and_the_facts_of_a_run_are_written(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.write({f"rollout/drop_{LONE}": 1.0}, 0)
    metrics.close()
    assert read_metrics(tmp_path) == [{"step": 0, "kind": "rollout", f"rollout/drop_{LONE}": 1.0}]
    args = compose(CORE_SECTIONS)(rollout_stop=[LONE])
    write_facts(tmp_path, args)
    assert (tmp_path / RUN_FILE).read_bytes().decode()
    assert read_facts(tmp_path).changed == {"--rollout-stop": [LONE]}


def test_a_checkpoints_manifest_is_written() -> None:
    content = manifest_content(1, {"options": {"rollout_stop": [LONE]}}, {})
    assert parse_manifest(content, "").facts == {"options": {"rollout_stop": ["a\\ud800b\\udcff"]}}


def test_the_ledger_takes_any_reason_and_the_notes_any_text() -> None:
    ledger, uid = Ledger.in_memory(), GroupUid("s", 0, 0)
    ledger.reject(uid, ledger.lease(uid, 0), LONE)
    assert ledger.entry(uid).reason == "a\\ud800b\\udcff"
    record = RunRecord(ledger)
    record.update_metadata({LONE: [LONE]})
    assert RunRecord(ledger).metadata == record.metadata == {"a\\ud800b\\udcff": ["a\\ud800b\\udcff"]}


def test_notes_without_an_end_are_refused_as_no_json() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BufferStateError, match="not JSON"):
        RunRecord(Ledger.in_memory()).update_metadata({"a": endless})
