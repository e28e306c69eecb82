"""Real tasksets of verifiers. ``make test-verifiers`` installs it and sets VERIFIERS_PYTHON, the Python of its
environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def verifiers_python() -> str:
    """The Python that has verifiers."""
    if not (found := os.environ.get("VERIFIERS_PYTHON")):
        pytest.skip("VERIFIERS_PYTHON does not name the Python of an environment with verifiers: make test-verifiers")
    return found
