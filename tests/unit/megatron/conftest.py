"""Ranks of Megatron for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.megatron_ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks that run functions of ``harness`` modules; started once for all tests."""
    pool = RankPool()
    yield pool
    pool.close()
