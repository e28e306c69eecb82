from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.feed import LocalFeed
from buffer_rl.data.eval_sets import parse_eval_sets
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.errors import CheckpointError, ConfigError, DataError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status


def write(folder: Path, num_rows: int, name: str = "data.jsonl") -> str:
    path = folder / name
    rows = [{"prompt": f"p{row}", "label": row, "metadata": {"tags": [row]}} for row in range(num_rows)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def source_of(path: str, **options: Any) -> PromptDataSource:
    values = {"prompt_data": path, "n_samples_per_prompt": 2, **options}
    return PromptDataSource(compose(CORE_SECTIONS).model_validate(values))


def facts(groups: list[SampleGroup]) -> list[tuple[Any, ...]]:
    return [(str(g.uid), *[(s.prompt, s.sample_index, s.group_index, s.index) for s in g]) for g in groups]


def test_samples_carry_identity_and_the_rows_fields(tmp_path: Path) -> None:
    source = source_of(write(tmp_path, 3), rollout_shuffle=False)
    groups = source.get_samples(4)
    assert [g.uid for g in groups] == [GroupUid(source.source_hashes[0], row, epoch) for row, epoch in
                                       ((0, 0), (1, 0), (2, 0), (0, 1))]  # fmt: skip
    last = groups[3]
    assert [(s.sample_index, s.group_index, s.index) for s in last] == [(0, 3, 6), (1, 3, 7)]
    assert all((s.uid, s.prompt, s.label, s.status) == (last.uid, "p0", 0, Status.PENDING) for s in last)
    assert groups[1][0].metadata == {"tags": [1]}
    assert last.data_set == ""


def test_a_group_is_made_again_from_its_uid_and_number(tmp_path: Path) -> None:
    source = source_of(write(tmp_path, 3))
    groups = source.get_samples(7)
    for number, group in enumerate(groups):
        assert source.group_of(group.uid, number) == group
    assert source.get_samples(1)[0][0].group_index == 7
    mine = groups[0].uid.source
    for foreign in (GroupUid("other", 0, 0), GroupUid(mine, 3, 0), GroupUid(mine, -1, 0)):
        with pytest.raises(DataError, match="not from this data source"):
            source.group_of(foreign, 0)


def test_samples_share_nothing_that_can_be_changed(tmp_path: Path) -> None:
    source = source_of(write(tmp_path, 1))
    first = source.get_samples(1)[0]
    first[0].metadata["tags"].append("changed")
    assert first[1].metadata == {"tags": [0]}
    assert source.get_samples(1)[0][0].metadata == {"tags": [0]}


def test_a_group_travels_as_one_prompt_and_arrives_as_a_list_of_its_own_samples(tmp_path: Path) -> None:
    source = source_of(write(tmp_path, 3), n_samples_per_prompt=64)
    (group,) = source.get_samples(1)
    message = pickle.dumps(group)
    assert len(message) < 1.1 * len(pickle.dumps(source_of(write(tmp_path, 3)).get_samples(1)[0]))
    arrived = pickle.loads(message)
    assert type(arrived.samples) is list
    assert arrived == group
    assert [(s.sample_index, s.index) for s in arrived] == [(number, number) for number in range(64)]
    arrived[0].metadata["tags"].append(2)
    assert all(s.metadata["tags"] != arrived[0].metadata["tags"] for s in (*arrived[1:], *group))


def test_an_empty_label_is_of_one_sample_alone(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(json.dumps({"prompt": "p", "label": []}))
    (group,) = source_of(str(path)).get_samples(1)
    group[0].label.append("mine")
    assert group[1].label == []


def test_a_group_that_was_worked_on_travels_with_what_it_holds(tmp_path: Path) -> None:
    (group,) = source_of(write(tmp_path, 3)).get_samples(1)
    group[1].response = "an answer"
    group.samples.append(Sample(response="one more"))
    assert [s.response for s in pickle.loads(pickle.dumps(group))] == ["", "an answer", "one more"]


def test_a_batch_may_span_any_number_of_epochs(tmp_path: Path) -> None:
    source = source_of(write(tmp_path, 3))
    groups = source.get_samples(8)
    assert Counter(g.uid.epoch for g in groups) == {0: 3, 1: 3, 2: 2}
    for epoch in (0, 1):
        assert sorted(g.uid.row for g in groups if g.uid.epoch == epoch) == [0, 1, 2]
    assert len({g.uid.row for g in groups if g.uid.epoch == 2}) == 2
    state = source.state_dict()
    assert state["cursors"] == [[2, 2]]


@given(num_rows=st.integers(1, 7), seed=st.integers(0, 5), sizes=st.lists(st.integers(0, 9), max_size=6))
def test_the_order_does_not_depend_on_how_it_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, seed: int, sizes: list[int]
) -> None:
    path = write(tmp_path_factory.mktemp("order"), num_rows)
    one_by_one = source_of(path, rollout_seed=seed)
    pieces = [group for size in sizes for group in one_by_one.get_samples(size)]
    assert facts(pieces) == facts(source_of(path, rollout_seed=seed).get_samples(sum(sizes)))
    counts = Counter((g.uid.epoch, g.uid.row) for g in pieces)
    assert set(counts.values()) <= {1}


@given(
    num_rows=st.integers(1, 6),
    shuffle=st.booleans(),
    before=st.integers(0, 20),
    after=st.integers(1, 20),
)
def test_a_restored_source_goes_on_as_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, shuffle: bool, before: int, after: int
) -> None:
    folder = tmp_path_factory.mktemp("resume")
    path = write(folder, num_rows)
    saved = source_of(path, rollout_shuffle=shuffle)
    saved.get_samples(before)
    state = json.loads(json.dumps(saved.state_dict()))
    restored = source_of(path, rollout_shuffle=shuffle)
    restored.get_samples(1)
    restored.load_state_dict(state)
    assert facts(restored.get_samples(after)) == facts(saved.get_samples(after))


