"""The page of campaigns keeps the rows of those that were not run."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def test_a_campaign_that_was_run_replaces_its_row_and_no_other(script: Callable[[str], ModuleType]) -> None:
    page = "# Campaigns\n\n| campaign | day |\n|---|---|\n| rank | old |\n| ledger | old |\n| gone | old |\n"
    rows = {"ledger": "| ledger | new |", "driver": "| driver | new |"}
    assert script("campaign").merged(page, rows) == ["| ledger | new |", "| driver | new |", "| rank | old |"]
