"""The page of metrics: every name that the source gives has a row, and no row is of a name that it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from buffer_rl.data.difficulty import Pool
from harness.metric_names import PAGE, check_metrics, documented, emitted, without_row


@pytest.fixture(scope="module")
def given() -> set[str]:
    return emitted()


def test_every_name_that_the_source_gives_has_a_row(given: set[str]) -> None:
    assert len(given) > 100
    assert without_row(given) == []


def test_every_row_is_of_a_name_that_the_source_gives(given: set[str]) -> None:
    rows = [re.sub("<[^>]*>", "<>", name) for name in documented()]
    assert len(rows) == len(set(rows)) > 100
    assert sorted(set(rows) - given) == []


def test_a_row_says_unit_meaning_range_and_remedy() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    assert [row[0] for row in rows if len(row) != 5 or not row[2].strip()] == []


def test_the_row_of_pools_names_those_of_the_order_by_difficulty() -> None:
    (row,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `rollout/pool_<"))
    assert set(re.findall("`([a-z]+)`", row)) == {pool.name.lower() for pool in Pool}


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("rollout/raw_reward", True),
        ("rollout/raw_rewards", False),
        ("rollout/drop_zero_std", True),
        ("rollout/drop_", False),
        ("production/truncated_ratio", True),  # as rollout/truncated_ratio
        ("production/invented", False),
        ("eval/gsm8k", True),
        ("eval/gsm8k/response_len", True),
        ("staleness/response_len", False),
        ("perf/peak_memory/critic_device_gb", True),
    ],
)
def test_a_name_is_explained_by_the_row_that_it_fits(name: str, is_known: bool) -> None:
    assert without_row([name]) == ([] if is_known else [name])


def test_a_run_with_a_metric_that_is_not_on_the_page_fails(tmp_path: Path) -> None:
    line = {"step": 0, "kind": "train", "train/loss": 1.0, "train/invented": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    with pytest.raises(AssertionError, match="train/invented"):
        check_metrics(tmp_path)
    check_metrics(tmp_path, own=["train/invented"])