@pytest.mark.parametrize(
    "change",
    [
        {"sources": ["0"]},
        {"weights": [1.0]},
        {"seed": 1},
        {"shuffle": False},
        {"format": 0},
        {"cursors": [[0, 4]]},
        {"cursors": [[0, -1]]},
        {"cursors": [[None, 0]]},
        {"cursors": [[0, 0], [0, 0]]},
        {"cursors": [[0]]},
        {"cursors": None},
        {"index": True},
        {"returned": [["other:0:0", 0, 0, 2]]},
        {"returned": [["0:0", 0, 0, 2]]},
        {"returned": [1]},
        {"returned": None},
    ],
)
def test_state_of_other_data_or_damaged_state_is_refused_and_changes_nothing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    source = source_of(write(tmp_path, 3))
    source.get_samples(2)
    state = source.state_dict()
    with pytest.raises(CheckpointError):
        source.load_state_dict({**state, **change})
    assert source.state_dict() == state
    with pytest.raises(CheckpointError):
        source.load_state_dict({})


def test_a_source_is_as_long_as_its_rows(tmp_path: Path) -> None:
    assert len(source_of(write(tmp_path, 7))) == 7


def test_without_prompts_there_is_no_source() -> None:
    with pytest.raises(ConfigError, match="--prompt-data"):
        PromptDataSource(compose(CORE_SECTIONS)())


