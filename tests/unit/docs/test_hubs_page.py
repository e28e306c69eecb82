"""The pages of the hubs list every file and every registered name, and their examples work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.kinds.marks import is_for_rows
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status

ROOT = Path(__file__).resolve().parents[3]
PAGE = "".join((ROOT / hub / "README.md").read_text(encoding="utf-8") for hub in ("rm_hub", "filter_hub"))
KINDS = ("reward", "group_reward", "filter", "sample_filter", "buffer_filter")
HUB_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for hub in ("rm_hub", "filter_hub")
    for path in (ROOT / hub).glob("*.py")
    if path.name != "__init__.py"
)
REGISTERED = [
    (kind, name, reference)
    for kind in KINDS
    for name, reference in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    .get(f"buffer_rl.{kind}", {})
    .items()
]


@pytest.mark.parametrize("file", HUB_FILES)
def test_every_file_of_the_hubs_is_on_the_page_and_has_tests(file: str) -> None:
    assert f"`{file}`" in PAGE
    folder, name = file.split("/")
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "unit" / folder).glob("test_*.py"))
    module = f"{folder}.{name.removesuffix('.py')}"
    assert module in tests or f"from {folder} import {name.removesuffix('.py')}" in tests


def test_every_file_named_on_the_page_exists() -> None:
    assert set(re.findall(r"`((?:rm|filter)_hub/\w+\.py)`", PAGE)) == set(HUB_FILES)


@pytest.mark.parametrize(("kind", "name", "reference"), REGISTERED)
def test_every_registered_name_has_a_row_and_meets_its_contract(kind: str, name: str, reference: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{reference}`" in line]
    assert f"`{name}`" in row
    registry = PluginRegistry()
    assert registry.resolve_registered(kind, name) is registry.resolve(kind, reference)


def test_the_page_says_which_rewards_rows_may_choose() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    for kind, name, reference in REGISTERED:
        if kind == "reward":
            (row,) = [row for row in rows if f"`{reference}`" in row]
            marked = is_for_rows(PluginRegistry().resolve_registered(kind, name))
            assert row.split("|")[-3].strip().startswith("yes" if marked else "no: "), row


def test_every_reward_and_filter_file_names_its_source() -> None:
    for file in HUB_FILES:
        head = (ROOT / file).read_text(encoding="utf-8").split('"""')[1]
        assert re.search(r"arXiv:|https://|reasoning_gym|No reward", head), file


def test_the_examples_of_the_page_work(tmp_path: Any) -> None:
    reward_code, filter_code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_reward.py").write_text(reward_code)
    (tmp_path / "my_filter.py").write_text(filter_code)
    registry = PluginRegistry()
    args = SimpleNamespace(rollout_max_response_len=10, reward_key=None)
    uid = GroupUid("data", 0, 0)
    sample = Sample(
        uid=uid, response=r"\boxed{0.5}", label="1/2", response_length=5, status=Status.COMPLETED, reward=0.5
    )
    score = registry.resolve("reward", f"{tmp_path / 'my_reward.py'}:score")
    assert score(args, sample) == pytest.approx(0.95)
    medium = registry.resolve("filter", f"{tmp_path / 'my_filter.py'}:medium")
    assert medium(args, SampleGroup(uid=uid, samples=[sample])).keep
