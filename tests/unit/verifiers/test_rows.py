"""Tasksets as paths of data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose
from buffer_rl_verifiers.options import VerifiersOptions, buffer_rl_local_paths


def resolved(**options: Any) -> dict[str, Any]:
    given = {"verifiers_python": sys.executable, **options}
    return dict(buffer_rl_local_paths(compose([*CORE_SECTIONS, VerifiersOptions])(**given), {}))


def test_names_of_tasksets_become_files_of_their_tasks_and_other_paths_stay(toy: Path, tmp_path: Path) -> None:
    found = resolved(
        prompt_data=["mine.jsonl", "verifiers://toy"], eval_prompt_data=["held=verifiers://toy@[1:3]", "x=y.jsonl"]
    )
    mine, path = found["prompt_data"]
    assert (mine, found["eval_prompt_data"]) == ("mine.jsonl", [f"held={path}@[1:3]", "x=y.jsonl"])
    assert Path(path).parent == tmp_path / "cache" / "buffer_rl" / "verifiers"
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["first", "say 1", "say 2", "say 3", "say 4"]
    task = {"idx": 2, "name": "first", "description": None, "prompt": "say 2"}
    assert rows[2]["metadata"] == {"verifiers": {"taskset": "toy", "task": task}}
    fewer = {"taskset": {"num_tasks": 4}}  # of what is named by its contents
    assert resolved(prompt_data=["verifiers://toy"], verifiers_args=fewer)["prompt_data"] != [path]
    assert resolved(prompt_data=["mine.jsonl"]) == {}


def test_a_slice_from_the_end_counts_from_the_last_task(toy: Path) -> None:
    path, _, rows = resolved(prompt_data=["verifiers://toy@[-4:3]"])["prompt_data"][0].partition("@")
    assert rows == "[-4:3]"
    assert len(Path(path).read_text().splitlines()) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paths", "number"),
    [
        (["verifiers://toy@[0:3]", "verifiers://toy@[1:7]"], 7),
        (["verifiers://toy@[0:3]", "verifiers://toy@[1:]"], None),
        (["verifiers://toy@[0:3]", "verifiers://toy@[:-2]"], None),
        (["verifiers://toy"], None),
    ],
)
def test_of_an_infinite_taskset_as_many_tasks_are_read_as_slices_name(
    toy: Path, paths: list[str], number: int | None
) -> None:
    endless = {"prompt_data": paths, "verifiers_args": {"taskset": {"num_tasks": None}}}
    if number is None:
        with pytest.raises(ConfigError, match=r"toy is infinite: take a part of it, verifiers://toy@\[0:1000\]"):
            resolved(**endless)
    else:
        found = resolved(**endless)
        assert found == resolved(**endless)  # named by its contents
        first, _, _ = found["prompt_data"][0].partition("@[")
        assert len(Path(first).read_text().splitlines()) == number


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        pytest.param(
            {"prompt_data": ["verifiers://none"]},
            ["--prompt-data verifiers://none", "taskset 'none' not found"],
            marks=pytest.mark.slow,
        ),
        ({"prompt_data": ["verifiers://"]}, ["names no taskset", "--prompt-data", "verifiers://TASKSET"]),
        ({"eval_prompt_data": ["verifiers://toy@[a]"]}, ["names no taskset", "--eval-prompt-data"]),
        ({"verifiers_python": "/no/such/python"}, ["cannot be run", "--verifiers-python /no/such/python"]),
        pytest.param(
            {"verifiers_args": {"taskset": {"num_tasks": "x"}}},
            ["cannot be listed", "num_tasks", "--verifiers-args"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_listed_is_an_error_with_the_end_of_what_was_printed(
    toy: Path, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**{"prompt_data": ["verifiers://toy"], **options})
    for part in parts:
        assert part in str(caught.value)


def test_a_python_without_verifiers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="No module named 'verifiers'") as caught:
        resolved(prompt_data=["verifiers://toy"])
    assert "make verifiers-env" in caught.value.hint