def test_evaluation_sets_are_handed_out_in_file_order(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    values = {"eval_prompt_data": [f"dev={path}@[1:3]", f"test={path}"], "n_samples_per_eval_prompt": 2}
    source = EvalSource(compose(CORE_SECTIONS).model_validate(values))
    assert list(source.datasets) == ["dev", "test"]
    dev = source.groups("dev")
    assert [g[0].prompt for g in dev] == ["p1", "p2"]
    assert [(g.data_set, g.uid.row, g.uid.epoch, len(g)) for g in dev] == [("dev", 0, 0, 2), ("dev", 1, 0, 2)]
    assert [s.index for g in dev for s in g] == [0, 1, 2, 3]
    assert facts(source.groups("dev")) == facts(dev)
    assert [g.data_set for g in source.all_groups()] == ["dev"] * 2 + ["test"] * 4


@pytest.mark.parametrize(
    "sets", [["dev"], ["=x"], ["dev="], ["a b=x"], ["a=x", "a=y"], ["a", "x", "b"], ["a", "x", "a=y"]]
)
def test_malformed_evaluation_sets_are_refused(sets: list[str]) -> None:
    with pytest.raises(ConfigError, match="--eval-prompt-data"):
        EvalSource(compose(CORE_SECTIONS).model_validate({"eval_prompt_data": sets}))


def test_a_name_and_its_path_may_be_two_words() -> None:
    sets = parse_eval_sets(["aime", "/data/x=1.jsonl", "dev=/d.jsonl", "test", "/t.jsonl@[:3]"])
    assert [(each.name, each.path) for each in sets] == [
        ("aime", "/data/x=1.jsonl"),
        ("dev", "/d.jsonl"),
        ("test", "/t.jsonl@[:3]"),
    ]


def test_two_evaluation_sets_of_one_file_have_groups_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    args: Any = compose(CORE_SECTIONS)(eval_prompt_data=[f"one={path}", f"two={path}"])
    groups = EvalSource(args).all_groups()
    assert [(group.data_set, group[0].prompt) for group in groups] == [
        ("one", "a"),
        ("one", "b"),
        ("two", "a"),
        ("two", "b"),
    ]
    assert len({group.uid for group in groups}) == 4
    assert all(GroupUid.parse(str(group.uid)) == group.uid for group in groups)


def mended(path: str) -> str:
    """The file with its last row changed, under another name."""
    text = Path(path).read_text(encoding="utf-8")
    changed = Path(path).with_suffix(".mended.jsonl")
    changed.write_text(text[: text.rindex('"label"')] + '"label": "mended"}', encoding="utf-8")
    return str(changed)


@pytest.mark.parametrize("options", [{}, {"prompt_data_weights": [1.0, 3.0]}], ids=["joined", "weighted"])
def test_rows_that_were_mended_take_their_places_in_the_order_if_they_are_accepted(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    paths = [write(tmp_path, 3, "a.jsonl"), write(tmp_path, 5, "b.jsonl")]
    source = source_of(paths, **options)  # type: ignore[arg-type]
    source.get_samples(5)
    state = source.state_dict()
    rest = source.get_samples(20)
    now = [paths[0], mended(paths[1])]
    with pytest.raises(CheckpointError, match=r"--accept-changed-rows"):
        source_of(now, **options).load_state_dict(state)  # type: ignore[arg-type]
    resumed = source_of(now, **options, accept_changed_rows=True)  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    assert resumed.source_hashes == source.source_hashes
    groups = resumed.get_samples(7)
    later = json.loads(json.dumps(resumed.state_dict()))
    again = source_of(now, **options)  # type: ignore[arg-type]
    again.load_state_dict(later)  # what this run saves is of its own data
    groups += again.get_samples(13)
    assert facts(groups) == facts(rest)
    label = {group.uid: group[0].label for group in rest}
    last = GroupUid(source.source_hashes[1], 4, 0)
    differing = {group.uid.row for group in groups if group[0].label != label[group.uid]}
    assert differing == {4}
    assert again.group_of(last, 0)[0].label == "mended"
    with pytest.raises(CheckpointError):
        source_of(paths, **options).load_state_dict(later)  # type: ignore[arg-type]


def test_a_queued_prompt_is_made_again_from_a_mended_row_and_a_begun_response_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    source = source_of(path, rollout_shuffle=False)
    groups = source.get_samples(3)
    resumed = source_of(mended(path), rollout_shuffle=False, accept_changed_rows=True)
    resumed.load_state_dict(source.state_dict())
    assert LocalFeed(resumed).resize(groups[2], 2)[0].label == "mended"
    groups[2][0].tokens, groups[2][0].response_length = [1, 2], 1
    assert LocalFeed(resumed).resize(groups[2], 2)[0].label == 2
