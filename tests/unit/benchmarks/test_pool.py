"""When the pools' benchmark ends with status 1."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("growth", "put", "get", "status"),
    [(1.3, 3.0, 1.0, 0), (2.0, 4.0, 6.0, 0), (2.1, 4.0, 6.0, 1), (1.0, 2.9, 6.0, 1), (1.0, 4.0, 0.9, 1)],
)
def test_a_missed_target_ends_in_status_1(
    script: Callable[[str], ModuleType], growth: float, put: float, get: float, status: int
) -> None:
    assert script("pool").verdict(growth, {"put": put, "get": get}, producers=1) == status
