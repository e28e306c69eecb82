"""The page on plugins says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import PluginError
from buffer_rl.hookspecs import Hooks
from buffer_rl.kinds import KINDS
from buffer_rl.plugins import PluginRegistry
from buffer_rl.types import Sample

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_every_kind_has_a_row_with_its_flags_and_arguments() -> None:
    rows = {row.split("|")[1].strip(" `"): row for row in PAGE.read_text(encoding="utf-8").splitlines() if "|" in row}
    for kind in KINDS.values():
        for flag in kind.flags:
            assert f"`{flag}`" in rows[kind.name], kind.name
        for argument in (*kind.positional, *(kind.methods if kind.name != "trainer" else ())):
            assert re.search(rf"\b{argument}\b", rows[kind.name]), (kind.name, argument)


def test_every_hook_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in dir(Hooks):
        if name.startswith("buffer_rl_"):
            assert f"`{name}`" in text


def test_the_examples_work_and_the_error_reads_as_shown(place: Any) -> None:
    reward, hooks = blocks("python")
    place.write("my_reward.py", reward)
    place.write("my_hooks.py", hooks)
    registry = PluginRegistry.from_flags(["my_hooks"])
    score = registry.resolve("reward", "my_reward:score")
    assert score(None, Sample(response=" yes", label="yes")) == 1.0
    with pytest.raises(PluginError) as caught:
        registry.locate("reward", "my_reward:scroe")
    assert f"buffer-rl: error: {caught.value}\n" in PAGE.read_text(encoding="utf-8")
