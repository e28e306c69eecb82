"""Several sources: their shares, their epochs, and resuming at any point."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.data.order import Drawn, EpochIterator, JoinedOrder, RowOrder, WeightedOrder
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import CheckpointError, ConfigError, DataError
from buffer_rl.options.section import compose

weights_lists = st.lists(st.sampled_from([0.01, 0.1, 0.3, 0.7, 1.0, 2.5, 40.0]), min_size=2, max_size=5)


def sizes_for(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 6), min_size=count, max_size=count)


def weighted(sizes: Sequence[int], weights: Sequence[float], shuffle: bool = True) -> WeightedOrder:
    return WeightedOrder(partial(EpochIterator, shuffle=shuffle), sizes, weights, seeds=range(len(sizes)))


def joined(sizes: Sequence[int], seed: int, shuffle: bool = True) -> JoinedOrder:
    return JoinedOrder(partial(EpochIterator, shuffle=shuffle), sizes, seed=seed)


def check_epochs(drawn: list[tuple[int, int]], size: int) -> None:
    """Rows and epochs of one source, in order: every row once before the next epoch begins."""
    for number, epoch in enumerate(range(0, len(drawn), size)):
        part = drawn[epoch : epoch + size]
        assert {e for _, e in part} == {number}
        assert len({row for row, _ in part}) == len(part)
        assert {row for row, _ in part} <= set(range(size))


@given(data=st.data(), weights=weights_lists, num_drawn=st.integers(1, 120))
def test_after_any_number_of_groups_every_share_is_met_to_less_than_one(
    data: st.DataObject, weights: list[float], num_drawn: int
) -> None:
    order = weighted(data.draw(sizes_for(len(weights))), weights)
    exact = [Fraction(str(weight)) for weight in weights]
    counts = [0] * len(weights)
    for drawn in range(1, num_drawn + 1):
        counts[order.next()[0]] += 1
        for count, weight in zip(counts, exact, strict=True):
            assert abs(count - drawn * weight / sum(exact)) < 1


@given(data=st.data(), weights=weights_lists, num_drawn=st.integers(1, 80), shuffle=st.booleans())
def test_every_row_of_a_source_comes_once_in_each_of_its_epochs(
    data: st.DataObject, weights: list[float], num_drawn: int, shuffle: bool
) -> None:
    sizes = data.draw(sizes_for(len(weights)))
    rows = list(itertools.islice(iter(weighted(sizes, weights, shuffle).next, None), num_drawn))
    for source, size in enumerate(sizes):
        check_epochs([(row.row, row.epoch) for own, row in rows if own == source], size)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), num_drawn=st.integers(1, 60), seed=st.integers(0, 9))
def test_joined_sources_are_one_data_set(sizes: list[int], num_drawn: int, seed: int) -> None:
    order = joined(sizes, seed)
    rows = [order.next() for _ in range(num_drawn)]
    starts = list(itertools.accumulate(sizes, initial=0))
    check_epochs([(starts[source] + row.row, row.epoch) for source, row in rows], sum(sizes))
    plain = joined(sizes, seed, shuffle=False)
    wanted = [(source, Drawn(row, 0)) for source, size in enumerate(sizes) for row in range(size)]
    assert [plain.next() for _ in wanted] == wanted


@given(data=st.data(), weights=weights_lists, before=st.integers(0, 40), is_joined=st.booleans())
def test_an_order_goes_on_from_its_cursors(
    data: st.DataObject, weights: list[float], before: int, is_joined: bool
) -> None:
    sizes = data.draw(sizes_for(len(weights)))

    def make() -> RowOrder:
        return joined(sizes, seed=3) if is_joined else weighted(sizes, weights)

    order, resumed = make(), make()
    for _ in range(before):
        order.next()
    for begun, there in zip(resumed.iterators, order.iterators, strict=True):
        begun.seek(there.cursor)
    assert [resumed.next() for _ in range(30)] == [order.next() for _ in range(30)]


def test_shares_of_one_to_three_come_as_evenly_as_they_can() -> None:
    order = weighted([9, 9], [1, 3])
    assert Counter(tuple(order.next()[0] for _ in range(4)).count(0) for _ in range(5)) == {1: 5}


def write(folder: Path, name: str, num_rows: int) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": f"{name}{row}", "label": 1}) + "\n" for row in range(num_rows)))
    return str(path)


def source_of(paths: list[str], weights: list[float] | None, **options: Any) -> PromptDataSource:
    values = {"prompt_data": paths, "prompt_data_weights": weights, "n_samples_per_prompt": 2, **options}
    return PromptDataSource(compose(CORE_SECTIONS).model_validate(values))


@given(
    before=st.integers(0, 25),
    weights=st.one_of(st.none(), st.just([0.7, 0.3]), st.just([1.0, 9.0])),
    shuffle=st.booleans(),
)
def test_a_restored_mixture_goes_on_as_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory, before: int, weights: list[float] | None, shuffle: bool
) -> None:
    folder = tmp_path_factory.mktemp("mix")
    paths = [write(folder, "a", 3), write(folder, "b", 5)]
    saved = source_of(paths, weights, rollout_shuffle=shuffle)
    saved.get_samples(before)
    state = json.loads(json.dumps(saved.state_dict()))
    restored = source_of(paths, weights, rollout_shuffle=shuffle)
    restored.load_state_dict(state)
    assert restored.get_samples(20) == saved.get_samples(20)


def test_uids_keep_the_hash_of_their_own_source(tmp_path: Path) -> None:
    paths = [write(tmp_path, "a", 2), write(tmp_path, "b", 4)]
    source = source_of(paths, None)
    assert source.source_hashes == [source_of([path], None).source_hashes[0] for path in paths]
    groups = source.get_samples(12)
    assert Counter((g.uid.source, g.uid.epoch) for g in groups) == {
        (source.source_hashes[number], epoch): size for number, size in enumerate((2, 4)) for epoch in (0, 1)
    }
    for group in groups:
        assert group[0].prompt == f"{'ab'[source.source_hashes.index(group.uid.source)]}{group.uid.row}"
    assert len(source) == 6


def test_sources_of_equal_length_are_not_visited_in_the_same_order(tmp_path: Path) -> None:
    source = source_of([write(tmp_path, "a", 20), write(tmp_path, "b", 20)], [1, 1])
    rows: dict[str, list[int]] = {}
    for group in source.get_samples(40):
        rows.setdefault(group.uid.source, []).append(group.uid.row)
    first, second = rows.values()
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], []])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, weights: list[float]) -> None:
    paths = [write(tmp_path, "a", 1), write(tmp_path, "b", 1)]
    with pytest.raises(ConfigError, match="--prompt-data-weights"):
        source_of(paths, weights)


def test_the_same_rows_twice_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 3)
    with pytest.raises(DataError, match="the same rows come twice"):
        source_of([path, f"{path}@[0:]"], None)
    assert len(source_of([f"{path}@[:1]", f"{path}@[1:]"], None)) == 3


def test_state_of_other_weights_or_sources_is_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path, "a", 2), write(tmp_path, "b", 2)]
    state = source_of(paths, [1, 2]).state_dict()
    for other in (source_of(paths, [2, 1]), source_of(paths, None), source_of(paths[::-1], [1, 2])):
        with pytest.raises(CheckpointError):
            other.load_state_dict(state)


def test_a_source_with_images_mixes_with_one_of_text_and_a_field_that_no_source_has_is_refused(tmp_path: Path) -> None:
    images = tmp_path / "images.jsonl"
    images.write_text('{"prompt": "p", "pictures": ["a.png"]}\n')
    paths = [str(images), write(tmp_path, "text", 1)]
    groups = source_of(paths, None, multimodal_keys={"image": "pictures"}).get_samples(2)
    found = {group[0].prompt: [sample.multimodal_inputs for sample in group] for group in groups}
    assert found == {"p": [{"image": ["a.png"]}] * 2, "text0": [None, None]}
    with pytest.raises(DataError, match="no row of any source has the video field 'clips'"):
        source_of(paths, None, multimodal_keys={"video": "clips"})
