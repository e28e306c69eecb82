"""When the pools' benchmark ends with status 1."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("growth", "put", "get", "share", "status"),
    [
        (1.3, 3.0, 1.0, 0.5, 0),
        (2.0, 4.0, 6.0, 0.9, 0),
        (2.1, 4.0, 6.0, 0.9, 1),
        (1.0, 2.9, 6.0, 0.9, 1),
        (1.0, 4.0, 0.9, 0.9, 1),
        (1.0, 4.0, 6.0, 0.49, 1),
    ],
)
def test_a_missed_target_ends_in_status_1(
    script: Callable[[str], ModuleType], growth: float, put: float, get: float, share: float, status: int
) -> None:
    assert script("pool").verdict(growth, {"put": put, "get": get}, share, producers=1) == status


def test_every_operation_is_measured(script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert script("pool_operations").print_operations((1000,)) == 1.0  # of the only size to itself
    assert "at 1,000 rows" in capsys.readouterr().out
