"""A data source with slime's methods, hosted unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.data.custom import CustomSource, DeliveryRequest
from buffer_rl.errors import DataError
from buffer_rl.options.section import compose
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.registry import PluginRegistry

FILE = Path(__file__).with_name("slime_style.py")


def hosted(name: str, folder: Path) -> CustomSource:
    options: dict[str, Any] = {"data_source_path": f"{FILE}:{name}", "run_dir": str(folder), "n_samples_per_prompt": 2}
    return CustomSource(compose(CORE_SECTIONS)(**options), PluginRegistry())


def take(source: CustomSource, number: int, num_groups: int, first: int, state: bytes = b"") -> tuple[list[Any], bytes]:
    delivery = source.take(DeliveryRequest(number=number, num_groups=num_groups, first_group=first, state=state))
    shown = [
        (group.uid.row, [(sample.prompt, sample.label, sample.group_index, sample.index) for sample in group])
        for group in delivery.groups
    ]
    return shown, delivery.state


def test_it_hands_out_and_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    source = hosted("CountingSource", tmp_path)
    first, state = take(source, 0, 2, 0)
    assert first == [
        (0, [("0+1=", "1", 0, 0), ("0+1=", "1", 0, 1)]),
        (1, [("1+1=", "2", 1, 2), ("1+1=", "2", 1, 3)]),
    ]
    rest, _ = take(source, 1, 1, 2, state)
    resumed = hosted("CountingSource", tmp_path)
    assert take(resumed, 1, 1, 2, state)[0] == rest == [(2, [("2+1=", "3", 2, 4), ("2+1=", "3", 2, 5)])]
    assert resumed.num_rows() == 100


def test_one_that_saves_under_a_name_of_its_own_is_told_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected: a file below args\.save"):
        take(hosted("SavesElsewhere", tmp_path), 0, 1, 0)


def test_the_folders_of_the_run_are_what_they_were_after_each_call(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_source_path": f"{FILE}:CountingSource", "n_samples_per_prompt": 2, "save": "mine"}
    args = compose(CORE_SECTIONS)(**options)
    source = CustomSource(args, PluginRegistry())
    _, state = take(source, 0, 1, 0)
    resumed = CustomSource(args, PluginRegistry())
    take(resumed, 1, 1, 1, state)
    assert (user_args(args).save, user_args(args).load) == ("mine", None)
    assert not Path("mine").exists()
